"""The chart's values. Defaults here are the chart's; `helm/pd-shadow/values.yaml` is generated from them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from controller.config import ControllerConfig
from pd_shadow.chart import kubernetes as k8s
from pd_shadow.chart.base import DocumentPart, Values
from pd_shadow.engine.vllm.gpu_command import GpuEngineCommand
from pd_shadow.gateway.config import GatewayConfig

USER_ID = 10001
"""The user of both images."""

MODEL_KEY = r"^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$"

Duration = Annotated[str, Field(pattern=r"^([0-9]+(ms|s|m|h))+$")]
Percentage = Annotated[str, Field(pattern=r"^(100|[0-9]{1,2})%$")]
Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]

CONTROLLER_OWNED = ("listen", "metrics_listen", "tls", "auth", "election")
GATEWAY_OWNED = ("controller", "listen", "controller_tls", "controller_token_file", "tls", "api_keys_file")
ENGINE_OWNED = (
    "model", "served_name", "role", "name", "address", "controller", "controller_tls", "controller_token_file", "host",
    "port", "drain_seconds",
)  # fmt: skip
"""Keys of the three documents that the chart writes itself."""

ControllerDocument = Annotated[dict[str, Any], DocumentPart(ControllerConfig, *CONTROLLER_OWNED)]
GatewayDocument = Annotated[dict[str, Any], DocumentPart(GatewayConfig, *GATEWAY_OWNED)]
EngineDocument = Annotated[
    dict[str, Any],
    DocumentPart(
        GpuEngineCommand, *ENGINE_OWNED, stand_ins={"model": "model", "served_name": "model", "role": "prefill"}
    ),
]


class Image(Values):
    """Where an image comes from."""

    registry: str = Field(default="", pattern=r"^\S*$")
    """Registry host, such as registry.example.com; empty for the node's default."""
    repository: str = Field(default="", pattern=r"^[a-z0-9][a-z0-9._/-]*$")
    tag: str = Field(default="", pattern=r"^(\w[\w.-]{0,127})?$")
    """Empty: the chart's appVersion."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """sha256:…; wins over the tag."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"


class ServiceAccount(Values):
    """The account pods run under."""

    create: bool = True
    name: str = ""
    """Empty: made from the release's name."""
    annotations: k8s.Labels = {}


class DisruptionBudget(Values):
    """How many pods a node drain may take at a time."""

    enabled: bool = True
    max_unavailable: Count | Percentage = 1


class Service(Values):
    """How others reach the pods."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: k8s.Labels = {}


class ControllerService(Service):
    """How others reach the controller's gRPC port."""

    port: k8s.PortNumber = 7070


class GatewayService(Service):
    """How others reach the OpenAI API."""

    port: k8s.PortNumber = 8000


class Workload(Values):
    """What every workload can be told."""

    resources: k8s.Resources | None = None
    """Requests and limits. No CPU limit by default: it throttles where there is CPU to spare."""
    node_selector: k8s.Labels | None = None
    tolerations: list[k8s.Toleration] | None = None
    affinity: k8s.Affinity | None = None
    topology_spread_constraints: list[k8s.TopologySpread] | None = None
    priority_class_name: str | None = None
    pod_annotations: k8s.Labels | None = None
    pod_labels: k8s.Labels | None = None
    extra_env: list[k8s.EnvVar] | None = None
    extra_args: list[str] | None = None
    """Further arguments of the command."""
    extra_volumes: list[k8s.Volume] | None = None
    extra_volume_mounts: list[k8s.VolumeMount] | None = None
    pod_security_context: k8s.PodSecurityContext | None = k8s.PodSecurityContext(
        run_as_non_root=True,
        run_as_user=USER_ID,
        run_as_group=USER_ID,
        fs_group=USER_ID,
        seccomp_profile=k8s.SeccompProfile(type="RuntimeDefault"),
    )
    security_context: k8s.SecurityContext | None = k8s.SecurityContext(
        allow_privilege_escalation=False,
        read_only_root_filesystem=True,
        capabilities=k8s.Capabilities(drop=["ALL"]),
    )
    startup_seconds: Positive = 60
    """How long a container may take until its first good probe; then it is restarted."""
    termination_grace_period_seconds: int | None = None
    """Unset: the drain time of its configuration and 15 s. A value that is not above the drain time is refused."""
    pod_disruption_budget: DisruptionBudget = DisruptionBudget()


class Election(Values):
    """Which of several controllers decides; through a Lease of the release's namespace."""

    enabled: bool = True
    """With one replica there is no election, whatever is said here."""
    lease_duration_seconds: Positive = 15
    renew_deadline_seconds: Positive = 10
    retry_period_seconds: Positive = 2


class Rbac(Values):
    """Roles and their bindings: namespaced, and only what the enabled parts call."""

    create: bool = True


