import bisect
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.policy.base import Batch, Budget, Iteration, RunningRequest, StepReason
from pd_shadow.policy.credit import CreditController
from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.policy.slack import Grant, SlackController, decode_slack, grant, prefill_slack, slack
from tests.pd_shadow.policy.batches import NOW, batch, batches, decoding, memory_bound, prefilling, requests


def linear(base: float, per_token: float) -> Callable[[int], float]:
    return lambda tokens: base + per_token * tokens


@st.composite
def costs(draw: st.DrawFn) -> Callable[[int], float]:
    """A step function of the tokens that never falls."""
    steps = sorted(draw(st.lists(st.integers(1, 5000), max_size=8)))
    heights = [draw(st.floats(0, 0.5))]
    heights += itertools.accumulate((draw(st.floats(0, 0.05)) for _ in steps), initial=heights[0])
    return lambda tokens: heights[bisect.bisect_right(steps, tokens) + 1]


# Equation 1 and the slack of prefills.


def test_equation_1_by_hand() -> None:
    # (1 - 0.1) · 0.1 s · (9 + 1) - 0.6 s = 0.9 s - 0.6 s.
    assert decode_slack(NOW, decoding(for_seconds=0.6, iterations=9), 0.1) == pytest.approx(0.3)
    # The iteration after the first token: one TPOT, less the margin.
    assert decode_slack(NOW, decoding(), 0.1) == pytest.approx(0.09)
    # Behind: 0.8 · 0.025 s · 5 - 0.15 s = 0.1 s - 0.15 s.
    assert decode_slack(NOW, decoding(for_seconds=0.15, iterations=4, tpot=0.025), 0.2) == pytest.approx(-0.05)


def test_prefill_slack_by_hand() -> None:
    # (1 - 0.1) · 1 s - 0.25 s - 0.4 s.
    assert prefill_slack(NOW, prefilling(for_seconds=0.25, remaining=0.4), 0.1) == pytest.approx(0.25)
    # 0.5 · 2 s - 0.75 s - 0.5 s.
    assert prefill_slack(NOW, prefilling(for_seconds=0.75, remaining=0.5, ttft=2.0), 0.5) == pytest.approx(-0.25)


def test_a_request_is_held_to_its_ttft_slo_until_its_first_token_and_to_its_tpot_slo_from_then_on() -> None:
    assert slack(NOW, prefilling(for_seconds=0.3), 0.1) == pytest.approx(0.6)
    assert slack(NOW, decoding(for_seconds=0.3, iterations=4), 0.1) == pytest.approx(0.15)


@given(requests, st.floats(0, 0.9))
def test_an_iteration_of_the_slack_ends_exactly_at_the_slo_less_the_margin(
    request: RunningRequest, margin: float
) -> None:
    end = NOW + slack(NOW, request, margin)
    if request.first_token_at is None:
        rest = end - request.arrived + request.remaining_prefill_seconds
        assert rest == pytest.approx((1 - margin) * request.ttft_slo, abs=1e-9)
    else:
        allowed = (1 - margin) * request.tpot_slo * (request.iterations + 1)
        assert end - request.first_token_at == pytest.approx(allowed, abs=1e-9)


# Algorithm 1, lines 1 to 9: the budget.


@pytest.mark.parametrize("requests", [[], [decoding()], [decoding(routed=True)], [prefilling()]])
def test_lines_1_and_2_nothing_while_something_waits(requests: list[RunningRequest]) -> None:
    controller = SlackController()
    controller.ran(memory_bound(100.0))
    assert controller.budget(batch(*requests, waiting=True)) == Budget.refused(StepReason.WAITING)


def test_lines_3_and_4_an_idle_instance_may_use_half_the_tpot_slo() -> None:
    budget = SlackController().budget(batch(tpot=0.08))
    assert budget == Budget.iteration(0.04, StepReason.IDLE)
    assert grant(budget, linear(0.0, 1e-5), wanted=10_000, room=10_000) == Grant(4000, StepReason.IDLE)


def test_lines_5_and_6_a_routed_call_is_stretched_by_the_credit_alone() -> None:
    controller = SlackController()
    controller.budget(batch(decoding(routed=True)))
    # 0.025 · 0.4 s.
    controller.ran(memory_bound(0.4))
    budget = controller.budget(batch(decoding(for_seconds=0.0, iterations=50), decoding(routed=True)))
    assert budget.reason is StepReason.CREDIT
    assert budget.stretch_seconds == pytest.approx(0.01)
    # The batch alone takes 0.02 s, so it may take 0.03 s.
    assert grant(budget, linear(0.02, 1e-5), wanted=10_000, room=10_000) == Grant(1000, StepReason.CREDIT)


