"""What an approach changes against the baseline, on the calls that complete under both (paper section 5.1)."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pd_shadow.perf.energy import PowerModel
from pd_shadow.perf.models import Trace, model
from pd_shadow.perf.prices import call_cost, price_of
from pd_shadow.sim.config import RunConfig
from pd_shadow.sim.sessions import CallRecord
from pd_shadow.sim.simulation import RunResult

# Metrics that figures name.
CALLS = "llm_call_latency_reduction"
SWITCHES = "switch_call_latency_reduction"
TTFT = "switch_call_ttft_reduction"
TASK_TIME = "task_time_reduction"
COST = "token_cost_reduction"
HIT_RATE = "hit_rate"
SWITCH_HIT_RATE = "switch_hit_rate"
ENERGY = "energy_per_good_request_increase"
NORMAL_SLO = "normal_slo_attainment_points"
THROUGHPUT = "prefill_throughput_increase"
UNUSED = "unused_shadow_tokens"
SWITCH_SHARE = "switch_calls"
SWITCHES_PER_SESSION = "switches_per_session"
MEAN_PROMPT = "mean_prompt_tokens"
P99_PROMPT = "p99_prompt_tokens"
MEAN_OUTPUT = "mean_output_tokens"
BASE_HIT_RATE = "hit_rate_without_shadow"
BASE_SAME_HIT_RATE = "same_model_hit_rate_without_shadow"
BASE_SWITCH_HIT_RATE = "switch_hit_rate_without_shadow"
SLOWDOWN = "switch_call_slowdown"
ACCURACY = "accuracy"


class Metric(NamedTuple):
    """One figure of merit. Values are in percent, or in percentage points where the name says so."""

    name: str
    of: Callable[["Pair"], float]


class Pair:
    """Two runs of the same seed, window and pair of models: the baseline and an approach."""

    def __init__(
        self, base: RunResult, other: RunResult, keeps: Callable[[CallRecord, RunConfig], bool] = lambda *_: True
    ) -> None:
        """`keeps` says of a call whether it is looked at."""
        before = {(call.session, call.step): call for call in base.calls}
        self.base = base
        self.other = other
        # Calls that completed in both, before and after.
        self.calls = [
            (before[key], call)
            for call in other.calls
            if (key := (call.session, call.step)) in before and keeps(call, other.config)
        ]
        self.switches = [(one, two) for one, two in self.calls if two.switch]

    def reduction(self, of: Callable[[CallRecord], float], calls: Sequence[tuple[CallRecord, CallRecord]]) -> float:
        """By how much a call's figure falls on average, in percent."""
        before = sum(of(one) for one, _ in calls)
        return 100 * (1 - sum(of(two) for _, two in calls) / before) if before else math.nan


def hit_rate(calls: Iterable[CallRecord]) -> float:
    """Token-weighted, in percent."""
    cached = prompt = 0
    for call in calls:
        cached += call.cached
        prompt += call.prompt
    return 100 * cached / prompt if prompt else math.nan


def task_seconds(calls: Iterable[CallRecord]) -> dict[int, float]:
    """LLM time of each session: the sum of its calls' latencies."""
    total: dict[int, float] = defaultdict(float)
    for call in calls:
        total[call.session] += call.latency
    return total


def token_cost(result: RunResult, calls: Iterable[CallRecord]) -> float:
    """Dollars at the models' prices, cached input at a tenth."""
    trace = result.config.trace
    known = Trace(trace) if trace in list(Trace) else None
    prices = [price_of(model(name), known) for name in result.config.models]
    return sum(call_cost(prices[call.model], call.prompt, call.cached, call.output) for call in calls)


def energy_per_good_request(result: RunResult, power: PowerModel) -> float:
    """Joules in the measured time per request, normal or routed, that met its SLOs."""
    joules = 0.0
    for instance in result.instances:
        busy, bound = instance.usage.busy_seconds, instance.usage.compute_bound_seconds
        joules += power.busy_joules(busy, bound / busy if busy else 0.0, instance.gpus)
        joules += power.idle_joules(max(0.0, result.config.seconds - busy), instance.gpus)
    good = result.normal.good + result.good_calls
    return joules / good if good else math.nan


def energy_increase(pair: Pair, power: PowerModel) -> float:
    """Of the energy per good request, in percent."""
    return _increase(energy_per_good_request(pair.base, power), energy_per_good_request(pair.other, power))