class Controller(Workload):
    """The control plane."""

    replicas: Positive = 2
    """One decides, the others wait for its Lease."""
    config: ControllerDocument = {}
    """controller.yaml, less what the chart sets: listen, metrics_listen, tls, auth, election, discovery.kubernetes."""
    election: Election = Election()
    service: ControllerService = ControllerService()
    service_account: ServiceAccount = ServiceAccount()
    rbac: Rbac = Rbac()
    pod_disruption_budget: DisruptionBudget = DisruptionBudget(enabled=False)
    """Off: a controller that waits for the Lease is not ready, so a budget would forbid the leader's eviction for ever.
    Gateways and engines bridge the seconds of a change."""
    resources: k8s.Resources | None = k8s.Resources(
        requests={"cpu": "500m", "memory": "512Mi"}, limits={"memory": "2Gi"}
    )


class Autoscaling(Values):
    """A HorizontalPodAutoscaler."""

    enabled: bool = False
    min_replicas: Positive = 2
    max_replicas: Positive = 10
    target_cpu_utilization_percentage: Positive | None = 70
    target_in_flight_calls: Positive | None = None
    """Calls per gateway, from the metric pd_shadow_gateway_in_flight_calls; needs a custom-metrics adapter."""


class Gateway(Workload):
    """The OpenAI API in front of the engines."""

    enabled: bool = True
    replicas: Positive = 2
    config: GatewayDocument = {}
    """gateway.yaml, less what the chart sets: controller, listen, TLS and token files."""
    autoscaling: Autoscaling = Autoscaling()
    service: GatewayService = GatewayService()
    service_account: ServiceAccount = ServiceAccount()
    resources: k8s.Resources | None = k8s.Resources(requests={"cpu": "1", "memory": "1Gi"}, limits={"memory": "4Gi"})


class Rdma(Values):
    """Network hardware for KV transfers."""

    resources: dict[str, k8s.Quantity] = {}
    """Such as {"rdma/hca_shared_devices_a": 1}: added to the limits, with the capability to pin memory."""
    networks: str = ""
    """Secondary networks: the value of the annotation k8s.v1.cni.cncf.io/networks."""


class PortRange(Values):
    """Ports, both ends included."""

    first: k8s.PortNumber = 20000
    last: k8s.PortNumber = 20099


class ModelCache(Values):
    """Where model files are kept: a claim, a folder of the node, or (neither) a folder that goes with the pod."""

    claim_name: str = ""
    host_path: str = ""
    size_limit: k8s.Quantity = "200Gi"
    """Of the folder that goes with the pod."""


class SecretKey(Values):
    """One key of a Secret."""

    secret_name: str = ""
    """Empty: none."""
    key: str = "token"


class EnginePool(Workload):
    """Engines of one role. What a pool leaves out comes from `engines`."""

    replicas: Count = 1
    gpus: Count = 1
    """GPUs of one replica; also its tensor parallel size unless `engine.tensor_parallel_size` says otherwise."""
    gpu_resource: str = "nvidia.com/gpu"
    image: Image = Image(repository="pd-shadow-vllm")
    plugin: bool = True
    """The plugin in the engine; false: a stock engine, which only discovery finds."""
    engine: EngineDocument = {}
    """engine.yaml: KV settings, host tier, plugin, side-channel port, extra_args for vLLM and the rest, as
    `pd-shadow serve engine` reads them, less what the chart sets: model, served_name, role, name, address, controller,
    host, port."""
    rdma: Rdma = Rdma()
    nixl_ports: PortRange = PortRange()
    """Ports UCX listens on for transfers over TCP, so that network policies can name them."""
    shared_memory: k8s.Quantity = "16Gi"
    """Size of /dev/shm; host tiers and tensor parallelism use it, and it counts as memory."""
    model_cache: ModelCache = ModelCache()
    hugging_face_token: SecretKey = SecretKey()
    startup_seconds: Positive = 3600
    drain_seconds: Positive = 120
    """How long an engine may go on with running requests when its pod is ended."""


class Emulated(Values):
    """Engines in real time without model or GPU, to try the system on any cluster."""

    enabled: bool = False
    speed: float = Field(default=1.0, gt=0)
    """Seconds of emulated time per real second; the same for all engines."""


class Model(Values):
    """One model: a prefill and a decode pool, or a colocated one."""

    model: str = Field(min_length=1)
    """A Hugging Face repository, or a folder in the container; of emulated engines a model of the catalogue
    (pd_shadow/perf/models.py), such as L3.1-8B."""
    served_name: str = ""
    """The name clients use; empty: the key of this entry."""
    engine: EngineDocument = {}
    """engine.yaml of all its pools; a pool's own settings win."""
    emulated: Emulated = Emulated()
    prefill: EnginePool | None = None
    decode: EnginePool | None = None
    colocated: EnginePool | None = None


class KubernetesDiscovery(Values):
    """Engines that are already there: pods labelled `pdshadow.dev/role` (prefill, decode or colocated)."""

    enabled: bool = False
    namespaces: list[Namespace] = []
    """Empty: the release's own."""
    label_selector: str = "pdshadow.dev/role"
    pod_selector: k8s.LabelSelector = k8s.LabelSelector(
        match_expressions=[k8s.Requirement(key="pdshadow.dev/role", operator="Exists")]
    )
    """The same pods for network policies, which know no selector strings."""


