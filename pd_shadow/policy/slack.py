"""Harvest-SLO: the slack of the requests in flight (paper section 3.2, equation 1 and Algorithm 1)."""

import math
from collections.abc import Callable
from typing import NamedTuple

from pd_shadow.policy.base import BETA, Batch, Budget, RunningRequest, StepReason
from pd_shadow.policy.credit import ROUTED_DELTA, CreditController

MARGIN = 0.1
"""Share of every SLO kept in reserve; the paper sweeps it from 0 to 0.5 and finds it matters little (figure 15e)."""
MINIMUM_TOKENS = 256
"""Below this many tokens a chunk is not worth its overhead (n_min of Algorithm 1)."""


def decode_slack(now: float, request: RunningRequest, margin: float) -> float:
    """Equation 1: how long the next iteration may last for a decoding request to stay ahead of its TPOT SLO."""
    assert request.first_token_at is not None
    return (1 - margin) * request.tpot_slo * (request.iterations + 1) - (now - request.first_token_at)


def prefill_slack(now: float, request: RunningRequest, margin: float) -> float:
    """Section 3.2: time a prefilling request can give away and still meet its TTFT SLO."""
    return (1 - margin) * request.ttft_slo - (now - request.arrived) - request.remaining_prefill_seconds


def slack(now: float, request: RunningRequest, margin: float) -> float:
    """The slack σ_r of one request, in seconds; negative when it is behind its SLO."""
    of = prefill_slack if request.first_token_at is None else decode_slack
    return of(now, request, margin)


class SlackController(CreditController):
    """Lines 1 to 9 of Algorithm 1. Not thread-safe; one per engine.

    The credit of lines 5 and 6 bounds the *stretch* a routed iteration suffers. Read to the letter, line 10 would
    charge the batch's own time to the credit too, and a batch longer than βT could never carry anything; the bound the
    section claims (a slowdown of at most δ) is on the stretch.
    """

    def __init__(self, *, delta: float = ROUTED_DELTA, beta: float = BETA, margin: float = MARGIN) -> None:
        super().__init__(delta=delta, beta=beta)
        self._margin = margin

    def _busy(self, batch: Batch, cap: float) -> Budget:
        if any(request.routed for request in batch.requests):
            return super()._busy(batch, cap)
        least = min(slack(batch.now, request, self._margin) for request in batch.requests)
        return Budget.iteration(min(cap, least), StepReason.SLACK)


class Grant(NamedTuple):
    """Shadow tokens of one iteration, 0 with the reason why none."""

    tokens: int
    reason: StepReason


def grant(
    budget: Budget,
    seconds_with: Callable[[int], float],
    *,
    wanted: int,
    room: int,
    minimum: int = MINIMUM_TOKENS,
) -> Grant:
    """Lines 10 to 14 of Algorithm 1.

    `seconds_with(n)` predicts the iteration with n shadow tokens in it and must not fall as n grows. `wanted` is what
    the jobs still lack, `room` the tokens of free shadow KV. A job's last tokens may be fewer than the minimum.

    Of several reasons for none, the first of these is named: no work, the budget's own, too few tokens that fit the
    budget, too little room.
    """
    if wanted <= 0:
        return Grant(0, StepReason.NO_WORK)
    if not budget.iteration_seconds:
        return Grant(0, budget.reason)
    limit = budget.iteration_seconds
    if not math.isinf(budget.stretch_seconds):
        limit = min(limit, seconds_with(0) + budget.stretch_seconds)
    least = min(minimum, wanted)
    if seconds_with(least) > limit:
        return Grant(0, StepReason.BELOW_MINIMUM)
    if room < least:
        return Grant(0, StepReason.NO_ROOM)
    return Grant(_largest(least, min(wanted, room), lambda n: seconds_with(n) <= limit), budget.reason)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest n of low..high that fits, by bisection: low does, and what fits must fit for every smaller n."""
    if fits(high):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
