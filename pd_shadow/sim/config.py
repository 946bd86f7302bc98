"""One run of the simulator, as data. Whatever the paper leaves open is a field here, with what it was set to."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pd_shadow.common.config import Config
from pd_shadow.policy.approach import Approach
from pd_shadow.policy.base import BETA
from pd_shadow.policy.credit import HARVEST_DELTA, ROUTED_DELTA
from pd_shadow.policy.prefill_window import WINDOW_SECONDS
from pd_shadow.policy.shadow_cache import CAP_SHARE, COLD_SECONDS
from pd_shadow.policy.slack import MARGIN, MINIMUM_TOKENS
from pd_shadow.sim.kv_pool import EvictionUnit


class Mode(StrEnum):
    """How a model's instances share prefill and decode."""

    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"


Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PolicySettings(Config):
    """The knobs of the shadow policy; defaults are the paper's."""

    beta: Positive = BETA
    margin: Annotated[float, Field(ge=0, lt=1)] = MARGIN
    routed_delta: Share = ROUTED_DELTA
    harvest_delta: Share = HARVEST_DELTA
    window_seconds: Positive = WINDOW_SECONDS
    minimum_tokens: Annotated[int, Field(ge=1)] = MINIMUM_TOKENS
    cap_share: Share = CAP_SHARE
    cold_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = COLD_SECONDS
    stale_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Normal cached blocks idle for longer are reused before shadow ones, 0: never; None: as the approach has it."""
    extensions_are_normal: bool | None = None
    """Whether what shadow work adds to a context that a call left is evicted with it, not before it. None: where whole
    entries are evicted, which have one class each."""
    recomputes: bool = False
    """Whether shadow KV that is lost before the session's next call is computed again, each time."""
    top_k: Annotated[int, Field(ge=1)] | None = None


class HardwareSettings(Config):
    """What instances run on: H100s, as in the paper."""

    link_gb_per_second_per_gpu: Positive = 40.0
    """Inbound, of a decode instance. The paper sweeps 10 to 160 and does not name its default."""
    host_gb_per_gpu: Positive = 128.0
    """Host tier. The paper finds 64, 128 and 256 to give the same."""
    host_gb_per_second: Positive = 25.0
    """Loads over PCIe; swept from 8 to 64 in the paper."""
    tensor_parallel_factor: Literal[1, 2, 4, 8] = 1
    """Times the model's own degree, to 8 at most."""

    def without_host(self) -> Self:
        """The same with a host tier as by default: equal for all that use none."""
        default = type(self)()
        return self.model_copy(
            update={"host_gb_per_gpu": default.host_gb_per_gpu, "host_gb_per_second": default.host_gb_per_second}
        )


class RunConfig(Config):
    """A run is reproducible from its configuration, the seed in it."""

    models: Annotated[tuple[str, ...], Field(min_length=2, max_length=5)]
    trace: str = "FusionBench"
    """Routed sessions, by the workload's name in the paper's Table 1."""
    mode: Mode = Mode.DISAGGREGATED
    approach: Approach = Approach.HARVEST_SLO
    seed: int = 0
    instances: Annotated[int, Field(ge=1, le=64)] = 4
    """Per model."""
    prefill_instances: Annotated[int, Field(ge=1, le=63)] | None = None
    """Of `instances`; None looks for the split with the highest capacity (appendix B)."""
    load: Annotated[float, Field(gt=0, le=10)] = 0.7
    """ρ: normal traffic, relative to the cluster's own capacity at the peak hour."""
    window: str = "peak"
    normal: str = "azure-conversation"
    normal_trace: Path | None = None
    """Normal traffic from a file in Azure's CSV or Mooncake's JSONL format, brought to the rate of the run and repeated
    as long as the run lasts; `normal` then only says how its hours compare."""
    sessions_per_second: Positive | None = None
    """None: as `demand.SESSIONS_PER_SECOND` has it, in proportion to `instances`."""
    output_scale: Positive = 1.0
    """Times the trace's output lengths, which the paper reports of its testbed only."""
    router: str = "default"
    switch_probability: Share | None = None
    """Of the Markov router."""
    context_window: Annotated[int, Field(ge=8192)] = 131_072
    """At which histories are compacted, in tokens; the paper's traces run to this on every model. Where the KV pool of
    one instance is smaller, that is the window."""
    slo_scale: Positive = 1.0
    chunk_tokens: Annotated[int, Field(ge=64)] = 2048
    keeps_finished: bool = True
    """Whether normal requests that have ended stay cached until their blocks are taken, although nothing hits them."""
    evicts: EvictionUnit = EvictionUnit.BLOCKS
    """How much goes when room is made in a KV pool: blocks in the engine plugin, entries in the paper's words."""
    warm_up_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 120.0
    seconds: Positive = 600.0
    """Sessions that start in this time after the warm-up are measured, to their ends."""
    policy: PolicySettings = PolicySettings()
    hardware: HardwareSettings = HardwareSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mode is Mode.DISAGGREGATED:
            if self.instances < 2:
                raise ValueError("instances: a disaggregated model needs 2 at least, one to prefill and one to decode")
            if self.prefill_instances is not None and self.prefill_instances >= self.instances:
                raise ValueError(
                    f"prefill_instances: {self.prefill_instances} of {self.instances} leaves none to decode"
                )
            if self.approach is Approach.DEDICATED:
                raise ValueError("approach: dedicated adds a colocated instance; set mode: colocated")
        elif self.prefill_instances is not None:
            raise ValueError("prefill_instances: only with mode: disaggregated")
        return self
