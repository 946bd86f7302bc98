"""Figures 4, 5, 6 and 8a to 8c: every approach of Table 2 on colocated clusters, trace by trace."""

from pd_shadow.policy.approach import Approach
from pd_shadow.sim.config import Mode
from pd_shadow.sim.figures.base import LONG_TRACE, Figure, Scale, Setting, against, grid, pairs_of

APPROACHES = tuple(approach for approach in Approach if approach is not Approach.NO_SHADOW)
_HOST = Approach.HARVEST_SLO_HOST
_BENCHMARKS = "benchmarks"
# Sections 5.2 and 5.4; the figures' own labels are per pair.
_PAPER: dict[tuple[str, Approach], dict[str, float]] = {
    (_BENCHMARKS, Approach.HOST_TIER): {"llm_call_latency_reduction": 0.4},
    (_BENCHMARKS, Approach.HARVEST): {"switch_call_latency_reduction": 6.9},
    (_BENCHMARKS, Approach.HARVEST_SLO): {"switch_call_latency_reduction": 8.8},
    (_BENCHMARKS, _HOST): {
        "llm_call_latency_reduction": 5.0,
        "switch_call_latency_reduction": 10.4,
        "switch_call_ttft_reduction": 44.1,
        "task_time_reduction": 4.9,
        "token_cost_reduction": 28.5,
        "hit_rate": 82.1,
    },
    (_BENCHMARKS, Approach.PREDICTIVE): {"switch_call_latency_reduction": 3.2},
    (_BENCHMARKS, Approach.DEDICATED): {"switch_call_latency_reduction": 18.0},
    (_BENCHMARKS, Approach.EAGER): {"llm_call_latency_reduction": -7.0},
    (_BENCHMARKS, Approach.ORACLE): {"switch_call_latency_reduction": 19.3, "llm_call_latency_reduction": 9.6},
    (_BENCHMARKS, Approach.ORACLE_HOST): {"hit_rate": 84.4},
    (LONG_TRACE.value, Approach.HOST_TIER): {
        "llm_call_latency_reduction": 8.1,
        "switch_call_ttft_reduction": 27.5,
        "token_cost_reduction": 17.8,
    },
    (LONG_TRACE.value, Approach.HARVEST_SLO): {"switch_call_latency_reduction": 4.3},
    (LONG_TRACE.value, _HOST): {
        "llm_call_latency_reduction": 9.7,
        "switch_call_latency_reduction": 14.3,
        "switch_call_ttft_reduction": 47.0,
        "task_time_reduction": 10.0,
        "token_cost_reduction": 32.0,
        "hit_rate": 76.3,
    },
    (LONG_TRACE.value, Approach.EAGER): {"llm_call_latency_reduction": -3.2},
    (LONG_TRACE.value, Approach.ORACLE_HOST): {
        "switch_call_latency_reduction": 27.4,
        "llm_call_latency_reduction": 13.8,
        "hit_rate": 81.3,
    },
    ("all", _HOST): {
        "llm_call_latency_reduction": 6.3,
        "switch_call_latency_reduction": 11.4,
        "switch_call_ttft_reduction": 44.9,
        "token_cost_reduction": 29.5,
        "prefill_throughput_increase": 3.8,
        "energy_per_good_request_increase": 0.4,
        "unused_shadow_tokens": 63.0,
    },
    ("all", Approach.HARVEST_SLO): {"energy_per_good_request_increase": 0.8},
    ("all", Approach.DEDICATED): {"energy_per_good_request_increase": 11.7},
}


def figure_4(scale: Scale) -> Figure:
    """All metrics of figures 4 to 6 and 8a to 8c: they are the same runs."""
    every = pairs_of(scale)
    groups = {
        _BENCHMARKS: [pair for pair in every if pair.trace is not LONG_TRACE],
        LONG_TRACE.value: [pair for pair in every if pair.trace is LONG_TRACE],
        "all": every,
    }
    settings = [
        Setting(
            f"{group}, {approach.value}",
            against(grid(scale, pairs, mode=Mode.COLOCATED, approach=approach)),
            _PAPER.get((group, approach), {}),
        )
        for group, pairs in groups.items()
        for approach in APPROACHES
    ]
    return Figure("4-6, 8a-c", "Approaches on colocated clusters, against No Shadow", settings)
