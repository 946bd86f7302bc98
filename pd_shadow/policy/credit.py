"""Credit: shadow work may stretch iterations by a fixed share of the time they would take without it."""

import math

from pd_shadow.policy.base import BETA, Batch, Budget, Iteration, StepReason

ROUTED_DELTA = 0.025
"""Credit rate that protects routed calls (paper section 3.2, C2)."""
HARVEST_DELTA = 0.1
"""Credit rate of the Harvest controller, which knows no slack (paper section 3.2)."""


class Credit:
    """Accrues at `delta` times the duration of memory-bound, decode-only iterations; never below 0 or above `cap`.

    What iterations granted from it were stretched by is spent, so that they and the iterations it was earned in last at
    most 1 + delta times as long together. An engine that plans an iteration before the last one has ended may spend the
    same credit twice: it owes the difference, and new credit pays that first.
    """

    def __init__(self, delta: float, cap: float = math.inf) -> None:
        self._delta = delta
        self._cap = cap
        # Below 0: owed.
        self._balance = 0.0

    @property
    def seconds(self) -> float:
        """What may be spent now."""
        return max(0.0, self._balance)

    @property
    def cap(self) -> float:
        return self._cap

    @cap.setter
    def cap(self, cap: float) -> None:
        self._cap = cap
        self._balance = min(self._balance, cap)

    def budget(self, iteration_seconds: float) -> Budget:
        """A budget out of this credit for an iteration that may last so long."""
        if iteration_seconds <= 0:
            return Budget.refused(StepReason.NO_BUDGET)
        return Budget(iteration_seconds, min(self.seconds, iteration_seconds), StepReason.CREDIT)

    def ran(self, iteration: Iteration) -> None:
        """Earn or spend for an iteration that has ended."""
        if iteration.reason is StepReason.CREDIT:
            self._balance -= iteration.stretch_seconds
        elif iteration.memory_bound_decode:
            self._balance = min(self._cap, self._balance + self._delta * iteration.seconds)


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
        return self._busy(batch, cap)

    def _busy(self, batch: Batch, cap: float) -> Budget:
        """The budget of an iteration that has other work in it, and may last `cap` seconds at most."""
        return self.credit.budget(cap)

    def ran(self, iteration: Iteration) -> None:
        self.credit.ran(iteration)
