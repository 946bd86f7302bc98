"""Prefill instances of a disaggregated cluster: shadow iterations of bounded length while nothing else is there."""

from pd_shadow.policy.base import Batch, Budget, Iteration, StepReason
from pd_shadow.policy.slack import MARGIN, slack

WINDOW_SECONDS = 0.1
"""Longest shadow iteration on a prefill instance (paper section 3.5)."""


class PrefillWindowController:
    """Paper section 3.5: only with an empty queue and while every normal request has TTFT slack.

    A prefill instance's requests have no decode to lose time in, so slack is the TTFT slack of the prompts in flight,
    and a shadow may share an iteration with the last chunk of one, but never with a routed call: section 3.4 keeps
    switch calls from waiting for a shadow, and without decodes there is no credit to pay the wait from.
    """

    def __init__(self, *, window_seconds: float = WINDOW_SECONDS, margin: float = MARGIN) -> None:
        self._window = window_seconds
        self._margin = margin

    def budget(self, batch: Batch) -> Budget:
        if batch.waiting:
            return Budget.refused(StepReason.WAITING)
        if not batch.requests:
            return Budget.iteration(self._window, StepReason.WINDOW)
        if any(request.routed for request in batch.requests):
            return Budget.refused(StepReason.NO_BUDGET)
        least = min(slack(batch.now, request, self._margin) for request in batch.requests)
        return Budget.iteration(min(self._window, least), StepReason.SLACK)

    def ran(self, iteration: Iteration) -> None:
        """Nothing to keep account of."""
