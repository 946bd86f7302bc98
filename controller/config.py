"""The controller's configuration: one strict model for YAML and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pd_shadow.common.address import ListenAddress
from pd_shadow.common.config import Config
from pd_shadow.common.logs import LogFormat
from pd_shadow.common.tls import ServerTls
from pd_shadow.common.tracing import TracingConfig
from pd_shadow.policy.approach import DEFAULT, TRAITS, Approach, named
from transfer.chunks import CHUNK_TOKENS

ENVIRONMENT_PREFIX = "PD_SHADOW_CONTROLLER"


def _base_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a base URL, such as http://10.0.0.7:8000")
    return value.rstrip("/")


def _approach(value: object) -> Approach:
    return named(str(value))


BaseUrl = Annotated[str, AfterValidator(_base_url)]
Seconds = Annotated[float, Field(gt=0, json_schema_extra={"unit": "seconds"})]
# RFC 1123: what Kubernetes calls a DNS label, and a DNS subdomain.
DnsLabel = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
DnsSubdomain = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]


class StaticInstance(Config):
    """One stock engine, named by hand."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Unique in the cluster: letters, digits, dots, underscores and dashes."""
    model: str = Field(min_length=1, max_length=256)
    """The name clients use in `model`."""
    role: Literal["prefill", "decode", "colocated"]
    """What the engine does with a call."""
    url: BaseUrl
    """Base URL of its OpenAI-compatible server, such as http://10.0.0.7:8000."""
    hardware: str = Field(default="", max_length=128)
    """Instances of the same value share an accelerator (or a demo's CPU): shadow work then waits until all of them are
    free of normal work. Unset: the instance has hardware of its own.
    """


class KubernetesConfig(Config):
    """Pods as instances, and how to reach the API server; the leader election uses the same access."""

    enabled: bool = False
    """Whether pods are looked for."""
    namespaces: tuple[DnsLabel, ...] = ()
    """Where the pods are; empty for the controller's own namespace."""
    label_selector: str = Field(default="pdshadow.dev/role", min_length=1)
    """Which pods are instances."""
    api_server: BaseUrl | None = None
    """Base URL of the API server. Unset: that of the cluster this process runs in."""
    token_file: Path | None = None
    """File with its token, read again for every request, since the kubelet rotates it. Unset: the service account's."""
    ca_file: Path | None = None
    """PEM file with its authority. Unset: the service account's, or the system's for an `api_server` given here."""

    @model_validator(mode="after")
    def _unique_namespaces(self) -> KubernetesConfig:
        twice = next((n for n in self.namespaces if self.namespaces.count(n) > 1), None)
        if twice is not None:
            raise ValueError(f"namespaces: {twice!r} stands there twice; name each namespace once")
        return self


class DiscoveryConfig(Config):
    """Where instances come from."""

    static: tuple[StaticInstance, ...] = ()
    """Stock engines named by hand; engines with the plugin attach by themselves."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Pods as instances."""
    poll_interval_seconds: Seconds = 0.5
    """Time between two looks at an instance; its /metrics page costs the engine's API server some 10 ms a time."""
    poll_timeout_seconds: Seconds = 5.0
    """An instance that does not answer within this time has missed the look."""
    suspect_after_misses: int = Field(default=3, ge=1)
    """Misses in a row until an instance gets nothing new; a refused connection counts as all of them."""
    gone_after_seconds: Seconds = 10.0
    """Time without a sign of life until an instance is given up, with everything it held."""

    @model_validator(mode="after")
    def _unique_names(self) -> DiscoveryConfig:
        seen: set[str] = set()
        for instance in self.static:
            if instance.name in seen:
                raise ValueError(f"static: two instances are named {instance.name!r}; names must be unique")
            seen.add(instance.name)
        return self

    @model_validator(mode="after")
    def _no_mixed_roles(self) -> DiscoveryConfig:
        firsts: dict[str, StaticInstance] = {}
        for instance in self.static:
            first = firsts.setdefault(instance.model, instance)
            if "colocated" in {first.role, instance.role} and first.role != instance.role:
                raise ValueError(
                    f"static: model {instance.model!r} has {first.name!r} ({first.role}) and {instance.name!r} "
                    f"({instance.role}); give it colocated instances only, or prefill and decode instances only"
                )
        return self


class ShadowConfig(Config):
    """Whether and what to shadow."""

    approach: Annotated[Approach, BeforeValidator(_approach)] = DEFAULT
    """One of the paper's approaches (Table 2) that engines can run; brings the defaults of the next two."""
    enabled: bool | None = None
    """False pauses all shadow work. Unset: as the approach says."""
    chunk_tokens: int = Field(default=CHUNK_TOKENS, ge=256, le=131_072)
    """The unit of a leg and of a push, in tokens of KV (paper section 3.5)."""
    gate_probability: float | None = Field(default=None, ge=0.0, le=1.0)
    """Models below this switch probability get no shadow. Unset: the approach's, 0.25 for predictive and 0 for others.
    """
    top_k: int | None = Field(default=None, ge=1)
    """Shadow only this many of the likeliest other models; unset for all."""
    prefill_deadline_seconds: Seconds = 60.0
    """How long the prefill leg of a chunk may take."""
    export_deadline_seconds: Seconds = 10.0
    """How long an export leg may take."""
    fetch_deadline_seconds: Seconds = 20.0
    """How long a fetch leg may take."""
    backoff_seconds: Seconds = 0.5
    """Wait after a failed leg; doubles with every failure in a row, up to the maximum."""
    max_backoff_seconds: Seconds = 30.0
    """Longest wait after failed legs."""

    @model_validator(mode="after")
    def _something_to_enable(self) -> ShadowConfig:
        if self.enabled and not TRAITS[self.approach].shadows:
            raise ValueError(f"enabled: approach {self.approach} does no shadow work; leave enabled unset")
        return self


