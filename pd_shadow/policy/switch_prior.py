"""How likely the session's next call goes to a model, and which models are worth a shadow.

Paper section 3.1: jobs run in order of their switch probability, estimated per task and current model from past
sessions; gating below a threshold reduces waste and loses switches the predictor misses (the Predictive variant).
"""

from collections import Counter
from collections.abc import Container, Iterable
from enum import Enum
from typing import NamedTuple

# Pseudo-observations that carry an estimate from the coarser level to the finer one.
BACKOFF_WEIGHT = 4.0
MAX_TASKS = 256


class Verdict(Enum):
    """Whether a model is shadowed; the names are those of the API's ShadowReason, but for SHADOW."""

    SHADOW = "shadow"
    BELOW_GATE = "below_gate"
    NOT_TOP_K = "not_top_k"


class Prediction(NamedTuple):
    model: str
    probability: float
    verdict: Verdict


class SwitchPrior:
    """Counts of (task, current model) -> next model, backed off to the current model alone and then to uniform.

    At most `max_tasks` tasks are told apart; calls of further ones count under the current model only.
    """

    def __init__(self, max_tasks: int = MAX_TASKS) -> None:
        self._max_tasks = max_tasks
        self._tasks: set[str] = set()
        self._by_task: dict[tuple[str, str], Counter[str]] = {}
        self._by_model: dict[str, Counter[str]] = {}

    def observe(self, task: str, current: str, following: str) -> None:
        """Learn from one call: the session was on `current` and its next call went to `following`."""
        self._by_model.setdefault(current, Counter())[following] += 1
        if task and (task in self._tasks or len(self._tasks) < self._max_tasks):
            self._tasks.add(task)
            self._by_task.setdefault((task, current), Counter())[following] += 1

    def probability(self, task: str, current: str, following: str, models: int) -> float:
        """P(next call on `following`), among `models` models in all; 0 to 1."""
        estimate = 1.0 / max(models, 1)
        for counts in (self._by_model.get(current), self._by_task.get((task, current))):
            if counts:
                estimate = (counts[following] + BACKOFF_WEIGHT * estimate) / (counts.total() + BACKOFF_WEIGHT)
        return estimate

    def rank(
        self,
        task: str,
        current: str,
        candidates: Iterable[str],
        *,
        shadowable: Container[str] | None = None,
        gate: float = 0.0,
        top_k: int | None = None,
    ) -> list[Prediction]:
        """The other models, likeliest first, each with its verdict; `top_k` None shadows all that pass the gate.

        Models that are not in `shadowable` are left out, and take no place of the top k; None: all are.
        """
        others = sorted(model for model in set(candidates) if model != current)
        scored = [
            (self.probability(task, current, model, len(others) + 1), model)
            for model in others
            if shadowable is None or model in shadowable
        ]
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        predictions = []
        for place, (probability, model) in enumerate(scored):
            verdict = Verdict.SHADOW
            if probability < gate:
                verdict = Verdict.BELOW_GATE
            elif top_k is not None and place >= top_k:
                verdict = Verdict.NOT_TOP_K
            predictions.append(Prediction(model, probability, verdict))
        return predictions