class Discovery(Values):
    """How instances are found that do not attach by themselves."""

    kubernetes: KubernetesDiscovery = KubernetesDiscovery()


class Issuer(Values):
    """A cert-manager issuer."""

    name: str = ""
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    group: str = "cert-manager.io"


class CertManager(Values):
    """Certificates from cert-manager."""

    enabled: bool = False
    issuer_ref: Issuer = Issuer()
    duration: Duration = "2160h"
    renew_before: Duration = "720h"


class Tls(Values):
    """TLS between gateways, engines and the controller, and on the gateway's API."""

    enabled: bool = False
    mutual: bool = True
    """The controller asks gateways and engines for a certificate of the same CA."""
    cert_manager: CertManager = CertManager()
    controller_secret: str = ""
    """Secret with tls.crt, tls.key and ca.crt of the controller, for the name RELEASE-controller.NAMESPACE.svc.DOMAIN
    (and with `mutual` also good for a client: probes use it); empty with cert-manager, which makes it."""
    client_secret: str = ""
    """The same for gateways and engines as clients of the controller."""
    gateway_secret: str = ""
    """The same for the gateway's API, for the name RELEASE-gateway.NAMESPACE.svc.DOMAIN. Empty and no cert-manager: the
    API is plain HTTP."""


class Auth(Values):
    """Tokens, each in a key of a Secret: one a line, as docs/security.md says. All three scopes, or none: then no token
    is asked for."""

    admin_token: SecretKey = SecretKey()
    gateway_token: SecretKey = SecretKey()
    instance_token: SecretKey = SecretKey()
    api_keys: SecretKey = SecretKey(key="api-keys")
    """Keys that the gateway's clients may use; docs/security.md has the format."""


class NetworkPolicy(Values):
    """Who may talk to whom. Without a policy-enforcing network plugin these do nothing."""

    enabled: bool = True
    api_from: list[k8s.Peer] = []
    """Who may call the gateway; empty: anyone."""
    admin_from: list[k8s.Peer] = []
    """Who else may call the controller's gRPC port: operators, routers."""
    metrics_from: list[k8s.Peer] = [k8s.Peer(namespace_selector=k8s.LabelSelector())]
    """Who may read metrics. Default: every pod of the cluster; name Prometheus' namespace here."""
    extra_egress: list[k8s.EgressRule] = []
    """Whom gateways and controller may call besides: engines outside the cluster."""
    engine_egress: list[k8s.EgressRule] = [
        k8s.EgressRule(ports=[k8s.PolicyPort(port=443, protocol="TCP")]),
    ]
    """Whom engines may call besides each other and the controller. Default: HTTPS, to load models."""


class Monitor(Values):
    """A ServiceMonitor or PodMonitor of the Prometheus operator."""

    enabled: bool = False
    interval: Duration = "15s"
    labels: k8s.Labels = {}


class PrometheusRule(Values):
    """Alerts."""

    enabled: bool = False
    labels: k8s.Labels = {}
    runbook_base_url: str = "https://github.com/pd-shadow/pd-shadow/blob/main/docs/operations.md"
    """An alert's runbook is at this address, # and the alert's name in small letters."""


class Metrics(Values):
    """Prometheus."""

    service_monitor: Monitor = Monitor()
    """For controller and gateway."""
    pod_monitor: Monitor = Monitor()
    """For the engines: vLLM's own metrics and the plugin's."""
    prometheus_rule: PrometheusRule = PrometheusRule()


class Dashboard(Values):
    """A ConfigMap that Grafana's sidecar loads."""

    enabled: bool = False
    labels: k8s.Labels = {"grafana_dashboard": "1"}
    annotations: k8s.Labels = {}


class Grafana(Values):
    """Grafana."""

    dashboard: Dashboard = Dashboard()


class TestPod(Values):
    """The pod of `helm test`."""

    enabled: bool = True


class ChartValues(Values):
    """All values of the chart."""

    global_: dict[str, Any] = Field(default={}, alias="global")
    """Not used; Helm hands it to every chart."""
    name_override: str = Field(default="", pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$")
    fullname_override: str = ""
    common_labels: k8s.Labels = {}
    """On every object."""
    common_annotations: k8s.Labels = {}
    image: Image = Image(repository="pd-shadow")
    """Controller, gateway, emulated engines."""
    image_pull_secrets: list[k8s.LocalReference] = []
    controller: Controller = Controller()
    gateway: Gateway = Gateway()
    engines: EnginePool = EnginePool()
    """Defaults of every pool."""
    models: dict[Annotated[str, Field(pattern=MODEL_KEY)], Model] = Field(
        default={}, json_schema_extra={"additionalProperties": False}
    )
    """Engines that the chart starts, by a short name (DNS label of at most 22 characters)."""
    discovery: Discovery = Discovery()
    tls: Tls = Tls()
    auth: Auth = Auth()
    network_policy: NetworkPolicy = NetworkPolicy()
    metrics: Metrics = Metrics()
    grafana: Grafana = Grafana()
    tests: TestPod = TestPod()
    cluster_domain: str = "cluster.local"
