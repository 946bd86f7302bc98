"""Percentiles and spreads."""

import pytest

from pd_shadow.common.figures import percentile, spread


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([1.0, 2.0, 4.0], 75) == 3.0
    assert [percentile([7.0], share) for share in (0, 50, 100)] == [7.0, 7.0, 7.0]


def test_a_spread_does_not_need_ordered_values() -> None:
    assert spread([3.0, 1.0, 2.0]) == {
        "p50": 2.0,
        "p90": pytest.approx(2.8),
        "p99": pytest.approx(2.98),
        "mean": 2.0,
        "n": 3,
    }


def test_an_empty_spread_has_no_figures() -> None:
    assert spread([]) == {"p50": None, "p90": None, "p99": None, "mean": None, "n": 0}
