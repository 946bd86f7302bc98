"""The parts of Kubernetes objects that values may hold, typed so that misspelt keys fail before they reach a cluster.

Source: the Kubernetes API reference, core/v1 and networking.k8s.io/v1, at 1.34.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from pd_shadow.chart.base import Values

Quantity = int | float | str
Labels = dict[str, str]
PortNumber = Annotated[int, Field(ge=1, le=65535)]


class LocalReference(Values):
    """A Secret or another object of the same namespace."""

    name: str = Field(min_length=1)


class KeySelector(Values):
    """One key of a Secret or ConfigMap."""

    name: str = Field(min_length=1)
    key: str = Field(min_length=1)
    optional: bool | None = None


class FieldSelector(Values):
    """A field of the pod."""

    field_path: str
    api_version: str | None = None


class ResourceFieldSelector(Values):
    """A resource of a container."""

    resource: str
    container_name: str | None = None
    divisor: Quantity | None = None


class EnvSource(Values):
    """Where a variable comes from."""

    secret_key_ref: KeySelector | None = None
    config_map_key_ref: KeySelector | None = None
    field_ref: FieldSelector | None = None
    resource_field_ref: ResourceFieldSelector | None = None


class EnvVar(Values):
    """One environment variable."""

    name: str = Field(min_length=1)
    value: str | None = None
    value_from: EnvSource | None = None


class KeyToPath(Values):
    """A key and the file it becomes."""

    key: str
    path: str
    mode: int | None = None


class ConfigMapVolume(Values):
    """Files from a ConfigMap."""

    name: str
    items: list[KeyToPath] | None = None
    default_mode: int | None = None
    optional: bool | None = None


class SecretVolume(Values):
    """Files from a Secret."""

    secret_name: str
    items: list[KeyToPath] | None = None
    default_mode: int | None = None
    optional: bool | None = None


class EmptyDir(Values):
    """A folder as long-lived as the pod."""

    medium: Literal["", "Memory"] | None = None
    size_limit: Quantity | None = None


class HostPath(Values):
    """A folder of the node."""

    path: str
    type: str | None = None


class ClaimVolume(Values):
    """A PersistentVolumeClaim."""

    claim_name: str
    read_only: bool | None = None


class NfsVolume(Values):
    """A share of an NFS server."""

    server: str
    path: str
    read_only: bool | None = None


class CsiVolume(Values):
    """An ephemeral volume of a CSI driver."""

    driver: str
    read_only: bool | None = None
    fs_type: str | None = None
    volume_attributes: Labels | None = None
    node_publish_secret_ref: LocalReference | None = None


class Volume(Values):
    """One volume of a pod; exactly one source."""

    name: str = Field(min_length=1)
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    empty_dir: EmptyDir | None = None
    host_path: HostPath | None = None
    persistent_volume_claim: ClaimVolume | None = None
    nfs: NfsVolume | None = None
    csi: CsiVolume | None = None


class VolumeMount(Values):
    """Where a container sees a volume."""

    name: str = Field(min_length=1)
    mount_path: str = Field(min_length=1)
    sub_path: str | None = None
    sub_path_expr: str | None = None
    read_only: bool | None = None
    mount_propagation: str | None = None


class ResourceClaim(Values):
    """A claim of dynamic resource allocation."""

    name: str
    request: str | None = None


class Resources(Values):
    """Requests and limits of a container."""

    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None
    claims: list[ResourceClaim] | None = None


class Toleration(Values):
    """A taint the pod tolerates."""

    key: str | None = None
    operator: Literal["Exists", "Equal", "Lt", "Gt"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Requirement(Values):
    """One expression of a selector."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values_: list[str] | None = Field(default=None, alias="values")


class LabelSelector(Values):
    """Objects by their labels."""

    match_labels: Labels | None = None
    match_expressions: list[Requirement] | None = None


class NodeTerm(Values):
    """Nodes by labels and fields."""

    match_expressions: list[Requirement] | None = None
    match_fields: list[Requirement] | None = None


class NodeTerms(Values):
    """Any of these."""

    node_selector_terms: list[NodeTerm]


class PreferredNode(Values):
    """Nodes that are better than others."""

    weight: int = Field(ge=1, le=100)
    preference: NodeTerm


class _During(Values):
    # The API's names are too long for camelCase rules to get right: "...DuringExecution".
    model_config = ConfigDict(alias_generator=None)


class NodeAffinity(_During):
    """Which nodes."""

    required: NodeTerms | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: list[PreferredNode] | None = Field(default=None, alias="preferredDuringSchedulingIgnoredDuringExecution")


class PodTerm(Values):
    """Beside which pods."""

    topology_key: str
    label_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None
    namespaces: list[str] | None = None
    match_label_keys: list[str] | None = None
    mismatch_label_keys: list[str] | None = None


class PreferredPods(Values):
    """Neighbours that are better than others."""

    weight: int = Field(ge=1, le=100)
    pod_affinity_term: PodTerm


class PodAffinity(_During):
    """Beside which pods, or away from which."""

    required: list[PodTerm] | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: list[PreferredPods] | None = Field(default=None, alias="preferredDuringSchedulingIgnoredDuringExecution")


class Affinity(Values):
    """Where pods go."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpread(Values):
    """How evenly pods are spread; without a selector the chart puts in that of the workload."""

    max_skew: int = Field(ge=1)
    topology_key: str
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    match_label_keys: list[str] | None = None
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    node_taints_policy: Literal["Honor", "Ignore"] | None = None


class Capabilities(Values):
    """Linux capabilities."""

    add: list[str] | None = None
    drop: list[str] | None = None


class SeccompProfile(Values):
    """A seccomp or AppArmor profile."""

    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]
    localhost_profile: str | None = None


class SeLinuxOptions(Values):
    """SELinux labels."""

    level: str | None = None
    role: str | None = None
    type: str | None = None
    user: str | None = None


class SecurityContext(Values):
    """Of a container."""

    allow_privilege_escalation: bool | None = None
    capabilities: Capabilities | None = None
    privileged: bool | None = None
    read_only_root_filesystem: bool | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    run_as_user: int | None = None
    seccomp_profile: SeccompProfile | None = None
    app_armor_profile: SeccompProfile | None = None
    se_linux_options: SeLinuxOptions | None = None


class PodSecurityContext(Values):
    """Of a pod."""

    fs_group: int | None = None
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    run_as_user: int | None = None
    seccomp_profile: SeccompProfile | None = None
    app_armor_profile: SeccompProfile | None = None
    se_linux_options: SeLinuxOptions | None = None
    supplemental_groups: list[int] | None = None


class IpBlock(Values):
    """Addresses."""

    cidr: str
    except_: list[str] | None = Field(default=None, alias="except")


class Peer(Values):
    """Who a network policy speaks of."""

    ip_block: IpBlock | None = None
    namespace_selector: LabelSelector | None = None
    pod_selector: LabelSelector | None = None


class PolicyPort(Values):
    """Which port."""

    port: PortNumber | str | None = None
    end_port: PortNumber | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] | None = None


class EgressRule(Values):
    """Whom pods may call."""

    to: list[Peer] | None = None
    ports: list[PolicyPort] | None = None
