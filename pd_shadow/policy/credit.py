"""Credit: shadow work may stretch iterations by a fixed share of the time they would take without it."""

import math

from pd_shadow.policy.base import BETA, Batch, Budget, Iteration, StepReason

ROUTED_DELTA = 0.025
"""Credit rate that protects routed calls (paper section 3.2, C2)."""
HARVEST_DELTA = 0.1
"""Credit rate of the Harvest controller, which knows no slack (paper section 3.2)."""


class Credit:
    """Accrues at `delta` times the duration of memory-bound, decode-only iterations; never below 0 or above `cap`.

    What an iteration was stretched by is spent, so that all iterations together last at most 1 + delta times as long.
    """

    def __init__(self, delta: float, cap: float = math.inf) -> None:
        self._delta = delta
        self.cap = cap
        self.seconds = 0.0

    def ran(self, iteration: Iteration) -> None:
        """Earn or spend for an iteration that has ended."""
        if iteration.stretch_seconds > 0:
            self.seconds = max(0.0, self.seconds - iteration.stretch_seconds)
        elif iteration.memory_bound_decode:
            self.seconds = min(self.cap, self.seconds + self._delta * iteration.seconds)


class CreditController:
    """Harvest: the same credit on every busy iteration, whatever the slack of the requests in it."""

    def __init__(self, *, delta: float = HARVEST_DELTA, beta: float = BETA) -> None:
        self._beta = beta
        self.credit = Credit(delta)

    def budget(self, batch: Batch) -> Budget:
        cap = self._beta * min((request.tpot_slo for request in batch.requests), default=batch.tpot_slo)
        self.credit.cap = cap
        if batch.waiting:
            return Budget.refused(StepReason.WAITING)
        if not batch.requests:
            return Budget.iteration(cap, StepReason.IDLE)
        return Budget(cap, min(self.credit.seconds, cap), StepReason.CREDIT)

    def ran(self, iteration: Iteration) -> None:
        self.credit.ran(iteration)
