"""What a routing policy decides, and why."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from pd_shadow.router.warmth import ModelWarmth, SessionWarmth

WARM_FROM = 0.9
"""From this warm fraction on, a model counts as warm: what is missing is about one step's messages."""


class Reason(enum.StrEnum):
    """Why the step goes to the model it goes to."""

    # The session's current model has the best score too.
    KEPT = "kept"
    # The session is on no model, or on one that the router offers no longer: nothing to keep.
    FREE_CHOICE = "free_choice"
    # Another model, which holds the context already.
    SWITCHED_WARM = "switched_warm"
    # Another model, which is not warm but worth the wait.
    SWITCHED_WORTH_IT = "switched_worth_it"
    # The current model, though another one has the better score: the switch would cost more than it brings.
    GATE_HELD = "gate_held"
    # The controller does not know one of the models, or does not answer: the router's own choice stands.
    UNKNOWN_WARMTH = "unknown_warmth"


class Decision(NamedTuple):
    """The model for a step. `preferred` has the best score, `gain` is `model`'s score less the current model's.

    `cost` is what `model` costs more than staying, in units of score; 0 where nothing was weighed. For GATE_HELD both
    are those of `preferred`, the switch that was not made.
    """

    model: str
    reason: Reason
    preferred: str
    gain: float = 0.0
    cost: float = 0.0


class Policy(Protocol):
    """Weighs scores against the cost of a switch. No I/O, no state: the same input gives the same decision."""

    def decide(self, scores: Mapping[str, float], warmth: SessionWarmth) -> Decision:
        """The model for this step. `scores` has every candidate; higher is better.

        Raises ValueError for no candidates and for a score that is not finite, naming the model.
        """
        ...


def best(scores: Mapping[str, float], current: str) -> str:
    """The candidate with the best score; of equal ones the current model, then the first by name."""
    if not scores:
        raise ValueError("scores: give the score of one model at least")
    for model, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"scores: {model!r} has {score}; a finite number is expected")
    return min(scores, key=lambda model: (-scores[model], model != current, model))


def unweighed(scores: Mapping[str, float], warmth: SessionWarmth) -> Decision | None:
    """The router's own choice where there is nothing to weigh; None where there is. Raises as `Policy.decide` does."""
    current = warmth.current_model
    preferred = best(scores, current)
    if not warmth.known:
        return Decision(preferred, Reason.UNKNOWN_WARMTH, preferred)
    if current not in scores:
        return Decision(preferred, Reason.FREE_CHOICE, preferred)
    if preferred not in warmth.models or current not in warmth.models:
        return Decision(preferred, Reason.UNKNOWN_WARMTH, preferred)
    return None


def weighed(chosen: str, preferred: str, current: str, gain: float, cost: float, target: ModelWarmth) -> Decision:
    """A decision after weighing; gain, cost and `target` are about `chosen`, or about `preferred` if it is refused."""
    if chosen == current:
        if preferred == current:
            return Decision(chosen, Reason.KEPT, preferred)
        return Decision(chosen, Reason.GATE_HELD, preferred, gain, cost)
    warm = target.warm_fraction >= WARM_FROM
    return Decision(chosen, Reason.SWITCHED_WARM if warm else Reason.SWITCHED_WORTH_IT, preferred, gain, cost)
