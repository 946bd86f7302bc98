"""Figure 2 and Tables 1, 2 and 5: what is routed, what a switch costs without shadow work, and the approaches."""

import math
from collections.abc import Mapping
from functools import partial

from pd_shadow.perf.energy import PowerModel
from pd_shadow.policy.approach import TRAITS, Approach, EngineController
from pd_shadow.policy.credit import HARVEST_DELTA
from pd_shadow.sim.compare import (
    BASE_HIT_RATE,
    BASE_SAME_HIT_RATE,
    BASE_SWITCH_HIT_RATE,
    CALLS,
    HIT_RATE,
    MEAN_OUTPUT,
    MEAN_PROMPT,
    P99_PROMPT,
    SLOWDOWN,
    SWITCH_SHARE,
    SWITCHES_PER_SESSION,
    TTFT,
    Metric,
    metrics,
    workload_metrics,
)
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.demand import REFERENCE_INSTANCES
from pd_shadow.sim.figures.base import Computed, Figure, Row, Scale, Setting, against, grid, pairs_of
from pd_shadow.sim.workload import table1 as generated

# Table 1's hit rates, and what the text says of figure 2d.
_TAX: Mapping[str, Mapping[str, float]] = {
    "xRouteBench": {BASE_HIT_RATE: 80.4, BASE_SWITCH_HIT_RATE: 52, SLOWDOWN: 3.2},
    "FusionBench": {BASE_HIT_RATE: 76.6, BASE_SWITCH_HIT_RATE: 52},
    "Router-R1": {BASE_HIT_RATE: 69.2, BASE_SWITCH_HIT_RATE: 46},
    "GHCP-coding": {BASE_HIT_RATE: 55.4, BASE_SWITCH_HIT_RATE: 44, SLOWDOWN: 1.5},
}

# The testbed: models, trace, sessions per second and measured seconds (appendix D.1), its Table 5, and of figure 10 the
# hit rate with shadow prefill, the TTFT of switch calls, and the LLM time.
_TESTBED: Mapping[str, tuple[tuple[str, str], str, float, float, Mapping[str, float]]] = {
    "Q7/L70": (
        ("Qwen2.5-7B-Instruct", "Llama-3.1-70B-Instruct"), "FusionBench", 0.05, 780.0,
        {SWITCH_SHARE: 20, SWITCHES_PER_SESSION: 2.5, MEAN_PROMPT: 19_000, P99_PROMPT: 75_000, MEAN_OUTPUT: 52,
         BASE_HIT_RATE: 85.2, HIT_RATE: 90.5, TTFT: 67.8, CALLS: 13.7},
    ),
    "L8/L70": (
        ("Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct"), "FusionBench", 0.05, 780.0,
        {SWITCH_SHARE: 26, SWITCHES_PER_SESSION: 3.2, MEAN_PROMPT: 19_000, P99_PROMPT: 75_000, MEAN_OUTPUT: 97,
         BASE_HIT_RATE: 85.0, HIT_RATE: 90.9, TTFT: 63.6, CALLS: 10.6},
    ),
    "S7/S32": (
        ("SWE-agent-LM-7B", "SWE-agent-LM-32B"), "SWE-bench S7/S32", 0.01, 1200.0,
        {SWITCH_SHARE: 43, SWITCHES_PER_SESSION: 15.4, MEAN_PROMPT: 41_000, P99_PROMPT: 93_000, MEAN_OUTPUT: 175,
         BASE_HIT_RATE: 93.9, HIT_RATE: 96.4, TTFT: 50.2, CALLS: 3.7},
    ),
    "S7/Q72": (
        ("SWE-agent-LM-7B", "Qwen2.5-72B-Instruct"), "SWE-bench S7/Q72", 0.01, 1200.0,
        {SWITCH_SHARE: 13, SWITCHES_PER_SESSION: 6.3, MEAN_PROMPT: 33_000, P99_PROMPT: 68_000, MEAN_OUTPUT: 249,
         BASE_HIT_RATE: 96.6, HIT_RATE: 98.6, TTFT: 65.9, CALLS: 0.0},
    ),
}  # fmt: skip