def test_line_6_credit_does_not_lift_the_cap() -> None:
    controller = SlackController()
    controller.budget(batch(decoding(routed=True)))
    controller.ran(memory_bound(100.0))
    budget = controller.budget(batch(decoding(routed=True)))
    assert budget == Budget(0.05, 0.05, StepReason.CREDIT)
    assert grant(budget, linear(0.02, 1e-5), wanted=10_000, room=10_000) == Grant(3000, StepReason.CREDIT)


def test_line_6_without_credit_a_routed_call_is_not_stretched_at_all() -> None:
    budget = SlackController().budget(batch(decoding(routed=True)))
    assert grant(budget, linear(0.01, 1e-9), wanted=10_000, room=10_000) == Grant(0, StepReason.BELOW_MINIMUM)
    # What costs it nothing is welcome.
    assert grant(budget, linear(0.01, 0.0), wanted=10_000, room=10_000) == Grant(10_000, StepReason.CREDIT)


def test_line_8_the_least_slack_bounds_the_iteration() -> None:
    late = decoding(for_seconds=0.86, iterations=9)
    budget = SlackController().budget(batch(decoding(iterations=50), late, prefilling()))
    assert budget.iteration_seconds == pytest.approx(0.04)
    assert budget.reason is StepReason.SLACK


def test_line_8_a_prefilling_request_bounds_the_iteration_too() -> None:
    budget = SlackController().budget(batch(decoding(iterations=50), prefilling(for_seconds=0.5, remaining=0.37)))
    assert budget.iteration_seconds == pytest.approx(0.03)


def test_line_8_half_the_tightest_tpot_slo_bounds_the_iteration() -> None:
    budget = SlackController().budget(batch(decoding(iterations=50), decoding(iterations=50, tpot=0.06), tpot=0.01))
    assert budget == Budget.iteration(0.03, StepReason.SLACK)


def test_line_8_a_request_without_slack_blocks_shadow_work() -> None:
    refused = Budget.refused(StepReason.NO_BUDGET)
    assert SlackController().budget(batch(decoding(iterations=50), decoding(for_seconds=0.1))) == refused


def test_the_slack_controller_takes_its_three_constants() -> None:
    controller = SlackController(delta=0.5, beta=0.2, margin=0.4)
    assert controller.budget(batch()).iteration_seconds == pytest.approx(0.02)
    assert controller.budget(batch(decoding(for_seconds=0.05))).iteration_seconds == pytest.approx(0.01)
    controller.ran(memory_bound(0.01))
    assert controller.budget(batch(decoding(routed=True))).stretch_seconds == pytest.approx(0.005)


@pytest.mark.parametrize("requests", [[], [decoding()], [decoding(routed=True)]])
def test_without_any_share_of_the_slo_nothing_is_granted(requests: list[RunningRequest]) -> None:
    budget = SlackController(beta=0.0).budget(batch(*requests))
    assert grant(budget, linear(0.0, 0.0), wanted=1000, room=1000) == Grant(0, StepReason.NO_BUDGET)


@given(batches, costs(), st.integers(0, 5000), st.integers(0, 5000))
def test_no_controller_works_while_something_waits(
    seen: Batch, cost: Callable[[int], float], wanted: int, room: int
) -> None:
    for controller in (SlackController(), CreditController(), PrefillWindowController()):
        controller.ran(memory_bound(10.0))
        granted = grant(controller.budget(seen._replace(waiting=True)), cost, wanted=wanted, room=room)
        assert granted == Grant(0, StepReason.WAITING if wanted else StepReason.NO_WORK)


@given(batches, costs(), st.integers(0, 5000))
def test_no_normal_request_misses_its_slo_through_shadow_tokens(
    seen: Batch, cost: Callable[[int], float], wanted: int
) -> None:
    granted = grant(SlackController().budget(seen), cost, wanted=wanted, room=wanted)
    if granted.tokens:
        tightest = min((request.tpot_slo for request in seen.requests), default=seen.tpot_slo)
        assert cost(granted.tokens) <= 0.5 * tightest
        if granted.reason is StepReason.SLACK:
            assert all(cost(granted.tokens) <= slack(NOW, request, 0.1) for request in seen.requests)


# Algorithm 1, lines 10 to 14: the tokens.


def test_line_10_the_largest_number_of_tokens_that_fits() -> None:
    # 0.01 s + n · 20 µs ≤ 0.03011 s.
    budget = Budget.iteration(0.03011, StepReason.SLACK)
    assert grant(budget, linear(0.01, 2e-5), wanted=5000, room=5000) == Grant(1005, StepReason.SLACK)


def test_line_10_never_more_than_the_jobs_lack() -> None:
    assert grant(Budget.iteration(1.0, StepReason.IDLE), linear(0, 1e-5), wanted=700, room=5000).tokens == 700


