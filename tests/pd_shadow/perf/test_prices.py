from dataclasses import replace

import pytest

from pd_shadow.perf.models import MODELS, Trace, model
from pd_shadow.perf.prices import Price, call_cost, price_of


def test_every_model_has_a_price_in_every_benchmark() -> None:
    assert all(price_of(spec, trace).output > 0 for spec in MODELS.values() for trace in (None, *Trace))


def test_router_r1_has_prices_of_its_own() -> None:
    assert price_of(model("L3.1-70B"), Trace.ROUTER_R1) == Price(0.88, 0.88)
    assert price_of(model("L3.1-70B"), Trace.FUSIONBENCH) == Price(0.9, 0.9)


def test_a_model_without_a_price_is_named() -> None:
    with pytest.raises(ValueError, match="'Llama-9' has no price"):
        price_of(replace(model("L3.1-8B"), name="Llama-9"))


def test_cached_input_costs_a_tenth() -> None:
    price = Price(input=0.15, output=0.6)
    assert call_cost(price, 1_000_000, 0, 0) == pytest.approx(0.15)
    assert call_cost(price, 1_000_000, 1_000_000, 0) == pytest.approx(0.015)
    assert call_cost(price, 10_000, 4000, 500) == pytest.approx((6000 * 0.15 + 400 * 0.15 + 500 * 0.6) / 1e6)


@pytest.mark.parametrize(
    ("tokens", "named"), [((10, 11, 0), "cached_tokens=11"), ((10, -1, 0), "cached_tokens=-1"), ((10, 0, -2), "output")]
)
def test_counts_that_cannot_be_are_named(tokens: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call_cost(Price(1, 1), *tokens)