_DELTA, _GATE, _TIER, _GPUS = "credit_percent", "gate_percent", "host_tier", "additional_gpus_percent"
# Table 2: what is said of each approach; no host tier and no more GPUs where neither is mentioned.
_BEHAVIOUR: Mapping[Approach, Mapping[str, float]] = {
    Approach.HOST_TIER: {_TIER: 1},
    Approach.HARVEST: {_DELTA: 10},
    Approach.HARVEST_SLO: {},
    Approach.HARVEST_SLO_HOST: {_TIER: 1},
    Approach.PREDICTIVE: {_DELTA: 10, _GATE: 25},
    Approach.DEDICATED: {_GPUS: 25},
    Approach.EAGER: {},
    Approach.ORACLE: {},
    Approach.ORACLE_HOST: {_TIER: 1},
}


def figure_2(scale: Scale) -> Figure:
    """The switch tax without shadow work; the runs are those of figure 8d's colocated clusters."""
    settings = [
        Setting(trace.value, against(grid(scale, pairs, mode=Mode.COLOCATED, approach=Approach.HARVEST_SLO)),
                _TAX[trace.value])
        for trace in scale.traces
        if (pairs := [pair for pair in pairs_of(scale) if pair.trace is trace])
    ]  # fmt: skip
    shown = (BASE_HIT_RATE, BASE_SAME_HIT_RATE, BASE_SWITCH_HIT_RATE, SLOWDOWN)
    return Figure("2", "What a switch costs without shadow work", settings, shown, lambda _: workload_metrics())


def table_1(scale: Scale) -> Figure:
    """The sessions that are generated; needs no runs."""
    return Computed("table1", "Table 1: routed workloads", (), compute=_table_1)


def table_2(scale: Scale) -> Figure:
    """The approaches as they are set here; needs no runs."""
    return Computed("table2", "Table 2: approaches compared", (), compute=_table_2)


def table_5(scale: Scale) -> Figure:
    """The testbed's workloads on one colocated instance per model at a load of 0.3, and its figure 10.

    Its prototype schedules shadow work request by request; here it is Harvest, iteration by iteration.
    """
    settings = []
    for label, (models, trace, rate, seconds, paper) in _TESTBED.items():
        runs = [
            RunConfig.model_validate(
                {
                    "models": models, "trace": trace, "mode": Mode.COLOCATED, "approach": Approach.HARVEST,
                    "seed": seed, "instances": 1, "load": 0.3, "sessions_per_second": rate,
                    "seconds": scale.seconds or seconds, "evicts": scale.evicts,
                }
            )
            for seed in range(scale.seeds)
        ]  # fmt: skip
        settings.append(Setting(label, against(runs), paper))
    shown = (SWITCH_SHARE, SWITCHES_PER_SESSION, MEAN_PROMPT, P99_PROMPT, MEAN_OUTPUT, BASE_HIT_RATE, HIT_RATE, TTFT,
             CALLS)  # fmt: skip
    return Figure("table5", "Table 5 and figure 10: the testbed's workloads", settings, shown, _all_metrics)


def _all_metrics(power: PowerModel) -> list[Metric]:
    return [*workload_metrics(), *metrics(power)]


def _table_1() -> list[Row]:
    # By the names that the simulated runs' metrics have; shares in percent.
    names = {
        generated.MEAN_PROMPT: (MEAN_PROMPT, 1.0),
        generated.P99_PROMPT: (P99_PROMPT, 1.0),
        generated.SWITCH_RATE: (SWITCH_SHARE, 100.0),
        generated.SWITCHES: (SWITCHES_PER_SESSION, 1.0),
    }
    rows = []
    for row in generated.table1():
        name, times = names[row.metric]
        rows.append(Row("table1", row.trace, name, times * row.ours, math.nan, 1, times * row.paper))
    return rows


def _table_2() -> list[Row]:
    rows = []
    for approach, said in _BEHAVIOUR.items():
        row = partial(Row, "table2", approach.value, se=math.nan, runs=1)
        traits = TRAITS[approach]
        ours = {
            _DELTA: 100 * HARVEST_DELTA if traits.controller is EngineController.HARVEST else 0.0,
            _GATE: 100 * traits.gate_probability,
            _TIER: float(traits.host_tier),
            _GPUS: 100 / REFERENCE_INSTANCES if approach is Approach.DEDICATED else 0.0,
        }
        rows += [row(metric=name, ours=value, paper=said.get(name, 0.0)) for name, value in ours.items()]
    return rows
