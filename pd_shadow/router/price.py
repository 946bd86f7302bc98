"""Routing by price: a score, less what the wait and the uncached tokens cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pd_shadow.router.decision import Decision, best, unweighed, weighed
from pd_shadow.router.warmth import ModelWarmth, SessionWarmth


@dataclass(frozen=True)
class SwitchPrice:
    """Takes the model with the highest score − estimated prefill seconds × a − price of its uncached tokens × b.

    Staying is priced like any switch: a current model behind a long queue can lose against a warm one. Raises
    ValueError for a weight or price that is negative or not finite.
    """

    # a: how much score one second until the first token is worth.
    score_per_second: float
    # b: how much score one unit of money is worth; 0 leaves prices out.
    score_per_cost: float = 0.0
    # Money per million uncached prompt tokens by model; models not named here cost nothing.
    cost_per_million_tokens: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {f"cost_per_million_tokens[{model!r}]": cost for model, cost in self.cost_per_million_tokens.items()}
        weights = {"score_per_second": self.score_per_second, "score_per_cost": self.score_per_cost}
        for name, value in (weights | named).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: {value} must be finite and not negative")

    def cost(self, model: str, warmth: ModelWarmth) -> float:
        """What computing the prompt on `model` costs, in units of score; infinite where no instance takes calls."""
        seconds = warmth.estimated_prefill_seconds
        if math.isinf(seconds):
            return math.inf
        money = warmth.uncached_tokens * self.cost_per_million_tokens.get(model, 0.0) / 1e6
        return seconds * self.score_per_second + money * self.score_per_cost

    def decide(self, scores: Mapping[str, float], warmth: SessionWarmth) -> Decision:
        """See Policy.decide. Candidates the controller does not know are not considered."""
        own = unweighed(scores, warmth)
        if own is not None:
            return own
        current = warmth.current_model
        costs = {model: self.cost(model, warmth.models[model]) for model in scores if model in warmth.models}

        def extra(model: str) -> float:
            """What a model costs more than staying; infinite without instances, whatever staying costs."""
            if model == current:
                return 0.0
            return math.inf if math.isinf(costs[model]) else costs[model] - costs[current]

        def rank(model: str) -> tuple[float, float, bool, str]:
            # The second decides where nothing can be worse than staying.
            net = scores[model] - scores[current] - extra(model)
            return -net, costs[model] - scores[model], model != current, model

        preferred = best(scores, current)
        chosen = min(costs, key=rank)
        target = chosen if chosen != current else preferred
        return weighed(
            chosen, preferred, current, scores[target] - scores[current], extra(target), warmth.models[target]
        )
