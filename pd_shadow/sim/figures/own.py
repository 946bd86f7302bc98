"""An operator's own run: against No Shadow, or every approach on both kinds of cluster."""

from pd_shadow.policy.approach import Approach
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.figures.base import Figure, Scale, Setting, against

_SHOWN = (
    "llm_call_latency_reduction",
    "switch_call_latency_reduction",
    "switch_call_ttft_reduction",
    "token_cost_reduction",
    "hit_rate",
    "energy_per_good_request_increase",
    "normal_slo_attainment_points",
)


def comparison(config: RunConfig, scale: Scale) -> Figure:
    """The configured approach against No Shadow. Raises ValueError when it is No Shadow."""
    if config.approach is Approach.NO_SHADOW:
        raise ValueError("approach: no-shadow is what the others are compared with; name another one, or use --what-if")
    name = f"{config.mode.value}, {config.approach.value}"
    return Figure("run", " / ".join(config.models), [Setting(name, against(_repeated(config, scale)))], _SHOWN)


def what_if(config: RunConfig, scale: Scale) -> Figure:
    """Every approach, colocated and disaggregated; each against No Shadow on its own kind of cluster.

    Raises ValueError where there are too few instances for both kinds.
    """
    if config.instances < 2:
        raise ValueError("instances: 2 at least for --what-if, which compares disaggregated clusters, too")
    settings = []
    for mode in Mode:
        for approach in Approach:
            if approach is Approach.NO_SHADOW or (mode is Mode.DISAGGREGATED and approach is Approach.DEDICATED):
                continue
            split = config.prefill_instances if mode is Mode.DISAGGREGATED else None
            variant = {**config.model_dump(), "mode": mode, "approach": approach, "prefill_instances": split}
            runs = _repeated(RunConfig.model_validate(variant), scale)
            settings.append(Setting(f"{mode.value}, {approach.value}", against(runs)))
    return Figure("what-if", " / ".join(config.models), settings, _SHOWN)


def _repeated(config: RunConfig, scale: Scale) -> list[RunConfig]:
    """Seeds from the configured one on, at the configured hour."""
    fields = {} if scale.seconds is None else {"seconds": scale.seconds}
    return [config.model_copy(update={"seed": config.seed + number, **fields}) for number in range(scale.seeds)]
