"""Routing through a gate: a switch needs a gain that is the larger, the colder its target.

In the manner of ModelSwitchGate of the vLLM Semantic Router (vllm-project/semantic-router at 10e0180,
src/semantic-router/pkg/selection/model_switch_gate.go): it switches when score gain − handoff penalty − cache warmth of
the *current* model × weight exceeds a minimum, so a long session holds on to its model. With shadow prefill the target
may hold the context too, so the penalty here falls with the *target's* warm fraction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pd_shadow.router.decision import Decision, unweighed, weighed
from pd_shadow.router.warmth import ModelWarmth, SessionWarmth


@dataclass(frozen=True)
class SwitchGate:
    """Switches to the model with the best score whose gain exceeds `min_gain` + `cold_gain` × (1 − warm fraction).

    With several candidates a warm one may pass where the best one is held. A model without an instance to take calls
    never passes. Raises ValueError for a negative or infinite gain.
    """

    # What a switch to a model that holds the whole context must gain, in units of score.
    min_gain: float = 0.0
    # What a switch to a model that holds nothing must gain beyond that.
    cold_gain: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("min_gain", self.min_gain), ("cold_gain", self.cold_gain)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: {value} must be finite and not negative")

    def threshold(self, warmth: ModelWarmth) -> float:
        """The gain a switch to this model must exceed; infinite where no instance takes calls."""
        if math.isinf(warmth.estimated_prefill_seconds):
            return math.inf
        return self.min_gain + self.cold_gain * (1.0 - warmth.warm_fraction)

    def decide(self, scores: Mapping[str, float], warmth: SessionWarmth) -> Decision:
        """See Policy.decide. Candidates the controller does not know are not considered."""
        own = unweighed(scores, warmth)
        if own is not None:
            return own
        current = warmth.current_model
        ranked = sorted(
            (model for model in scores if model in warmth.models),
            key=lambda model: (-scores[model], model != current, model),
        )
        preferred = ranked[0]
        for model in ranked:
            gain, threshold = scores[model] - scores[current], self.threshold(warmth.models[model])
            if model == current or gain > threshold:
                chosen = model
                break
        target = chosen if chosen != current else preferred
        return weighed(
            chosen,
            preferred,
            current,
            scores[target] - scores[current],
            self.threshold(warmth.models[target]),
            warmth.models[target],
        )
