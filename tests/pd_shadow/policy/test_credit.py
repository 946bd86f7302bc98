from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.policy.base import Budget, Iteration, RunningRequest, StepReason
from pd_shadow.policy.credit import Credit, CreditController
from pd_shadow.policy.slack import Grant, SlackController, grant
from tests.pd_shadow.policy.batches import batch, decoding, memory_bound, prefilling


def stretched(seconds: float) -> Iteration:
    return Iteration(0.02 + seconds, seconds, memory_bound_decode=False, reason=StepReason.CREDIT)


def test_credit_accrues_at_delta_times_the_duration() -> None:
    credit = Credit(0.025)
    credit.ran(memory_bound(0.4))
    assert credit.seconds == pytest.approx(0.01)
    credit.ran(memory_bound(0.2))
    assert credit.seconds == pytest.approx(0.015)


def test_only_memory_bound_decode_iterations_earn() -> None:
    credit = Credit(0.025)
    credit.ran(memory_bound(0.4)._replace(memory_bound_decode=False))
    assert credit.seconds == 0


def test_what_an_iteration_was_stretched_by_is_spent() -> None:
    credit = Credit(0.025)
    credit.ran(memory_bound(0.4))
    credit.ran(stretched(0.004))
    assert credit.seconds == pytest.approx(0.006)


def test_credit_stops_at_its_cap() -> None:
    credit = Credit(0.025, cap=0.05)
    credit.ran(memory_bound(100.0))
    assert credit.seconds == 0.05
    credit.cap = 0.02
    assert credit.seconds == 0.02
    credit.cap = 0.05
    assert credit.seconds == 0.02


def test_what_was_spent_twice_is_owed_before_new_credit_counts() -> None:
    credit = Credit(0.1)
    credit.ran(memory_bound(0.1))
    # Both iterations were granted before either had ended.
    credit.ran(stretched(0.01))
    credit.ran(stretched(0.01))
    assert credit.seconds == 0
    credit.ran(memory_bound(0.1))
    assert credit.seconds == pytest.approx(0)
    credit.ran(memory_bound(0.1))
    assert credit.seconds == pytest.approx(0.01)


def test_harvest_refuses_while_something_waits() -> None:
    controller = CreditController()
    controller.ran(memory_bound(1.0))
    assert controller.budget(batch(decoding(), waiting=True)) == Budget.refused(StepReason.WAITING)


def test_harvest_on_an_idle_instance_may_use_half_the_tpot_slo() -> None:
    assert CreditController().budget(batch(tpot=0.08)) == Budget.iteration(0.04, StepReason.IDLE)


@pytest.mark.parametrize(
    "in_flight",
    [decoding(iterations=50), decoding(for_seconds=9.0), prefilling(for_seconds=9.0), decoding(routed=True)],
    ids=["ahead", "behind", "prefill", "routed"],
)
def test_harvest_spends_the_same_credit_on_every_busy_iteration(in_flight: RunningRequest) -> None:
    controller = CreditController()
    controller.budget(batch(in_flight))
    # 0.1 · 0.3 s.
    controller.ran(memory_bound(0.3))
    budget = controller.budget(batch(in_flight))
    assert budget.iteration_seconds == 0.05
    assert budget.stretch_seconds == pytest.approx(0.03)
    assert budget.reason is StepReason.CREDIT


def test_harvest_credit_is_capped_by_half_the_tightest_tpot_slo() -> None:
    controller = CreditController()
    requests = [decoding(tpot=0.2), decoding(tpot=0.06)]
    controller.budget(batch(*requests))
    controller.ran(memory_bound(100.0))
    assert controller.budget(batch(*requests)) == Budget(0.03, 0.03, StepReason.CREDIT)


def test_harvest_without_any_share_of_the_slo_grants_nothing() -> None:
    budget = CreditController(beta=0.0).budget(batch(decoding()))
    assert grant(budget, lambda _: 0.0, wanted=1000, room=1000) == Grant(0, StepReason.NO_BUDGET)


# A step is either a decode-only iteration of so many seconds, or a busy one whose tokens cost so much each.
steps = st.lists(
    st.one_of(st.tuples(st.just("decode"), st.floats(0, 1)), st.tuples(st.just("mixed"), st.floats(0, 1e-4))),
    max_size=60,
)


def mixed(price: float, tokens: int) -> float:
    return 0.01 + price * tokens


controllers = st.sampled_from([(SlackController, 0.025), (CreditController, 0.1)])


@given(controllers, steps, st.integers(0, 2))
def test_busy_iterations_are_stretched_by_no_more_than_delta_of_the_time_it_was_earned_in(
    kind: tuple[type[SlackController] | type[CreditController], float], history: list[tuple[str, float]], ahead: int
) -> None:
    """`ahead` iterations are planned before the first of them has ended."""
    create, delta = kind
    controller = create()
    earned = spent = most = 0.0
    running: list[Iteration] = []
    for step, value in history:
        iteration = memory_bound(value)
        budget = controller.budget(batch(decoding(routed=True, tpot=0.1)))
        if step == "mixed":
            granted = grant(budget, partial(mixed, value), wanted=4000, room=4000)
            stretch = value * granted.tokens
            iteration = Iteration(0.01 + stretch, stretch, memory_bound_decode=False, reason=granted.reason)
            spent += stretch
            most = max(most, stretch)
        else:
            earned += delta * value
        running.append(iteration)
        if len(running) > ahead:
            controller.ran(running.pop(0))
        assert 0 <= controller.credit.seconds <= 0.05
        assert spent <= earned + ahead * most + 1e-9
