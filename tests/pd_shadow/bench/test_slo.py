"""SLOs, and what one request's tokens say."""

import pytest

from pd_shadow.bench.samples import Leg, Phase, Sample
from pd_shadow.bench.slo import Isolated, Slo
from pd_shadow.engine.settings import SloSettings

SLOW = Isolated([(100, 0.3), (200, 0.5)], decode=0.008)
FAST = Isolated([(100, 0.01), (200, 0.02)], decode=0.002)


def sample(ttft: float, tpot: float, prompt_tokens: int = 100) -> Sample:
    return Sample(prompt_tokens, (ttft, ttft + tpot, ttft + 2 * tpot))


@pytest.mark.parametrize(("tokens", "seconds"), [(50, 0.3), (100, 0.3), (150, 0.4), (200, 0.5), (900, 0.5)])
def test_isolated_prefill_is_interpolated(tokens: int, seconds: float) -> None:
    assert SLOW.prefill_seconds(tokens) == pytest.approx(seconds)


def test_an_slo_is_the_larger_of_floor_and_multiple() -> None:
    fast, slow = Slo(FAST, SloSettings()), Slo(SLOW, SloSettings())
    assert (fast.ttft(150), fast.tpot) == (1.0, 0.025)
    assert (slow.ttft(150), slow.tpot) == (pytest.approx(2.0), pytest.approx(0.04))
    assert Slo(FAST, SloSettings(tpot_floor_seconds=0.1)).tpot == 0.1


def test_a_request_must_meet_both() -> None:
    slo = Slo(SLOW, SloSettings())
    assert slo.met_by(sample(1.4, 0.039))
    assert not slo.met_by(sample(1.6, 0.039))
    assert slo.met_by(sample(1.6, 0.039, prompt_tokens=200))
    assert not slo.met_by(sample(0.1, 0.041))


def test_attainment_counts_failed_requests_as_missed() -> None:
    slo = Slo(FAST, SloSettings())
    samples = [sample(0.1, 0.01), sample(2.0, 0.01), Sample(100, error="HTTP 500"), sample(0.9, 0.024)]
    assert slo.attainment(samples) == 0.5
    assert slo.attainment([]) is None


def test_the_summary_names_floors_measurements_and_limits() -> None:
    summary = Slo(SLOW, SloSettings()).summary()
    assert summary["isolated_prefill_s"] == {"100": 0.3, "200": 0.5}
    assert summary["ttft_s"] == {"100": 1.5, "200": 2.5}
    assert (summary["tpot_s"], summary["tpot_floor_s"], summary["multiple"]) == (0.04, 0.025, 5.0)


def test_times_of_one_request() -> None:
    one = Sample(10, (0.5, 0.6, 0.9, 1.0))
    assert (one.ttft, one.decode_tokens) == (0.5, 3)
    assert one.decode_seconds == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.5 / 3)
    assert one.longest_gap == pytest.approx(0.3)
    assert (Sample(10, (0.5,)).tpot, Sample(10, (0.5,)).longest_gap) == (0.0, 0.0)


def test_legs_count_where_they_end() -> None:
    phase = Phase(10.0, 20.0, legs=[Leg(at, 1, "done") for at in (9.9, 10.0, 15.0, 20.0, 20.1)])
    assert [leg.ended_at for leg in phase.legs_inside] == [10.0, 15.0, 20.0]
