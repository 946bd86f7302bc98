"""What the two policies decide, and what both keep to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.router.decision import Policy, Reason
from pd_shadow.router.gate import SwitchGate
from pd_shadow.router.price import SwitchPrice
from pd_shadow.router.warmth import NEW, UNKNOWN, ModelWarmth, SessionWarmth

GATE = SwitchGate(min_gain=0.01, cold_gain=0.2)
PRICE = SwitchPrice(score_per_second=0.1)
POLICIES = (GATE, PRICE)


def model(warm: float = 0.0, seconds: float = 2.0, context: int = 10_000) -> ModelWarmth:
    return ModelWarmth(int(warm * context), warm, 0, context, seconds, 0.5)


def on_small(**others: ModelWarmth) -> SessionWarmth:
    """A session on `small`, which is warm."""
    return SessionWarmth("small", {"small": model(1.0, 0.0), **others})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_warm_model_takes_the_step_for_a_small_gain(policy: Policy) -> None:
    decision = policy.decide({"small": 0.5, "large": 0.55}, on_small(large=model(1.0, 0.0)))
    assert (decision.model, decision.reason) == ("large", Reason.SWITCHED_WARM)
    assert decision.gain == pytest.approx(0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cold_model_needs_a_large_gain(policy: Policy) -> None:
    warmth = on_small(large=model(0.0, 2.0))
    held = policy.decide({"small": 0.5, "large": 0.6}, warmth)
    assert (held.model, held.preferred, held.reason) == ("small", "large", Reason.GATE_HELD)
    assert held.cost > held.gain > 0
    worth = policy.decide({"small": 0.5, "large": 0.8}, warmth)
    assert (worth.model, worth.reason) == ("large", Reason.SWITCHED_WORTH_IT)
    assert worth.gain > worth.cost > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_held_where_nothing_is_known(policy: Policy) -> None:
    scores = {"small": 0.5, "large": 0.55}
    cold = on_small(large=model())
    for warmth, reason in (
        (UNKNOWN, Reason.UNKNOWN_WARMTH),
        # The controller has heard of neither, or of one of them only.
        (SessionWarmth("small"), Reason.UNKNOWN_WARMTH),
        (on_small(), Reason.UNKNOWN_WARMTH),
        (SessionWarmth("small", {"large": model()}), Reason.UNKNOWN_WARMTH),
        (NEW, Reason.FREE_CHOICE),
        # The session's model is not on offer any more.
        (SessionWarmth("old", {**cold.models, "old": model(1.0, 0.0)}), Reason.FREE_CHOICE),
    ):
        assert policy.decide(scores, warmth) == ("large", reason, "large", 0.0, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_best_model_is_kept_and_a_tie_too(policy: Policy) -> None:
    warmth = on_small(large=model(1.0, 0.0))
    for scores in ({"small": 0.9, "large": 0.5}, {"large": 0.5, "small": 0.5}, {"small": 0.1}):
        assert policy.decide(scores, warmth)[:3] == ("small", Reason.KEPT, "small")


@pytest.mark.parametrize("policy", POLICIES)
def test_of_several_candidates_a_warm_one_passes_where_the_best_is_held(policy: Policy) -> None:
    warmth = on_small(large=model(0.0, 2.0), medium=model(1.0, 0.0), unheard=model())
    decision = policy.decide({"small": 0.5, "medium": 0.6, "large": 0.65, "elsewhere": 0.3}, warmth)
    assert decision[:3] == ("medium", Reason.SWITCHED_WARM, "large")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_without_instances_gets_no_step(policy: Policy) -> None:
    down = model(0.0, math.inf)
    decision = policy.decide({"small": 0.1, "large": 9.0}, on_small(large=down))
    assert (decision.model, decision.reason, decision.cost) == ("small", Reason.GATE_HELD, math.inf)
    assert policy.decide({"small": 1.0, "large": 9.0}, SessionWarmth("small", {"small": down, "large": down})).model


def test_the_price_of_staying_counts_too() -> None:
    busy = SessionWarmth("small", {"small": model(1.0, 30.0), "large": model(1.0, 0.0)})
    decision = PRICE.decide({"small": 0.6, "large": 0.5}, busy)
    assert decision[:3] == ("large", Reason.SWITCHED_WARM, "small")
    assert decision.cost == pytest.approx(-3.0)


def test_from_a_model_without_instances_the_best_of_the_others_is_taken() -> None:
    down = {"small": model(1.0, math.inf)}
    others = {"large": model(1.0, 0.0), "medium": model(0.0, 1.0), "huge": model(0.0, math.inf)}
    decision = PRICE.decide(
        {"small": 9.0, "medium": 0.5, "large": 0.45, "huge": 8.0}, SessionWarmth("small", down | others)
    )
    assert (decision.model, decision.cost) == ("large", -math.inf)


def test_uncached_tokens_cost_money() -> None:
    scores, warmth = {"small": 0.5, "large": 0.6}, on_small(large=model(0.0, 0.0, 100_000))
    assert SwitchPrice(0.0).decide(scores, warmth).model == "large"
    # 100,000 tokens at 3 a million cost 0.3, which is worth 0.15.
    dear = SwitchPrice(0.0, score_per_cost=0.5, cost_per_million_tokens={"large": 3.0}).decide(scores, warmth)
    assert (dear.model, dear.cost) == ("small", pytest.approx(0.15))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("scores", "message"),
    [({}, "one model at least"), ({"large": math.nan}, "'large' has nan"), ({"small": math.inf}, "'small' has inf")],
)
def test_scores_that_are_none_are_refused(policy: Policy, scores: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy.decide(scores, UNKNOWN)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_weights_that_make_no_sense_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^cold_gain: .* finite and not negative"):
        SwitchGate(cold_gain=value)
    with pytest.raises(ValueError, match=r"^score_per_second: "):
        SwitchPrice(value)
    with pytest.raises(ValueError, match=r"^cost_per_million_tokens\['m'\]: "):
        SwitchPrice(0.0, 1.0, {"m": value})


fractions = st.floats(0, 1)
warmths = st.builds(model, fractions, st.floats(0, 100) | st.just(math.inf), st.integers(0, 200_000))
names = st.sampled_from("abcde")


@given(
    scores=st.dictionaries(names, st.floats(-10, 10), min_size=1),
    current=names,
    models=st.dictionaries(names, warmths),
    policy=st.sampled_from((*POLICIES, SwitchGate(0.0, 0.0), SwitchPrice(0.0))),
)
def test_every_decision_names_a_candidate_and_the_reason_fits(
    scores: dict[str, float], current: str, models: dict[str, ModelWarmth], policy: Policy
) -> None:
    decision = policy.decide(scores, SessionWarmth(current, models))
    assert decision.model in scores
    assert scores[decision.preferred] == max(scores.values())
    match decision.reason:
        case Reason.KEPT:
            assert decision.model == decision.preferred == current
        case Reason.GATE_HELD:
            assert decision.model == current != decision.preferred
            assert decision.cost >= decision.gain
        case Reason.SWITCHED_WARM | Reason.SWITCHED_WORTH_IT:
            assert decision.model != current
            assert decision.gain >= decision.cost
            assert math.isfinite(models[decision.model].estimated_prefill_seconds)
        case Reason.UNKNOWN_WARMTH | Reason.FREE_CHOICE:
            assert decision.model == decision.preferred


@given(gain=st.floats(0, 1), colder=fractions, warmer=fractions)
def test_what_passes_the_gate_cold_passes_it_warm(gain: float, colder: float, warmer: float) -> None:
    colder, warmer = sorted((colder, warmer))
    scores = {"small": 0.0, "large": gain}
    if GATE.decide(scores, on_small(large=model(colder))).model == "large":
        assert GATE.decide(scores, on_small(large=model(warmer))).model == "large"
