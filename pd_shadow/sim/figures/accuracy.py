"""Figure 7: how accurate routing is, and what it costs, with and without shadow work."""

from collections.abc import Mapping

from pd_shadow.perf.energy import PowerModel
from pd_shadow.policy.approach import Approach
from pd_shadow.sim import demand
from pd_shadow.sim.compare import ACCURACY, COST, Metric, Pair, metrics
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.demand import RouterName
from pd_shadow.sim.figures.base import LONG_TRACE, Figure, Scale, Setting, grid, pairs_of

GAIN = "accuracy_points_over_always_expensive"
_ROUTED = RouterName.ACCURACY_PER_COST
_LINES: Mapping[str, tuple[RouterName, Approach]] = {
    "always cheap": (RouterName.ALWAYS_CHEAP, Approach.NO_SHADOW),
    "router, no shadow": (_ROUTED, Approach.NO_SHADOW),
    "router + shadow prefill": (_ROUTED, Approach.HARVEST_SLO_HOST),
    "router + oracle": (_ROUTED, Approach.ORACLE_HOST),
}
# Section 5.3; of the other traces it gives ranges: 6.6 to 13.6 points, 28 to 44 % without and 49 to 56 % with shadow.
_PAPER: Mapping[tuple[str, str], Mapping[str, float]] = {
    (LONG_TRACE.value, "router + shadow prefill"): {GAIN: 13.6, COST: 54.0},
}


def figure_7(scale: Scale) -> Figure:
    """Everything relative to Always Expensive on the same sessions.

    Decisions are those of the score matrix as they are, since accuracy is a property of decisions; the other figures'
    router is calibrated to the paper's switch rates instead.
    """
    settings = []
    for trace in scale.traces:
        pairs = [pair for pair in pairs_of(scale) if pair.trace is trace]
        for line, (router, approach) in _LINES.items():
            runs = grid(scale, pairs, mode=Mode.COLOCATED, approach=approach, router=router.value)
            compared = [(_always_expensive(run), run) for run in runs]
            settings.append(Setting(f"{trace.value}, {line}", compared, _PAPER.get((trace.value, line), {})))
    return Figure("7", "Accuracy, and token cost against Always Expensive", settings, (ACCURACY, GAIN, COST), _metrics)


def _always_expensive(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"approach": Approach.NO_SHADOW, "router": RouterName.ALWAYS_EXPENSIVE.value})


def _metrics(power: PowerModel) -> list[Metric]:
    return [
        Metric(ACCURACY, lambda pair: demand.accuracy(pair.other.config)),
        Metric(GAIN, _gain),
        *metrics(power),
    ]


def _gain(pair: Pair) -> float:
    return demand.accuracy(pair.other.config) - demand.accuracy(pair.base.config)
