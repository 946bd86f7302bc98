"""The figures of merit, on two runs made by hand whose figures can be told by hand."""

import math
from collections.abc import Sequence

import pytest

from pd_shadow.perf.energy import PowerModel
from pd_shadow.sim.compare import Pair, hit_rate, metrics, spread, workload_metrics
from pd_shadow.sim.engine import Usage
from pd_shadow.sim.feeder import Normal
from pd_shadow.sim.sessions import CallRecord
from pd_shadow.sim.simulation import InstanceUsage, RunResult

from .rig import tiny

WATTS = PowerModel(idle_watts=100, decode_watts=200, prefill_watts=400)


def call(session: int, step: int, model: int, **fields: float) -> CallRecord:
    given = {"arrived": 0.0, "ttft": 1.0, "latency": 2.0, "prompt": 1000, "cached": 0, "output": 100, **fields}
    return CallRecord(session, step, model, good=True, switch=step == 1, **given)  # type: ignore[arg-type]


def result(
    calls: Sequence[CallRecord], *, usages: Sequence[Usage] = (Usage(),), normal: Normal | None = None, good: int = 0
) -> RunResult:
    return RunResult(
        config=tiny(seconds=100), calls=calls, normal=normal or Normal(100, 90, 10.0, 1.0),
        instances=[InstanceUsage(str(number), 2, usage) for number, usage in enumerate(usages)],
        good_calls=good, shadow_link_bytes=0.0, normal_link_bytes=0.0, lasted=100.0, events=1, overloaded=False,
    )  # fmt: skip


BASE = result(
    [
        call(0, 0, 0, latency=2.0, ttft=1.0),
        call(0, 1, 1, latency=10.0, ttft=8.0, prompt=2000),
        call(1, 0, 1, latency=4.0, ttft=1.0),
        # Ended here only.
        call(1, 1, 0, latency=100.0, ttft=90.0, prompt=9000),
    ],
    usages=[Usage(busy_seconds=50, compute_bound_seconds=25, prefill_tokens=10_000)],
    normal=Normal(100, 90, 10.0, 1.0),
    good=10,
)
OTHER = result(
    [
        # Ended here only.
        call(2, 0, 0, latency=50.0),
        call(0, 0, 0, latency=2.0, ttft=1.0),
        call(0, 1, 1, latency=4.0, ttft=2.0, prompt=2000, cached=1500),
        call(1, 0, 1, latency=6.0, ttft=1.0),
    ],
    usages=[Usage(busy_seconds=75, compute_bound_seconds=75, prefill_tokens=9_000, shadow_tokens=3_000)],
    normal=Normal(100, 85, 10.0, 1.0),
    good=15,
)
# At 0.2 and 0.9 dollars per million tokens of the small and the large model.
_COST_BEFORE = 0.2 * 1100 + 0.9 * (2100 + 1100)
_COST_AFTER = 0.2 * 1100 + 0.9 * (500 + 150 + 100 + 1100)
# Two GPUs for 100 s: half of the busy time at each rate; then all of it at the higher one.
_JOULES_BEFORE = 2 * (50 * 300 + 50 * 100)
_JOULES_AFTER = 2 * (75 * 400 + 25 * 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llm_call_latency_reduction", 100 * (1 - 12 / 16)),
        ("switch_call_latency_reduction", 60),
        ("switch_call_ttft_reduction", 75),
        # Sessions took 12 and 4 seconds, and then 6 and 6.
        ("task_time_reduction", 25),
        ("token_cost_reduction", 100 * (1 - _COST_AFTER / _COST_BEFORE)),
        ("hit_rate", 100 * 1500 / 4000),
        ("switch_hit_rate", 75),
        ("energy_per_good_request_increase", 100 * (_JOULES_AFTER / _JOULES_BEFORE - 1)),
        ("normal_slo_attainment_points", -5),
        ("prefill_throughput_increase", 20),
        # Of 3,000 shadow tokens 1,500 were found.
        ("unused_shadow_tokens", 50),
    ],
)
def test_figures_of_merit(name: str, value: float) -> None:
    (metric,) = [each for each in metrics(WATTS) if each.name == name]
    assert metric.of(Pair(BASE, OTHER)) == pytest.approx(value)


def test_a_run_against_itself_changes_nothing() -> None:
    same = {metric.name: metric.of(Pair(BASE, BASE)) for metric in metrics(WATTS)}
    assert math.isnan(same.pop("unused_shadow_tokens"))
    assert (same.pop("hit_rate"), same.pop("switch_hit_rate")) == (0, 0)
    assert set(same.values()) == {0.0}


def test_runs_without_anything_have_no_figures() -> None:
    empty = result([], normal=Normal())
    figures = {metric.name: metric.of(Pair(empty, empty)) for metric in metrics(WATTS)}
    assert figures.pop("normal_slo_attainment_points") == 0
    assert all(math.isnan(value) for value in figures.values())


def test_hit_rates_are_weighted_by_tokens() -> None:
    assert hit_rate([call(0, 0, 0, prompt=1000, cached=1000), call(0, 1, 0, prompt=3000)]) == 25


def test_spread_is_mean_and_standard_error_of_what_is_known() -> None:
    found = spread([1.0, math.nan, 3.0, 5.0])
    assert (found.mean, found.runs) == (3.0, 3)
    assert found.error == pytest.approx(2 / math.sqrt(3))
    alone = spread([2.0])
    assert alone.mean == 2.0
    assert math.isnan(alone.error)
    assert math.isnan(spread([math.nan]).mean)


def test_what_the_baselines_sessions_are_like() -> None:
    calls = [
        call(0, 0, 0, prompt=1000, output=10),
        call(0, 1, 1, prompt=2000, cached=500, latency=9.0, output=20),
        call(0, 2, 1, prompt=3000, cached=2400, latency=3.0, output=60),
        call(1, 0, 1, prompt=2000, output=30),
    ]
    pair = Pair(result(calls), result([]))
    found = {metric.name: metric.of(pair) for metric in workload_metrics()}
    assert found == {
        "switch_calls": 25,
        "switches_per_session": 0.5,
        "mean_prompt_tokens": 2000,
        "p99_prompt_tokens": pytest.approx(2970),
        "mean_output_tokens": 30,
        "hit_rate_without_shadow": pytest.approx(100 * 2900 / 8000),
        # Neither a first call nor a switch.
        "same_model_hit_rate_without_shadow": 80,
        "switch_hit_rate_without_shadow": 25,
        "switch_call_slowdown": 3,
    }
    nothing = Pair(result([]), result([]))
    assert all(math.isnan(metric.of(nothing)) for metric in workload_metrics())
