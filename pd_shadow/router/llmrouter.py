"""A router of the LLMRouter library (ulab-uiuc/LLMRouter) behind a switch policy.

LLMRouter's routers have `route_single(query: dict) -> dict`, the query with the chosen model in "model_name" (read in
llmrouter-lib 0.4.0; its server also takes "predicted_llm"). None of them returns the scores behind its choice, so they
come from a function the caller gives, from a "scores" mapping in the result, or else count 1 for the chosen model and 0
for the others. Nothing of LLMRouter is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from pd_shadow.router.client import WarmthClient
from pd_shadow.router.decision import Policy, Reason

Scores = Callable[[Mapping[str, Any]], Mapping[str, float]]


class SupportsRouteSingle(Protocol):
    """The part of an LLMRouter router that is used."""

    def route_single(self, batch: dict[str, Any], /) -> dict[str, Any]:
        """The query with "model_name", and whatever else the router adds."""
        ...


class LLMRouterAdapter:
    """Routes like the router it wraps, but for switches that its policy holds; has `route_single` itself.

    The query's "session_id" (and "tenant") must be those the gateway gets; without them the router's choice stands.
    Raises ValueError for a result that names no model.
    """

    def __init__(
        self,
        router: SupportsRouteSingle,
        warmth: WarmthClient,
        policy: Policy,
        *,
        models: Iterable[str] = (),
        scores: Scores | None = None,
    ) -> None:
        """`scores` maps a query to every candidate's score.

        `models` are the candidates where nothing gives scores; by default the session's current model is the only one
        beside the router's choice.
        """
        self._router = router
        self._warmth = warmth
        self._policy = policy
        self._models = tuple(models)
        self._scores = scores
        self.reasons: Counter[Reason] = Counter()

    def route_single(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """The router's result with "model_name" as the policy decides, "preferred_model" and "switch_reason"."""
        result = dict(self._router.route_single(dict(query)))
        own = str(result.get("model_name") or result.get("predicted_llm") or "")
        if not own:
            raise ValueError(f'route_single of {type(self._router).__name__} gave no "model_name"')
        warmth = self._warmth.get(str(query.get("session_id") or ""), str(query.get("tenant") or ""))
        decision = self._policy.decide(self._scored(query, result, own, warmth.current_model), warmth)
        self.reasons[decision.reason] += 1
        if decision.reason in (Reason.FREE_CHOICE, Reason.UNKNOWN_WARMTH):
            # Nothing was weighed, so what the router chose stands, also where its scores would say otherwise.
            decision = decision._replace(model=own, preferred=own)
        result["model_name"] = decision.model
        result["preferred_model"] = decision.preferred
        result["switch_reason"] = decision.reason.value
        return result

    def route_batch(self, batch: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`route_single` for each query; unlike LLMRouter's own, it runs none of them."""
        return [self.route_single(query) for query in batch]

    def _scored(
        self, query: Mapping[str, Any], result: Mapping[str, Any], own: str, current: str
    ) -> Mapping[str, float]:
        if self._scores is not None:
            return self._scores(query)
        given = result.get("scores")
        if isinstance(given, Mapping) and given:
            return {str(model): float(score) for model, score in given.items()}
        others = set(self._models or filter(None, [current])) - {own}
        return {own: 1.0, **dict.fromkeys(sorted(others), 0.0)}