def test_line_10_a_price_that_meets_the_budget_exactly_fits() -> None:
    budget = Budget.iteration(0.5, StepReason.SLACK)
    assert grant(budget, lambda tokens: 0.5 if tokens <= 300 else 0.75, wanted=1000, room=1000).tokens == 300


def test_line_11_no_more_than_the_free_shadow_kv() -> None:
    budget = Budget.iteration(1.0, StepReason.IDLE)
    assert grant(budget, linear(0, 1e-5), wanted=5000, room=640) == Grant(640, StepReason.IDLE)


def test_line_12_a_chunk_below_the_minimum_is_not_worth_it() -> None:
    budget = Budget.iteration(0.256, StepReason.IDLE)
    assert grant(budget, linear(0.0001, 1e-3), wanted=5000, room=5000) == Grant(0, StepReason.BELOW_MINIMUM)
    assert grant(budget, linear(0.0, 1e-3), wanted=5000, room=5000) == Grant(256, StepReason.IDLE)
    assert grant(budget, linear(0.0001, 1e-3), wanted=5000, room=5000, minimum=255) == Grant(255, StepReason.IDLE)


def test_line_12_too_little_room_for_the_minimum_is_named_as_such() -> None:
    budget = Budget.iteration(1.0, StepReason.IDLE)
    assert grant(budget, linear(0, 1e-5), wanted=5000, room=255) == Grant(0, StepReason.NO_ROOM)
    assert grant(budget, linear(0, 1e-5), wanted=5000, room=256) == Grant(256, StepReason.IDLE)


def test_line_12_the_last_tokens_may_be_fewer_but_only_all_at_once() -> None:
    budget = Budget.iteration(1.0, StepReason.IDLE)
    assert grant(budget, linear(0, 1e-5), wanted=7, room=7) == Grant(7, StepReason.IDLE)
    assert grant(budget, linear(0, 1e-5), wanted=7, room=6) == Grant(0, StepReason.NO_ROOM)
    assert grant(budget, linear(0, 0.2), wanted=7, room=7) == Grant(0, StepReason.BELOW_MINIMUM)


def test_of_several_reasons_the_first_is_named() -> None:
    refused, tight = Budget.refused(StepReason.WAITING), Budget.iteration(0.1, StepReason.SLACK)
    dear = linear(0.2, 1.0)
    assert grant(refused, dear, wanted=0, room=0).reason is StepReason.NO_WORK
    assert grant(refused, dear, wanted=500, room=0).reason is StepReason.WAITING
    assert grant(tight, dear, wanted=500, room=0).reason is StepReason.BELOW_MINIMUM
    assert grant(tight, linear(0, 0), wanted=500, room=0).reason is StepReason.NO_ROOM


@given(
    st.floats(0.001, 1),
    st.floats(0, 1) | st.just(float("inf")),
    costs(),
    st.integers(0, 6000),
    st.integers(0, 6000),
    st.integers(1, 600),
)
def test_a_grant_never_exceeds_its_budget_and_leaves_nothing_unused(
    iteration_seconds: float,
    stretch_seconds: float,
    cost: Callable[[int], float],
    wanted: int,
    room: int,
    minimum: int,
) -> None:
    def fits(tokens: int) -> bool:
        return cost(tokens) <= iteration_seconds and cost(tokens) <= cost(0) + stretch_seconds

    budget = Budget(iteration_seconds, stretch_seconds, StepReason.CREDIT)
    tokens, reason = grant(budget, cost, wanted=wanted, room=room, minimum=minimum)
    least = min(minimum, wanted)
    if tokens:
        assert fits(tokens)
        assert least <= tokens <= min(wanted, room)
        assert tokens == min(wanted, room) or not fits(tokens + 1)
        assert reason is StepReason.CREDIT
    else:
        assert not wanted or room < least or not fits(least)
        assert reason in {StepReason.NO_WORK, StepReason.BELOW_MINIMUM, StepReason.NO_ROOM}


# What line 6 rests on: the account.


def test_only_iterations_granted_from_credit_are_paid_from_it() -> None:
    controller = SlackController()
    controller.budget(batch(decoding()))
    controller.ran(memory_bound(0.4))
    for reason in (StepReason.SLACK, StepReason.IDLE, StepReason.PROBE):
        controller.ran(Iteration(0.05, 0.04, memory_bound_decode=False, reason=reason))
    assert controller.budget(batch(decoding(routed=True))).stretch_seconds == pytest.approx(0.01)
    controller.ran(Iteration(0.03, 0.004, memory_bound_decode=False, reason=StepReason.CREDIT))
    assert controller.budget(batch(decoding(routed=True))).stretch_seconds == pytest.approx(0.006)
