"""Energy of an instance, from watts per phase."""

from dataclasses import dataclass, replace

from pd_shadow.perf.gpus import H100, GpuSpec

IDLE_WATTS = 75.0
"""An H100 that has no work and clocks down (splitwise-sim, MIT, configs/power_model/constant.yaml)."""
HELD_READY_IDLE_WATTS = 300.0
"""An H100 that waits with its clocks up (fleet-sim of vLLM Semantic Router, which cites ML.ENERGY v3)."""


@dataclass(frozen=True)
class PowerModel:
    """Watts of one GPU by what it does.

    The paper states no energy model. Idle watts decide how much shadow work on idle prefill instances costs, so results
    should be given for both presets, LOW_IDLE and HIGH_IDLE.
    """

    idle_watts: float
    # Iterations bound by memory, and bound by arithmetic; in between, by the share that is bound by arithmetic.
    decode_watts: float
    prefill_watts: float

    @classmethod
    def of(cls, gpu: GpuSpec) -> "PowerModel":
        return cls(gpu.idle_watts, gpu.decode_watts, gpu.prefill_watts)

    def with_idle(self, watts: float) -> "PowerModel":
        return replace(self, idle_watts=watts)

    def watts(self, compute_bound_fraction: float) -> float:
        """Watts of one GPU in an iteration (`IterationLatency.compute_bound_fraction`)."""
        return self.decode_watts + (self.prefill_watts - self.decode_watts) * compute_bound_fraction

    def busy_joules(self, seconds: float, compute_bound_fraction: float, gpus: int = 1) -> float:
        """Energy of an iteration on so many GPUs."""
        return gpus * seconds * self.watts(compute_bound_fraction)

    def idle_joules(self, seconds: float, gpus: int = 1) -> float:
        """Energy of so many GPUs that wait for work."""
        return gpus * seconds * self.idle_watts


LOW_IDLE = PowerModel.of(H100).with_idle(IDLE_WATTS)
HIGH_IDLE = PowerModel.of(H100).with_idle(HELD_READY_IDLE_WATTS)
