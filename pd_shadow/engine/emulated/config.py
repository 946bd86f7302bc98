"""Emulated engines, as data: one, or a file of many that run in one process."""

import importlib.util
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from pd_shadow.common.address import Address, join_address
from pd_shadow.common.config import Config, ConfigError, parse
from pd_shadow.common.tls import ClientTls
from pd_shadow.engine.settings import PluginSettings, ReporterSettings, Role
from pd_shadow.perf import gpus, models
from pd_shadow.perf.gpus import GpuSpec
from pd_shadow.perf.latency import PREFILL_CHUNK_TOKENS, IterationLatency
from pd_shadow.perf.models import ModelSpec

GPUS = {gpu.name: gpu for gpu in (gpus.H100, gpus.H200)}
LINK_GB_PER_SECOND_PER_GPU = 40.0
"""The simulator's default (sim/config.py); the paper sweeps 10 to 160."""
MAX_REPLICAS = 1024
NIXL_ENGINES = 16
"""More engines in one process move no bytes unless told to: every agent has connections and a thread."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class KvTransfer(StrEnum):
    """What brings KV from P."""

    AUTO = "auto"
    """NIXL where it is installed, otherwise the timed link."""
    NIXL = "nixl"
    TIMED = "timed"


def nixl_installed() -> bool:
    """Whether the extra `transfer` is here, without importing it."""
    return all(importlib.util.find_spec(name) is not None for name in ("nixl", "numpy"))


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _model(name: str) -> str:
    return models.model(name).name


def _gpu(name: str) -> str:
    if name not in GPUS:
        raise ValueError(f"unknown GPU {name!r}; valid: {', '.join(GPUS)}")
    return name


class AttachTo(NamedTuple):
    """The controller that engines attach to, and how."""

    controller: str
    """HOST:PORT."""
    tls: ClientTls | None = None
    token_file: Path | None = None
    hardware: str = ""


class EmulatedEngine(Config):
    """One engine. Lengths are in tokens; where nothing is set, the model and the GPU decide, as in the simulator."""

    name: str = Field(min_length=1, max_length=128, pattern=_NAME)
    model: Annotated[str, AfterValidator(_model)]
    """Full name or figure label of a model of perf/models.py: how long iterations last, and how large KV is."""
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    """The name clients use; unset: the model's. It also decides the tokens: another name is another model."""
    role: Role
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free one."""
    advertised_url: str | None = Field(default=None, pattern=r"^https?://")
    """Base URL under which gateways reach it; unset: http://host:port."""
    speed: Positive = 1.0
    """Seconds of emulated time per real second; the same for all engines of a cluster."""
    gpu: Annotated[str, AfterValidator(_gpu)] = gpus.H100.name
    tensor_parallel: int | None = None
    """Unset: the smallest degree at which weights take at most half of HBM."""
    block_size: int = Field(default=16, ge=1, le=4096)
    kv_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV pool; unset: what the weights leave of HBM."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Unset: the model's window, or the pool if that is smaller."""
    max_num_batched_tokens: int = Field(default=PREFILL_CHUNK_TOKENS, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    link_gb_per_second: Positive | None = None
    """Inbound; unset: 40 per GPU."""
    kv_transfer: KvTransfer = KvTransfer.AUTO
    """With NIXL real bytes move between the engines' memories; how long that takes stays what the link says."""
    kv_bytes_divisor: int = Field(default=1024, ge=1, le=1 << 20)
    """Real bytes of KV are the model's divided by this; P and D must agree."""
    kv_lease_seconds: Positive = 30.0
    """How long P keeps handed-out blocks for a D that never comes, in emulated time."""
    plugin: PluginSettings | None = PluginSettings()
    """As for a vLLM with the plugin; null: a stock engine, which takes shadow legs for requests."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.plugin is not None:
            if self.plugin.reporter is not None:
                raise ValueError("plugin.reporter: set `controller` instead; the rest of it follows from the engine")
            if self.plugin.role not in (None, self.role):
                raise ValueError(f"plugin.role: leave it unset, or {self.role.value} as `role` says")
        self.latency()
        if self.kv_transfer is KvTransfer.NIXL and not nixl_installed():
            raise ValueError(
                "kv_transfer: NIXL is not installed; install it (pip install 'pd-shadow[transfer]'), or set timed"
            )
        if self.context_tokens > self.blocks * self.block_size:
            raise ValueError(
                f"max_model_len: {self.context_tokens} tokens do not fit into a pool of {self.blocks} blocks of "
                f"{self.block_size}; lower it or raise kv_tokens"
            )
        return self

    @property
    def spec(self) -> ModelSpec:
        return models.model(self.model)

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model

    @property
    def gpu_spec(self) -> GpuSpec:
        return GPUS[self.gpu]

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.kv_bytes_per_token

    @property
    def moves_bytes(self) -> bool:
        """Whether NIXL moves the KV; a colocated engine has none to move."""
        if self.kv_transfer is KvTransfer.AUTO:
            return self.role is not Role.COLOCATED and nixl_installed()
        return self.kv_transfer is KvTransfer.NIXL

    @property
    def blocks(self) -> int:
        """Blocks of the KV pool."""
        tokens = self.kv_tokens or self.spec.kv_capacity_tokens(self.gpu_spec, self.tensor_parallel)
        return max(1, tokens // self.block_size)

    @property
    def context_tokens(self) -> int:
        """Longest context, prompt and output."""
        return self.max_model_len or min(self.spec.context_window, self.blocks * self.block_size)

    @property
    def link_bytes_per_second(self) -> float:
        if self.link_gb_per_second is not None:
            return self.link_gb_per_second * 1e9
        return LINK_GB_PER_SECOND_PER_GPU * 1e9 * self.latency().tensor_parallel

    def latency(self) -> IterationLatency:
        """How long its iterations last. Raises ValueError for a degree the model cannot have."""
        return IterationLatency(self.spec, self.gpu_spec, self.tensor_parallel)

    @property
    def url(self) -> str:
        """Where gateways reach it; with port 0, see `url_at`."""
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """Where gateways reach the engine that listens on that port."""
        return (self.advertised_url or f"http://{join_address(self.host, port)}").rstrip("/")

    def attached_to(self, attach: AttachTo | None, port: int) -> PluginSettings:
        """The plugin's settings of this engine, its reporter among them."""
        plugin = self.plugin or PluginSettings()
        if attach is None or self.plugin is None:
            return plugin
        reporter = ReporterSettings(
            controller=attach.controller,
            controller_tls=attach.tls,
            controller_token_file=attach.token_file,
            name=self.name,
            url=self.url_at(port),
            hardware=attach.hardware,
        )
        return plugin.model_copy(update={"reporter": reporter})


class EmulatedGroup(EmulatedEngine):
    """Engines that differ in name and port alone: NAME-0 on `port`, NAME-1 on the next one."""

    replicas: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    """Unset: one engine, under its own name."""

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if self.replicas is not None and self.port and self.port + self.replicas > 65536:
            raise ValueError(f"port: {self.replicas} engines from {self.port} on run out of ports")
        if self.replicas is not None and self.advertised_url is not None:
            raise ValueError("advertised_url: only for one engine; leave it unset with replicas")
        return self

    def engines(self) -> Iterator[EmulatedEngine]:
        given: dict[str, Any] = {name: getattr(self, name) for name in EmulatedEngine.model_fields}
        if self.replicas is None:
            yield EmulatedEngine.model_construct(**given)
            return
        for number in range(self.replicas):
            port = self.port + number if self.port else 0
            yield EmulatedEngine.model_construct(**{**given, "name": f"{self.name}-{number}", "port": port})


class EmulatedEngines(Config):
    """Engines of one process."""

    controller: Address | None = None
    """HOST:PORT of the controller to attach to; unset: to none."""
    controller_tls: ClientTls | None = None
    """TLS to the controller; unset for plain text."""
    controller_token_file: Path | None = None
    """The token to show to the controller, the first one of this file."""
    hardware: str = Field(default="", max_length=128)
    """Engines of the same value share an accelerator: shadow work of one waits for all. Empty: each has its own."""
    engines: tuple[EmulatedGroup, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _access_is_to_a_controller(self) -> Self:
        if self.controller is None and (self.controller_tls is not None or self.controller_token_file is not None):
            raise ValueError("controller_tls, controller_token_file: are for a controller; set it, or leave them unset")
        return self

    @property
    def attach(self) -> AttachTo | None:
        """The controller to attach to; None for none."""
        if self.controller is None:
            return None
        return AttachTo(self.controller, self.controller_tls, self.controller_token_file, self.hardware)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names: set[str] = set()
        ports: set[tuple[str, int]] = set()
        for engine in self.all():
            if engine.name in names:
                raise ValueError(f"engines: two are named {engine.name!r}; names must be unique")
            names.add(engine.name)
            if engine.port and (engine.host, engine.port) in ports:
                raise ValueError(f"engines: {engine.name} has a port, {engine.port}, that another one has")
            ports.add((engine.host, engine.port))
        return self

    def with_only_engine(self, changes: Mapping[str, Any]) -> Self:
        """With other settings of its one engine. Raises ConfigError where there are several, or it cannot be so."""
        if not changes:
            return self
        if len(self.engines) > 1 or self.engines[0].replicas is not None:
            raise ConfigError(f"{', '.join(changes)}: for a file of one engine; set it in the file")
        engine = {**self.engines[0].model_dump(exclude_unset=True), **changes}
        return parse(type(self), {**self.model_dump(exclude_unset=True), "engines": [engine]}, "options")

    def all(self) -> list[EmulatedEngine]:
        """Every engine, groups expanded."""
        engines = [engine for group in self.engines for engine in group.engines()]
        if len(engines) <= NIXL_ENGINES:
            return engines
        return [
            engine.model_copy(update={"kv_transfer": KvTransfer.TIMED})
            if engine.kv_transfer is KvTransfer.AUTO
            else engine
            for engine in engines
        ]
