import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_shadow.perf.online import WARM_UP, OnlineLatency, StepWork

MIXED_STEP = 0.003


def linear(work: StepWork) -> float:
    """An engine whose every constant is of the kind that is learnt."""
    fixed = 0.012 + (MIXED_STEP if work.prefill_tokens else 0.0)
    attention = 6e-9 * work.prefill_pairs + 2e-8 * work.decode_kv_tokens
    return fixed + 4.5e-5 * work.prefill_tokens + attention + 6.5e-5 * work.decodes


def roofline(work: StepWork) -> float:
    """Appendix B: GEMMs take the longer of the arithmetic and reading the weights."""
    tokens = work.prefill_tokens + work.decodes
    attention = 6e-9 * work.prefill_pairs + 2e-8 * work.decode_kv_tokens + 2e-5 * work.decodes
    return 0.004 + (MIXED_STEP if work.prefill_tokens else 0.0) + max(0.008, 4.5e-5 * tokens) + attention


def decodes(rng: random.Random) -> StepWork:
    work = StepWork()
    for _ in range(rng.randint(1, 64)):
        work = work.with_decode(rng.randint(100, 8000))
    return work


def mixed(rng: random.Random) -> StepWork:
    work = decodes(rng) if rng.random() < 0.8 else StepWork()
    return work.with_prefill(rng.choice([256, 512, 1024, 2048]), rng.randint(0, 16_000))


def step(rng: random.Random) -> StepWork:
    return mixed(rng) if rng.random() < 0.3 else decodes(rng)


def teach(
    model: OnlineLatency,
    truth: Callable[[StepWork], float],
    count: int,
    rng: random.Random,
    *,
    noise: float = 0.0,
    draw: Callable[[random.Random], StepWork] = step,
) -> None:
    for _ in range(count):
        work = draw(rng)
        model.observe(work, truth(work) * (1 + rng.gauss(0, noise)))


def errors(
    model: OnlineLatency, truth: Callable[[StepWork], float], draw: Callable[[random.Random], StepWork] = step
) -> list[float]:
    """Relative errors over steps the model was not taught, from the least to the largest."""
    rng = random.Random("unseen")
    works = [draw(rng) for _ in range(200)]
    return sorted(abs(model.seconds(work) / truth(work) - 1) for work in works)


def test_a_chunk_attends_to_what_is_cached_and_to_half_of_itself() -> None:
    work = StepWork().with_decode(700).with_prefill(100, 1000)
    # 100 · 1000 + 100² / 2.
    assert work == StepWork(prefill_tokens=100, prefill_pairs=105_000, decodes=1, decode_kv_tokens=700)
    assert work.tokens == 101
    # The same pairs in one chunk as in two.
    assert StepWork().with_prefill(100, 0).with_prefill(50, 100) == StepWork().with_prefill(150, 0)
    assert work.with_prefill(0, 5000) == work


@pytest.mark.parametrize("seed", range(3))
def test_converges_on_steps_of_its_own_form(seed: int) -> None:
    model, rng = OnlineLatency(), random.Random(seed)
    teach(model, linear, 50, rng)
    assert errors(model, linear)[-1] < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_converges_through_noise(seed: int) -> None:
    model, rng = OnlineLatency(), random.Random(seed)
    teach(model, linear, 1000, rng, noise=0.2)
    assert errors(model, linear)[100] < 0.05
    assert errors(model, linear)[-1] < 0.15


@pytest.mark.parametrize("seed", range(3))
def test_stays_close_where_reading_the_weights_bounds_small_steps(seed: int) -> None:
    model, rng = OnlineLatency(), random.Random(seed)
    teach(model, roofline, 500, rng)
    assert errors(model, roofline)[100] < 0.05
    assert errors(model, roofline)[-1] < 0.25


def test_learns_what_leaving_the_decode_only_step_costs() -> None:
    model, rng = OnlineLatency(), random.Random(1)
    teach(model, linear, 200, rng)
    decode_only = StepWork(decodes=32, decode_kv_tokens=64_000)
    difference = model.seconds(decode_only.with_prefill(1, 0)) - model.seconds(decode_only)
    assert difference == pytest.approx(MIXED_STEP, rel=0.05)


