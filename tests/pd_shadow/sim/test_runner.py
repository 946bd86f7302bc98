"""Many runs: each once, kept as soon as it is there, on processes and on Dask."""

import functools
from pathlib import Path

import pytest

from pd_shadow.sim import results, runner
from pd_shadow.sim.capacity import Capacities, Capacity
from pd_shadow.sim.config import RunConfig
from pd_shadow.sim.simulation import RunResult, run

from .rig import MODELS, Inline, tiny

CONFIGS = [tiny(seconds=10, sessions_per_second=0.1, approach=approach) for approach in ("no-shadow", "harvest-slo")]
# Far below what would be found: the less traffic, the faster.
CAPACITIES = {MODELS[0]: Capacity(2.0, 1), MODELS[1]: Capacity(1.0, 1)}


class Told:
    """What progress was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.done = 0

    def stage(self, name: str, total: int) -> None:
        self.stages.append((name, total))

    def advance(self) -> None:
        self.done += 1


@functools.cache
def by_hand(config: RunConfig) -> RunResult:
    """What a configuration gives at 0.7 of CAPACITIES."""
    return run(config, [0.7 * each.rate for each in CAPACITIES.values()], [1, 1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where CAPACITIES are known."""
    known = Capacities(tmp_path / "capacities.json")
    for name, capacity in CAPACITIES.items():
        known.add(CONFIGS[0], name, capacity)
    return tmp_path


def test_every_configuration_is_run_once(folder: Path) -> None:
    executor, told = Inline(), Told()
    found = runner.execute([*CONFIGS, CONFIGS[0]], folder, executor, told)
    assert list(found) == CONFIGS
    assert found[CONFIGS[1]] == by_hand(CONFIGS[1])
    assert told.stages == [("Simulating", 2)]
    assert told.done == 2


def test_what_is_there_is_not_run_again(folder: Path) -> None:
    first = runner.execute(CONFIGS, folder, Inline(), Told())
    executor, told = Inline(), Told()
    assert runner.execute(CONFIGS, folder, executor, told) == first
    assert executor.submitted == []
    assert told.done == 2


def test_an_unreadable_result_is_run_again(folder: Path) -> None:
    first = runner.execute(CONFIGS, folder, Inline(), Told())
    results.path(folder, CONFIGS[1]).write_bytes(b"half a fi")
    executor = Inline()
    assert runner.execute(CONFIGS, folder, executor, Told()) == first
    assert len(executor.submitted) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a run failed")])
def test_what_was_finished_by_then_is_kept(folder: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        runner.execute(CONFIGS, folder, Inline(fails_at=1, error=error), Told())
    # Futures that are done come in no order: at least the failed one is not there.
    assert results.load(folder, CONFIGS[1]) is None
    executor = Inline()
    assert list(runner.execute(CONFIGS, folder, executor, Told())) == CONFIGS
    assert 1 <= len(executor.submitted) <= 2


def test_an_interrupted_run_keeps_each_result_as_it_comes(folder: Path) -> None:
    class Interrupts(Told):
        def advance(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.execute(CONFIGS, folder, Inline(), Interrupts())
    assert sum(results.load(folder, config) is not None for config in CONFIGS) == 1


def test_capacities_are_found_first_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(config: RunConfig, name: str) -> Capacity:
        return CAPACITIES[name]

    monkeypatch.setattr(runner, "find", find)
    executor, told = Inline(), Told()
    runner.execute(CONFIGS, tmp_path / "a" / "b", executor, told)
    assert executor.submitted[:2] == ["find", "find"]
    assert told.stages == [("Finding capacities", 2), ("Simulating", 2)]
    again = Inline()
    runner.execute([tiny(sessions_per_second=0.1, seed=1)], tmp_path / "a" / "b", again, Told())
    assert "find" not in again.submitted


def test_load_is_relative_to_capacity_and_hour(tmp_path: Path) -> None:
    known = Capacities(tmp_path / "capacities.json")
    for name in MODELS:
        known.add(CONFIGS[0], name, Capacity(30.0, 1))

    def requests(**fields: object) -> int:
        config = tiny(sessions_per_second=1e-9, approach="no-shadow", **fields)
        return runner.execute([config], tmp_path, Inline(), Told())[config].normal.requests

    # Of two models for 20 seconds.
    assert requests(load=0.2) == pytest.approx(0.2 * 30 * 2 * 20, rel=0.2)
    assert requests(load=0.2, window="median") == pytest.approx(0.62 * 0.2 * 30 * 2 * 20, rel=0.2)


def test_processes_of_this_machine_give_the_same(folder: Path) -> None:
    with runner.local(1) as executor:
        found = runner.execute(CONFIGS, folder, executor, Told())
    assert found == runner.execute(CONFIGS, folder, Inline(), Told())
    assert found[CONFIGS[0]] == by_hand(CONFIGS[0])


def test_a_failure_does_not_wait_for_other_processes(folder: Path) -> None:
    def interrupted() -> None:
        with runner.local(1) as executor:
            # Hours, if it were waited for.
            executor.submit(run, tiny(seconds=1e7), [1.0, 1.0], [1, 1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_a_dask_cluster_gives_the_same(folder: Path) -> None:
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    )  # fmt: skip
    with cluster, runner.on_dask(cluster.scheduler_address) as executor:
        found = runner.execute(CONFIGS, folder, executor, Told())
    assert found[CONFIGS[1]] == by_hand(CONFIGS[1])


def test_no_dask_address_is_an_error_in_one_line() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(ValueError, match="nowhere"), runner.on_dask("nowhere"):
        pass