class LinksConfig(Config):
    """When a pair of P and D whose transfers fail is left alone for a while."""

    quarantine_after_failures: int = Field(default=3, ge=1)
    """Failures in a row."""
    quarantine_seconds: Seconds = 5.0
    """Time until one probe is let through; doubles with every probe that fails."""
    max_quarantine_seconds: Seconds = 120.0
    """The longest such time."""

    @model_validator(mode="after")
    def _room_to_grow(self) -> LinksConfig:
        if self.max_quarantine_seconds < self.quarantine_seconds:
            raise ValueError(
                f"max_quarantine_seconds: {self.max_quarantine_seconds:g} must not be less than quarantine_seconds, "
                f"{self.quarantine_seconds:g}"
            )
        return self


class AuthConfig(Config):
    """Who may call what: files of bearer tokens, one a line. A scope without a file asks for none."""

    admin_token_file: Path | None = None
    """AdminService and reflection; an admin token is good for the other services too."""
    gateway_token_file: Path | None = None
    """PlacementService."""
    instance_token_file: Path | None = None
    """EngineService."""


class LimitsConfig(Config):
    """Caps on what clients can make the controller hold."""

    max_sessions: int = Field(default=100_000, ge=1)
    """Sessions remembered; the least recently used ones go first."""
    session_idle_seconds: Seconds = 3600.0
    """A session without a call for this long is forgotten."""
    max_calls_in_flight: int = Field(default=20_000, ge=1)
    """Calls beyond are refused."""
    max_call_seconds: Seconds = 3600.0
    """A call that no gateway ended is given up after this time."""
    max_streams: int = Field(default=1_000, ge=1)
    """Streams of gateways, of engines, and of operators who watch: at most this many of each."""
    max_rpcs: int = Field(default=10_000, ge=1)
    """RPCs open at once, streams of every kind included; more are refused."""
    gateway_grace_seconds: Seconds = 10.0
    """A gateway whose shadow stream broke may come back for this long before its calls are given up."""
    events_kept: int = Field(default=2_000, ge=1)
    """Events that operators can still list."""


# What client-go allows: waits between tries are up to this much longer, and the deadline must leave room for one.
RETRY_JITTER = 1.2


class ElectionConfig(Config):
    """One of several controllers leads, by a Kubernetes Lease; names, meanings and defaults are client-go's."""

    enabled: bool = False
    """Whether several controllers may run."""
    lease_name: DnsSubdomain = "pd-shadow-controller"
    """The Lease that they hold in turn."""
    namespace: DnsLabel | None = None
    """Where the Lease is. Unset: the controller's own namespace."""
    identity: str | None = Field(default=None, min_length=1, max_length=256)
    """This controller's name as a holder. Unset: the host name and a random part. A name given here must differ between
    controllers, such as the pod's.
    """
    lease_duration_seconds: int = Field(default=15, ge=1)
    """How long the others wait after the last sign of the leader."""
    renew_deadline_seconds: Seconds = 10.0
    """A leader that could not renew for this long steps down."""
    retry_period_seconds: Seconds = 2.0
    """Wait between two tries to get or renew the Lease."""

    @model_validator(mode="after")
    def _steps_down_before_the_lease_ends(self) -> ElectionConfig:
        if self.lease_duration_seconds <= self.renew_deadline_seconds:
            raise ValueError(
                f"renew_deadline_seconds: {self.renew_deadline_seconds:g} must be less than lease_duration_seconds, "
                f"{self.lease_duration_seconds}, or two controllers could lead at once"
            )
        if self.renew_deadline_seconds <= RETRY_JITTER * self.retry_period_seconds:
            raise ValueError(
                f"retry_period_seconds: {self.retry_period_seconds:g} must be less than renew_deadline_seconds / "
                f"{RETRY_JITTER:g}, which is {self.renew_deadline_seconds / RETRY_JITTER:.3g}"
            )
        return self


class ControllerConfig(Config):
    """Everything `pd-shadow serve controller` can be told."""

    listen: ListenAddress = "127.0.0.1:7070"
    """Address of the gRPC server."""
    metrics_listen: ListenAddress | None = None
    """Address of the Prometheus endpoint; unset for none."""
    tls: ServerTls | None = None
    """TLS of the gRPC server; unset for plain text."""
    auth: AuthConfig = AuthConfig()
    """Who may call what."""
    discovery: DiscoveryConfig = DiscoveryConfig()
    """Where instances come from."""
    shadow: ShadowConfig = ShadowConfig()
    """Whether and what to shadow."""
    links: LinksConfig = LinksConfig()
    """When a link between P and D is left alone."""
    limits: LimitsConfig = LimitsConfig()
    """Caps on what clients can make the controller hold."""
    tracing: TracingConfig | None = None
    """OpenTelemetry traces; unset for none."""
    election: ElectionConfig = ElectionConfig()
    """Which of several controllers leads."""
    grace_seconds: Annotated[float, Field(ge=0)] = 5.0
    """How long running RPCs may go on after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity logged."""
    log_format: LogFormat = "auto"
    """JSON lines, readable lines, or (auto) readable on a terminal and JSON elsewhere."""
