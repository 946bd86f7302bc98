"""Figures 16d and 16e: more than two models per router."""

from collections.abc import Mapping

from pd_shadow.perf.models import PAIRS, Trace
from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import CALLS, ENERGY, SWITCHES, UNUSED
from pd_shadow.sim.config import Mode, PolicySettings, RunConfig
from pd_shadow.sim.figures.base import Figure, Scale, Setting, against, grid, setups

_HOST, _ORACLE = Approach.HARVEST_SLO_HOST, Approach.ORACLE_HOST
_ALL, _FIRST = "all targets", "top-1"
# Appendix C.
_PAPER: Mapping[tuple[int, str], Mapping[str, float]] = {
    (2, _ALL): {CALLS: 5.0, SWITCHES: 12.9, UNUSED: 68.6},
    (3, _ALL): {CALLS: 6.3},
    (5, _ALL): {CALLS: 6.3, SWITCHES: 10.1, UNUSED: 89.0, ENERGY: 2.8},
    (3, _FIRST): {CALLS: 4.2},
    (5, _FIRST): {CALLS: 4.6, UNUSED: 73.0, ENERGY: 0.1},
    (2, _ORACLE.value): {CALLS: 10.0},
    (5, _ORACLE.value): {CALLS: 14.6},
}


def figure_16d(scale: Scale) -> Figure:
    """Each setup's pair grows along the other models of its trace, in the order of Table 3."""
    settings = []
    for count in (2, 3, 4, 5):
        for name, approach, top_k in ((_ALL, _HOST, None), (_FIRST, _HOST, 1), (_ORACLE.value, _ORACLE, None)):
            policy = PolicySettings(top_k=top_k)
            runs = [
                RunConfig.model_validate({**config.model_dump(), "models": _grown(config, count)})
                for config in grid(scale, setups(scale), mode=Mode.COLOCATED, approach=approach, policy=policy)
            ]
            settings.append(Setting(f"{count} models, {name}", against(runs), _PAPER.get((count, name), {})))
    return Figure("16d-e", "Models per router", settings, (CALLS, SWITCHES, UNUSED, ENERGY))


def _grown(config: RunConfig, count: int) -> tuple[str, ...]:
    trace = Trace(config.trace)
    others = [name for pair in PAIRS if pair.trace is trace for name in (pair.small.name, pair.large.name)]
    return tuple(dict.fromkeys((*config.models, *others)))[:count]
