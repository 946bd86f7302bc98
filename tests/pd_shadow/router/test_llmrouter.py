"""The adapter around routers shaped like those of LLMRouter, with warmth from a scripted answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

import pytest

from pd_shadow.router import UNKNOWN, LLMRouterAdapter, ModelWarmth, Reason, SessionWarmth, SwitchGate, WarmthClient

GATE = SwitchGate(cold_gain=0.5)


class Warmths:
    """Stands in for the client; keeps who was asked about."""

    def __init__(self, answer: SessionWarmth) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []

    def get(self, session_id: str, tenant: str = "") -> SessionWarmth:
        self.asked.append((session_id, tenant))
        return self.answer


class Router:
    """As LLMRouter's single-round routers: a copy of the query with what `said` adds."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def route_single(self, query: dict[str, Any]) -> dict[str, Any]:
        return {**query, **self.said}


def session(fraction: float, *, current: str = "small") -> SessionWarmth:
    """A session on `current`; the other model holds `fraction` of the context."""
    other = {"small": "large", "large": "small"}[current]
    warm, target = (ModelWarmth(int(f * 1000), f, 0, 1000, 1.0, 0.5) for f in (1.0, fraction))
    return SessionWarmth(current, {current: warm, other: target})


def adapter(router: Router, warmth: SessionWarmth, **options: Any) -> LLMRouterAdapter:
    return LLMRouterAdapter(router, cast("WarmthClient", Warmths(warmth)), GATE, **options)


QUERY = {"query": "q", "session_id": "s", "tenant": "t"}


@pytest.mark.parametrize(
    ("router", "options"),
    [
        (Router(model_name="large", scores={"small": 0.5, "large": 0.7}), {}),
        (Router(predicted_llm="large"), {"scores": lambda query: {"small": 0.5, "large": 0.7}}),
    ],
)
def test_a_cold_switch_is_held_and_a_warm_one_made(router: Router, options: Mapping[str, Any]) -> None:
    cold = adapter(router, session(0.0), **options)
    held = cold.route_single(QUERY)
    assert {key: held[key] for key in ("query", "model_name", "preferred_model", "switch_reason")} == {
        "query": "q",
        "model_name": "small",
        "preferred_model": "large",
        "switch_reason": "gate_held",
    }
    warm = adapter(router, session(1.0), **options).route_single(QUERY)
    assert (warm["model_name"], warm["switch_reason"]) == ("large", "switched_warm")
    assert cold.reasons == {Reason.GATE_HELD: 1}


def test_a_choice_without_scores_weighs_one_against_the_current_model() -> None:
    # A gain of 1 is more than the gate asks for at any warmth, until it asks for more.
    assert adapter(Router(model_name="large"), session(0.0)).route_single(QUERY)["switch_reason"] == "switched_worth_it"
    strict = LLMRouterAdapter(
        Router(model_name="large"), cast("WarmthClient", Warmths(session(0.0))), SwitchGate(cold_gain=2.0)
    )
    assert strict.route_single(QUERY)["model_name"] == "small"
    # A current model that the router does not offer is not held on to.
    only = LLMRouterAdapter(
        Router(model_name="large"), cast("WarmthClient", Warmths(session(0.0))), GATE, models=["large", "huge"]
    )
    assert only.route_single(QUERY)["switch_reason"] == "free_choice"


def test_without_warmth_the_router_s_choice_stands_whatever_the_scores_say() -> None:
    router = Router(model_name="small", scores={"small": 0.1, "large": 0.9})
    result = adapter(router, UNKNOWN).route_single(QUERY)
    assert (result["model_name"], result["preferred_model"]) == ("small", "small")
    assert result["switch_reason"] == "unknown_warmth"


def test_the_session_is_asked_about_under_its_tenant_and_the_query_is_left_alone() -> None:
    warmths = Warmths(UNKNOWN)
    wrapped = LLMRouterAdapter(Router(model_name="large"), cast("WarmthClient", warmths), GATE)
    query = dict(QUERY)
    batch = wrapped.route_batch([query, {"query": "no session"}])
    assert [result["model_name"] for result in batch] == ["large", "large"]
    assert warmths.asked == [("s", "t"), ("", "")]
    assert query == QUERY


def test_a_router_that_names_no_model_is_an_error() -> None:
    with pytest.raises(ValueError, match='route_single of Router gave no "model_name"'):
        adapter(Router(), UNKNOWN).route_single(QUERY)


def test_the_library_is_not_needed() -> None:
    assert "pd_shadow.router.llmrouter" in sys.modules
    assert "llmrouter" not in sys.modules
