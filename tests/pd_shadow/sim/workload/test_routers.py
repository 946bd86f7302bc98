from collections.abc import Sequence

import numpy as np
import pytest

from pd_shadow.sim.workload.routers import AlwaysRouter, MarkovRouter, RandomRouter


def switching(models: Sequence[int]) -> float:
    return float(np.mean(np.diff(models) != 0))


def test_always_stays() -> None:
    assert list(AlwaysRouter(1).route("t", 4, 2, np.random.default_rng(0))) == [1, 1, 1, 1]


@pytest.mark.parametrize("index", [-1, 2])
def test_always_refuses_a_model_that_is_not_there(index: int) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        AlwaysRouter(index).route("t", 4, 2, np.random.default_rng(0))


@pytest.mark.parametrize("models", [2, 5])
def test_random_uses_all_models_alike(models: int) -> None:
    route = RandomRouter().route("t", 20_000, models, np.random.default_rng(1))
    assert np.bincount(route) / 20_000 == pytest.approx([1 / models] * models, rel=0.06)
    assert switching(route) == pytest.approx(1 - 1 / models, rel=0.05)


@pytest.mark.parametrize("models", [2, 4])
@pytest.mark.parametrize("probability", [0.0, 0.05, 0.5, 1.0])
def test_markov_switches_with_its_probability(models: int, probability: float) -> None:
    route = MarkovRouter(probability).route("t", 40_000, models, np.random.default_rng(2))
    assert switching(route) == pytest.approx(probability, rel=0.07)


def test_markov_goes_to_all_others_alike() -> None:
    route = np.array(MarkovRouter(1.0).route("t", 40_000, 4, np.random.default_rng(3)))
    assert np.bincount((route[1:] - route[:-1]) % 4, minlength=4)[1:] / 40_000 == pytest.approx([1 / 3] * 3, rel=0.05)


def test_markov_has_nowhere_to_go_from_the_only_model() -> None:
    assert list(MarkovRouter(1.0).route("t", 3, 1, np.random.default_rng(0))) == [0, 0, 0]


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        MarkovRouter(1.5)
    with pytest.raises(ValueError, match="models"):
        RandomRouter().route("t", 3, 0, np.random.default_rng(0))
