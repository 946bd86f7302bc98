"""Figures 4, 5, 6 and 8a to 8c: every approach of Table 2 on colocated clusters, trace by trace; the same runs."""

from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import (
    CALLS,
    COST,
    ENERGY,
    HIT_RATE,
    NORMAL_SLO,
    SWITCH_HIT_RATE,
    SWITCHES,
    TASK_TIME,
    THROUGHPUT,
    TTFT,
    UNUSED,
)
from pd_shadow.sim.config import Mode
from pd_shadow.sim.figures.base import LONG_TRACE, Figure, Scale, Setting, against, grid, pairs_of

APPROACHES = tuple(approach for approach in Approach if approach is not Approach.NO_SHADOW)
_HOST = Approach.HARVEST_SLO_HOST
_BENCHMARKS = "benchmarks"
# Sections 5.2 and 5.4; the figures' own labels are per pair.
_PAPER: dict[tuple[str, Approach], dict[str, float]] = {
    (_BENCHMARKS, Approach.HOST_TIER): {CALLS: 0.4},
    (_BENCHMARKS, Approach.HARVEST): {SWITCHES: 6.9},
    (_BENCHMARKS, Approach.HARVEST_SLO): {SWITCHES: 8.8},
    (_BENCHMARKS, _HOST): {
        CALLS: 5.0,
        SWITCHES: 10.4,
        TTFT: 44.1,
        TASK_TIME: 4.9,
        COST: 28.5,
        HIT_RATE: 82.1,
    },
    (_BENCHMARKS, Approach.PREDICTIVE): {SWITCHES: 3.2},
    (_BENCHMARKS, Approach.DEDICATED): {SWITCHES: 18.0},
    (_BENCHMARKS, Approach.EAGER): {CALLS: -7.0},
    (_BENCHMARKS, Approach.ORACLE): {SWITCHES: 19.3, CALLS: 9.6},
    (_BENCHMARKS, Approach.ORACLE_HOST): {HIT_RATE: 84.4},
    (LONG_TRACE.value, Approach.HOST_TIER): {
        CALLS: 8.1,
        TTFT: 27.5,
        COST: 17.8,
    },
    (LONG_TRACE.value, Approach.HARVEST_SLO): {SWITCHES: 4.3},
    (LONG_TRACE.value, _HOST): {
        CALLS: 9.7,
        SWITCHES: 14.3,
        TTFT: 47.0,
        TASK_TIME: 10.0,
        COST: 32.0,
        HIT_RATE: 76.3,
    },
    (LONG_TRACE.value, Approach.EAGER): {CALLS: -3.2},
    (LONG_TRACE.value, Approach.ORACLE_HOST): {
        SWITCHES: 27.4,
        CALLS: 13.8,
        HIT_RATE: 81.3,
    },
    ("all", _HOST): {
        CALLS: 6.3,
        SWITCHES: 11.4,
        TTFT: 44.9,
        COST: 29.5,
        THROUGHPUT: 3.8,
        ENERGY: 0.4,
        UNUSED: 63.0,
    },
    ("all", Approach.HARVEST_SLO): {ENERGY: 0.8},
    ("all", Approach.DEDICATED): {ENERGY: 11.7},
}


def figure_4(scale: Scale) -> Figure:
    """Latencies."""
    return Figure("4", "Latency, colocated, against No Shadow", _settings(scale), (CALLS, SWITCHES))


def figure_5(scale: Scale) -> Figure:
    """Time to first token, and what is found cached."""
    title = "TTFT of switch calls against No Shadow, and hit rates, colocated"
    return Figure("5", title, _settings(scale), (TTFT, HIT_RATE, SWITCH_HIT_RATE))


def figure_6(scale: Scale) -> Figure:
    """Time and money per task."""
    title = "LLM time per task and token cost, colocated, against No Shadow"
    return Figure("6", title, _settings(scale), (TASK_TIME, COST))


def figure_8a(scale: Scale) -> Figure:
    """What it costs: 8a, 8b and 8c."""
    title = "Overheads, colocated, against No Shadow"
    return Figure("8a-c", title, _settings(scale), (THROUGHPUT, ENERGY, NORMAL_SLO, UNUSED))


def _settings(scale: Scale) -> list[Setting]:
    every = pairs_of(scale)
    groups = {
        _BENCHMARKS: [pair for pair in every if pair.trace is not LONG_TRACE],
        LONG_TRACE.value: [pair for pair in every if pair.trace is LONG_TRACE],
        "all": every,
    }
    return [
        Setting(
            f"{group}, {approach.value}",
            against(grid(scale, pairs, mode=Mode.COLOCATED, approach=approach)),
            _PAPER.get((group, approach), {}),
        )
        for group, pairs in groups.items()
        for approach in APPROACHES
        if pairs
    ]
