import pytest
from hypothesis import given

from pd_shadow.policy.base import Batch, Budget, Iteration, StepReason
from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.policy.slack import Grant, grant
from tests.pd_shadow.policy.batches import batch, batches, prefilling


def test_an_idle_prefill_instance_has_a_tenth_of_a_second() -> None:
    budget = PrefillWindowController().budget(batch())
    assert budget == Budget.iteration(0.1, StepReason.WINDOW)
    # Its TPOT SLO plays no part: nothing decodes here.
    assert PrefillWindowController().budget(batch(tpot=0.01)) == budget
    # 20 µs a token.
    granted = grant(budget, lambda tokens: tokens / 50_000, wanted=10_000, room=10_000)
    assert granted == Grant(5000, StepReason.WINDOW)


def test_nothing_while_something_waits() -> None:
    refused = Budget.refused(StepReason.WAITING)
    assert PrefillWindowController().budget(batch(waiting=True)) == refused
    assert PrefillWindowController().budget(batch(prefilling(), waiting=True)) == refused


def test_beside_a_prompt_with_ttft_slack_the_window_stays() -> None:
    assert PrefillWindowController().budget(batch(prefilling())) == Budget.iteration(0.1, StepReason.SLACK)


def test_the_least_ttft_slack_bounds_the_iteration() -> None:
    # 0.9 · 1 s - 0.5 s - 0.37 s.
    tight = prefilling(for_seconds=0.5, remaining=0.37)
    budget = PrefillWindowController().budget(batch(prefilling(), tight))
    assert budget.iteration_seconds == pytest.approx(0.03)
    assert budget.reason is StepReason.SLACK


def test_a_prompt_without_ttft_slack_blocks_shadow_work() -> None:
    late = prefilling(for_seconds=0.5, remaining=0.4)
    assert PrefillWindowController().budget(batch(prefilling(), late)) == Budget.refused(StepReason.NO_BUDGET)


def test_a_routed_call_never_shares_an_iteration_with_a_shadow() -> None:
    relaxed = prefilling(ttft=60.0)
    assert PrefillWindowController().budget(batch(relaxed)).reason is StepReason.SLACK
    for requests in ([relaxed._replace(routed=True)], [relaxed, relaxed._replace(routed=True)]):
        assert PrefillWindowController().budget(batch(*requests)) == Budget.refused(StepReason.NO_BUDGET)


def test_the_window_and_the_margin_can_be_set() -> None:
    controller = PrefillWindowController(window_seconds=0.02, margin=0.5)
    assert controller.budget(batch()).iteration_seconds == 0.02
    assert controller.budget(batch(prefilling())).iteration_seconds == 0.02
    assert controller.budget(batch(prefilling(for_seconds=0.49))).iteration_seconds == pytest.approx(0.01)


def test_nothing_that_ran_changes_the_next_budget() -> None:
    controller = PrefillWindowController()
    controller.ran(Iteration(0.3, 0.3, memory_bound_decode=False, reason=StepReason.WINDOW))
    assert controller.budget(batch()) == Budget.iteration(0.1, StepReason.WINDOW)


@given(batches)
def test_no_iteration_outlasts_the_window(seen: Batch) -> None:
    assert 0 <= PrefillWindowController().budget(seen).iteration_seconds <= 0.1
