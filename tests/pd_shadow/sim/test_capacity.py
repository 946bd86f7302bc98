"""The search for a model's capacity, and what is remembered of it."""

from pathlib import Path

import pytest

from pd_shadow.sim import capacity
from pd_shadow.sim.capacity import PRECISION, Capacities, Capacity, attainment, find
from pd_shadow.sim.config import RunConfig

from .rig import MODELS, tiny

NAME = MODELS[0]


class Carried:
    """In place of simulated clusters: splits that carry so much and no more, and the rates that were tried."""

    def __init__(self, rates: dict[int | None, float]) -> None:
        self.tried: list[tuple[int | None, float]] = []
        self._rates = rates

    def __call__(self, config: RunConfig, name: str, split: int | None, rate: float) -> float:
        self.tried.append((split, rate))
        return 0.95 if rate <= self._rates[split] else 0.85


def carrying(monkeypatch: pytest.MonkeyPatch, rates: dict[int | None, float]) -> Carried:
    carried = Carried(rates)
    monkeypatch.setattr(capacity, "attainment", carried)
    return carried


@pytest.mark.parametrize("rate", [0.3, 3.0, 4.0, 37.0, 500.0])
def test_the_search_ends_just_below_what_is_carried(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    carrying(monkeypatch, {None: rate})
    found = find(tiny(mode="colocated"), NAME)
    assert found.prefill_instances is None
    assert rate * (1 - 1.01 * PRECISION) <= found.rate <= rate


def test_the_split_that_carries_most_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    carrying(monkeypatch, {1: 9.0, 2: 21.0, 3: 14.0})
    found = find(tiny(instances=4), NAME)
    assert found.prefill_instances == 2
    assert found.rate == pytest.approx(21, rel=1.01 * PRECISION)


def test_of_equal_splits_the_one_with_more_prefill_instances_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    carrying(monkeypatch, {1: 10.0, 2: 20.0, 3: 20.0})
    assert find(tiny(instances=4), NAME).prefill_instances == 3


def test_a_split_that_cannot_win_is_not_searched_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = carrying(monkeypatch, {1: 3.0, 2: 3.0, 3: 100.0})
    find(tiny(instances=4), NAME)
    assert [rate for split, rate in carried.tried if split == 1] == [4.0]


def test_a_configured_split_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = carrying(monkeypatch, {1: 5.0})
    assert find(tiny(instances=4, prefill_instances=1), NAME).prefill_instances == 1
    assert {split for split, _ in carried.tried} == {1}


@pytest.mark.parametrize(("mode", "split"), [("colocated", None), ("disaggregated", 1)])
def test_clusters_keep_their_slos_until_they_are_full(
    monkeypatch: pytest.MonkeyPatch, mode: str, split: int | None
) -> None:
    monkeypatch.setattr(capacity, "WARM_UP_SECONDS", 5.0)
    monkeypatch.setattr(capacity, "SECONDS", 20.0)
    assert attainment(tiny(mode=mode), NAME, split, 2.0) == 1.0
    assert attainment(tiny(mode=mode), NAME, split, 150.0) < 0.5


def test_what_was_found_is_there_the_next_time(tmp_path: Path) -> None:
    file = tmp_path / "capacities.json"
    known = Capacities(file)
    assert not known.has(tiny(), NAME)
    with pytest.raises(KeyError):
        known.known(tiny(), NAME)
    known.add(tiny(), NAME, Capacity(12.5, 1))
    known.add(tiny(mode="colocated"), NAME, Capacity(9.0, None))
    again = Capacities(file)
    assert again.known(tiny(), NAME) == Capacity(12.5, 1)
    assert again.known(tiny(mode="colocated"), NAME) == Capacity(9.0, None)
    assert not again.has(tiny(), MODELS[1])
    assert [each.name for each in tmp_path.iterdir()] == ["capacities.json"]


@pytest.mark.parametrize(
    "fields",
    [
        {"approach": "eager"},
        {"seed": 7},
        {"load": 0.2},
        {"window": "trough"},
        {"seconds": 1},
        {"trace": "GHCP-coding"},
        {"models": (NAME, "Gemma-7B")},
        {"slo_scale": 2.0},
        {"policy": {"beta": 0.9}},
        {"hardware": {"host_gb_per_gpu": 1, "host_gb_per_second": 1}},
    ],
)
def test_runs_share_what_capacity_does_not_depend_on(tmp_path: Path, fields: dict[str, object]) -> None:
    known = Capacities(tmp_path / "capacities.json")
    known.add(tiny(), NAME, Capacity(1.0, 1))
    assert known.has(tiny(**fields), NAME)


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "colocated"},
        {"instances": 4},
        {"prefill_instances": 1},
        {"normal": "azure-code"},
        {"chunk_tokens": 512},
        {"hardware": {"tensor_parallel_factor": 2}},
        {"hardware": {"link_gb_per_second_per_gpu": 10}},
    ],
)
def test_and_nothing_else(tmp_path: Path, fields: dict[str, object]) -> None:
    known = Capacities(tmp_path / "capacities.json")
    known.add(tiny(), NAME, Capacity(1.0, 1))
    assert not known.has(tiny(**fields), NAME)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', '{"a": [1, 2, 3]}'])
def test_an_unreadable_file_is_as_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "capacities.json"
    file.write_text(content)
    known = Capacities(file)
    assert not known.has(tiny(), NAME)
    known.add(tiny(), NAME, Capacity(1.0, 1))
    assert Capacities(file).has(tiny(), NAME)
