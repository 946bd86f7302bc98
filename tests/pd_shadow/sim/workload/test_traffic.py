from dataclasses import replace

import numpy as np
import pytest

from pd_shadow.sim.workload.traffic import (
    AZURE_CODE,
    AZURE_CODE_BURSTY,
    AZURE_CONVERSATION,
    BURST_GPT,
    TrafficProfile,
    generate,
)

# Quantiles of the 2024 week of the Azure traces: mean, then p50, p90, p99.
CONVERSATION = ((1632, 928, 3830, 6683), (106, 41, 342, 694))
CODE = ((2511, 1930, 6251, 7685), (23, 8, 43, 271))


@pytest.mark.parametrize(("profile", "published"), [(AZURE_CONVERSATION, CONVERSATION), (AZURE_CODE, CODE)])
def test_lengths_are_those_of_the_2024_week(
    profile: TrafficProfile, published: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    requests = generate(profile, 100, 1000, np.random.default_rng(1))
    drawn = ([r.prompt_tokens for r in requests], [r.output_tokens for r in requests])
    for lengths, expected in zip(drawn, published, strict=True):
        assert np.mean(lengths) == pytest.approx(expected[0], rel=0.05)
        assert np.percentile(lengths, [50, 90, 99]) == pytest.approx(expected[1:], rel=0.10)


def test_burstgpt_has_the_published_means() -> None:
    requests = generate(BURST_GPT, 100, 1000, np.random.default_rng(1))
    assert np.mean([r.prompt_tokens for r in requests]) == pytest.approx(621, rel=0.05)
    assert np.mean([r.output_tokens for r in requests]) == pytest.approx(126, rel=0.05)


@pytest.mark.parametrize("profile", [AZURE_CONVERSATION, AZURE_CODE, BURST_GPT])
def test_lengths_stay_within_the_caps(profile: TrafficProfile) -> None:
    requests = generate(profile, 100, 500, np.random.default_rng(2))
    assert min(r.prompt_tokens for r in requests) >= 1
    assert max(r.prompt_tokens for r in requests) <= 8_192
    assert min(r.output_tokens for r in requests) >= 1
    assert max(r.output_tokens for r in requests) <= 1_024


def test_arrivals_are_poisson_by_default() -> None:
    arrivals = [r.arrival for r in generate(AZURE_CODE, 50, 1000, np.random.default_rng(3))]
    gaps = np.diff(arrivals)
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    assert arrivals[-1] < 1000
    assert len(arrivals) / 1000 == pytest.approx(50, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03)


def test_bursts_vary_as_asked_and_keep_the_rate() -> None:
    profile = replace(AZURE_CODE, interarrival_cv=3.0)
    requests = generate(profile, 50, 4000, np.random.default_rng(4))
    gaps = np.diff([r.arrival for r in requests])
    assert len(requests) / 4000 == pytest.approx(50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(3, rel=0.05)


def test_short_bursty_runs_have_their_rate_on_average() -> None:
    rng = np.random.default_rng(5)
    counts = [len(generate(AZURE_CODE_BURSTY, 10, 100, rng)) for _ in range(600)]
    assert np.mean(counts) == pytest.approx(1000, rel=0.06)


def test_equal_generators_give_equal_requests() -> None:
    one, other, third = (generate(AZURE_CONVERSATION, 5, 60, np.random.default_rng(s)) for s in (6, 6, 7))
    assert one == other
    assert one != third


def test_no_rate_or_no_time_gives_no_requests() -> None:
    rng = np.random.default_rng(0)
    assert generate(AZURE_CONVERSATION, 0, 60, rng) == []
    assert generate(AZURE_CODE_BURSTY, 0, 60, rng) == []
    assert generate(AZURE_CODE, 5, 0, rng) == []


@pytest.mark.parametrize(
    ("rate", "seconds", "field"), [(-1, 1, "rate_per_second"), (float("nan"), 1, "rate_per"), (1, -1, "seconds")]
)
def test_bad_arguments_are_named(rate: float, seconds: float, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        generate(AZURE_CODE, rate, seconds, np.random.default_rng(0))


@pytest.mark.parametrize("cv", [0, -1, float("nan")])
def test_a_bad_coefficient_of_variation_is_refused(cv: float) -> None:
    with pytest.raises(ValueError, match="interarrival_cv"):
        replace(AZURE_CODE, interarrival_cv=cv)