def prefill_throughput(result: RunResult) -> float:
    """Prompt tokens computed in the measured time, shadow tokens included."""
    return sum(instance.usage.prefill_tokens + instance.usage.shadow_tokens for instance in result.instances)


def unused_shadow(pair: Pair) -> float:
    """Share of shadow tokens that saved no call any prefill, in percent.

    Saved is what switch calls found cached beyond the baseline's; shadow tokens are those of the measured time.
    """
    computed = sum(instance.usage.shadow_tokens for instance in pair.other.instances)
    saved = sum(two.cached - one.cached for one, two in pair.switches)
    return 100 * (1 - saved / computed) if computed else math.nan


def metrics(power: PowerModel) -> list[Metric]:
    """All of them; `power` prices the energy."""
    return [
        Metric(CALLS, lambda pair: pair.reduction(lambda call: call.latency, pair.calls)),
        Metric(SWITCHES, lambda pair: pair.reduction(lambda call: call.latency, pair.switches)),
        Metric(TTFT, lambda pair: pair.reduction(lambda call: call.ttft, pair.switches)),
        Metric(TASK_TIME, _task_time_reduction),
        Metric(COST, _token_cost_reduction),
        Metric(HIT_RATE, lambda pair: hit_rate(two for _, two in pair.calls)),
        Metric(SWITCH_HIT_RATE, lambda pair: hit_rate(two for _, two in pair.switches)),
        Metric(
            ENERGY,
            lambda pair: energy_increase(pair, power),
        ),
        Metric(
            NORMAL_SLO,
            lambda pair: 100 * (pair.other.normal.attainment - pair.base.normal.attainment),
        ),
        Metric(
            THROUGHPUT,
            lambda pair: _increase(prefill_throughput(pair.base), prefill_throughput(pair.other)),
        ),
        Metric(UNUSED, unused_shadow),
    ]


def workload_metrics() -> list[Metric]:
    """What the sessions of the baseline are like; token counts, shares in percent, times as factors."""
    return [
        Metric(SWITCH_SHARE, lambda pair: 100 * _ratio(len(_switches(pair.base)), len(pair.base.calls))),
        Metric(
            SWITCHES_PER_SESSION, lambda pair: _ratio(len(_switches(pair.base)), len(task_seconds(pair.base.calls)))
        ),
        Metric(MEAN_PROMPT, lambda pair: _mean([call.prompt for call in pair.base.calls])),
        Metric(P99_PROMPT, lambda pair: _percentile_99([call.prompt for call in pair.base.calls])),
        Metric(MEAN_OUTPUT, lambda pair: _mean([call.output for call in pair.base.calls])),
        Metric(BASE_HIT_RATE, lambda pair: hit_rate(pair.base.calls)),
        Metric(BASE_SAME_HIT_RATE, lambda pair: hit_rate(_others(pair.base))),
        Metric(BASE_SWITCH_HIT_RATE, lambda pair: hit_rate(_switches(pair.base))),
        Metric(SLOWDOWN, lambda pair: _mean_latency(_switches(pair.base)) / _mean_latency(_others(pair.base))),
    ]


class Spread(NamedTuple):
    """Mean and standard error over runs; the error is not a number with one run."""

    mean: float
    error: float
    runs: int


def spread(values: Iterable[float]) -> Spread:
    """Runs without a value are left out."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Spread(math.nan, math.nan, 0)
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return Spread(statistics.fmean(known), error, len(known))


def _switches(result: RunResult) -> list[CallRecord]:
    return [call for call in result.calls if call.switch]


def _others(result: RunResult) -> list[CallRecord]:
    """Calls to the model of the session's call before; a session's first call is neither this nor a switch."""
    return [call for call in result.calls if not call.switch and call.step]


def _mean_latency(calls: Sequence[CallRecord]) -> float:
    return _mean([call.latency for call in calls])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _percentile_99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else math.nan


def _increase(before: float, after: float) -> float:
    return 100 * (after / before - 1) if before else math.nan


def _task_time_reduction(pair: Pair) -> float:
    before = task_seconds(one for one, _ in pair.calls)
    after = task_seconds(two for _, two in pair.calls)
    return 100 * (1 - statistics.fmean(after.values()) / statistics.fmean(before.values())) if before else math.nan


def _token_cost_reduction(pair: Pair) -> float:
    before = token_cost(pair.base, (one for one, _ in pair.calls))
    return 100 * (1 - token_cost(pair.other, (two for _, two in pair.calls)) / before) if before else math.nan
