"""What an iteration controller sees and answers: plain values, times in seconds, lengths in tokens."""

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

BETA = 0.5
"""Share of the TPOT SLO that an iteration with shadow work may last (paper section 3.2)."""


class StepReason(Enum):
    """Why an iteration carries shadow tokens, or why it carries none; the names are those of the API's StepReason."""

    # Granted: the instance has no other work; the slack of every request in flight; credit, for a routed call or under
    # Harvest; the window of an idle prefill instance; a first try that teaches the latency model.
    IDLE = "idle"
    SLACK = "slack"
    CREDIT = "credit"
    WINDOW = "window"
    PROBE = "probe"
    # Refused.
    NO_WORK = "no_work"
    PAUSED = "paused"
    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    NO_BUDGET = "no_budget"
    BELOW_MINIMUM = "below_minimum"
    NO_ROOM = "no_room"
    HARDWARE_BUSY = "hardware_busy"


class RunningRequest(NamedTuple):
    """One normal or routed request of the batch."""

    arrived: float
    # None while its prompt is still being prefilled.
    first_token_at: float | None
    # Decode iterations since its first token (k_r of equation 1).
    iterations: int
    ttft_slo: float
    tpot_slo: float
    # Predicted time of its remaining prefill chunks (p̂_r); 0 once it decodes.
    remaining_prefill_seconds: float
    routed: bool


class Batch(NamedTuple):
    """What the engine would run in the next iteration without shadow work."""

    now: float
    # Requests wait in the queue, or an admission was blocked by memory.
    waiting: bool
    # T while there are no requests: one that arrives now must find this TPOT SLO kept. With requests, the tightest of
    # theirs is T; the paper has one T for all.
    tpot_slo: float
    requests: Sequence[RunningRequest]


class Budget(NamedTuple):
    """How long the next iteration may last with shadow work in it, and how much longer that may make it."""

    iteration_seconds: float
    stretch_seconds: float
    reason: StepReason

    @classmethod
    def refused(cls, reason: StepReason) -> "Budget":
        return cls(0.0, 0.0, reason)

    @classmethod
    def iteration(cls, seconds: float, reason: StepReason) -> "Budget":
        """A bound on the whole iteration, whatever share of it is shadow work."""
        return cls(seconds, math.inf, reason) if seconds > 0 else cls.refused(StepReason.NO_BUDGET)


class Iteration(NamedTuple):
    """What a finished iteration was, for controllers that keep accounts."""

    seconds: float
    # How much longer than without its shadow tokens, as predicted; 0 without any.
    stretch_seconds: float
    # Only decodes, not even shadow tokens, and so few that reading weights and KV, not arithmetic, bounds the time.
    memory_bound_decode: bool
    # The reason of its grant: what was not granted from credit is not paid from it either.
    reason: StepReason


class IterationController(Protocol):
    """Decides, for every iteration, what shadow work may cost."""

    def budget(self, batch: Batch) -> Budget:
        """The budget of the next iteration."""
        ...

    def ran(self, iteration: Iteration) -> None:
        """Learn that an iteration has ended."""
        ...