def test_is_warm_once_it_has_seen_prefill_work_often_enough() -> None:
    model, rng = OnlineLatency(), random.Random(1)
    warm = []
    for count, draw in ((100, decodes), (WARM_UP - 1, mixed), (1, mixed)):
        teach(model, linear, count, rng, draw=draw)
        warm.append(model.warm)
    assert warm == [False, False, True]
    assert model.observations == 100 + WARM_UP
    assert errors(model, linear)[-1] < 0.01


def test_the_first_prefill_work_is_learnt_from_at_once() -> None:
    model, rng = OnlineLatency(), random.Random(1)
    teach(model, linear, 101, rng, draw=decodes)
    work = mixed(rng)
    model.observe(work, linear(work))
    assert model.seconds(work) == pytest.approx(linear(work), rel=0.01)


def test_many_decode_only_steps_do_not_make_it_forget_the_price_of_prefill() -> None:
    model, rng = OnlineLatency(), random.Random(1)
    teach(model, linear, 300, rng, noise=0.1)
    teach(model, linear, 12_000, rng, noise=0.1, draw=decodes)
    assert errors(model, linear, mixed)[-1] < 0.15


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("poison", [5.0, 60.0, 1000.0])
def test_recovers_from_a_first_iteration_that_took_very_long(poison: float, seed: int) -> None:
    model, rng = OnlineLatency(), random.Random(seed)
    model.observe(step(rng), poison)
    teach(model, linear, 150, rng)
    assert errors(model, linear)[-1] < 0.05


def test_recovers_from_a_clock_that_did_not_run() -> None:
    model, rng = OnlineLatency(), random.Random(1)
    teach(model, lambda _: 0.0, 40, rng)
    assert model.seconds(mixed(rng)) == 0
    teach(model, linear, 150, rng)
    assert errors(model, linear)[-1] < 0.05


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outlier", [1000.0, 0.0])
def test_one_outlier_changes_little(outlier: float, seed: int) -> None:
    model, rng = OnlineLatency(), random.Random(seed)
    teach(model, linear, 200, rng)
    model.observe(mixed(rng), outlier)
    teach(model, linear, 8, rng)
    # As it came, the first of them would add seconds to every step.
    assert errors(model, linear)[100] < 0.15
    assert errors(model, linear)[-1] < 0.5


def test_outliers_now_and_then_are_never_taken_for_the_rule() -> None:
    model, rng = OnlineLatency(), random.Random(1)
    teach(model, linear, 100, rng)
    for _ in range(20):
        model.observe(mixed(rng), 1000.0)
        teach(model, linear, 63, rng)
        assert errors(model, linear)[-1] < 0.5


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_lasting_change_is_learnt(factor: float) -> None:
    model, rng = OnlineLatency(), random.Random(1)
    teach(model, linear, 1000, rng)
    teach(model, lambda work: factor * linear(work), 150, rng)
    assert errors(model, lambda work: factor * linear(work))[-1] < 0.05


def test_a_lasting_change_of_rare_prefill_steps_is_learnt() -> None:
    model, rng = OnlineLatency(), random.Random(1)
    teach(model, linear, 1000, rng)
    slower = 10.0
    for _ in range(40):
        teach(model, linear, 20, rng, draw=decodes)
        teach(model, lambda work: slower * linear(work), 1, rng, draw=mixed)
    assert errors(model, lambda work: slower * linear(work), mixed)[100] < 0.1


works = st.builds(
    StepWork,
    prefill_tokens=st.integers(1, 4096),
    prefill_pairs=st.floats(0, 1e8),
    decodes=st.integers(0, 256),
    decode_kv_tokens=st.integers(0, 1_000_000),
) | st.builds(
    StepWork, st.just(0), st.just(0.0), decodes=st.integers(0, 256), decode_kv_tokens=st.integers(0, 1_000_000)
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(works, st.floats(0, 100)), max_size=60),
    works,
    st.integers(0, 4096),
    st.integers(0, 100_000),
    st.integers(0, 100_000),
)
def test_whatever_it_saw_predictions_are_not_negative_and_do_not_fall_as_work_grows(
    seen: list[tuple[StepWork, float]], work: StepWork, new: int, cached: int, kv: int
) -> None:
    model = OnlineLatency()
    for observed, seconds in seen:
        model.observe(observed, seconds)
    expected = model.seconds(work)
    assert expected >= 0
    assert model.seconds(work.with_decode(kv)) >= expected
    assert model.seconds(work.with_prefill(new, cached)) >= expected
    more, most = work.with_prefill(new, cached), work.with_prefill(new + 1, cached)
    assert model.seconds(most) >= model.seconds(more)
