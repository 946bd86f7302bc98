"""Processes on the same hardware see each other's normal work."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_shadow.engine.neighbours import SLOTS, STALE_SECONDS, Neighbours, NeighboursFullError


@pytest.fixture
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Neighbours, Neighbours]]:
    first, second = Neighbours("gpu-0", tmp_path), Neighbours("gpu-0", tmp_path)
    yield first, second
    first.close()
    second.close()


def test_a_neighbours_normal_work_is_seen_and_its_end_too(pair: tuple[Neighbours, Neighbours]) -> None:
    first, second = pair
    assert not first.busy(10.0)
    second.mark(10.0, busy=True)
    assert first.busy(10.1)
    second.mark(10.2, busy=False)
    assert not first.busy(10.3)


def test_its_own_work_is_not_a_neighbours(pair: tuple[Neighbours, Neighbours]) -> None:
    first, second = pair
    first.mark(10.0, busy=True)
    assert not first.busy(10.0)
    assert second.busy(10.0)


def test_a_mark_of_a_process_that_died_at_work_fades(pair: tuple[Neighbours, Neighbours]) -> None:
    first, second = pair
    second.mark(10.0, busy=True)
    assert first.busy(10.0 + STALE_SECONDS - 0.01)
    assert not first.busy(10.0 + STALE_SECONDS)


def test_other_hardware_is_another_board(tmp_path: Path) -> None:
    first, second = Neighbours("gpu-0", tmp_path), Neighbours("../gpu 1", tmp_path)
    second.mark(10.0, busy=True)
    assert not first.busy(10.0)
    assert {path.parent for path in tmp_path.rglob("pd-shadow-hardware-*")} == {tmp_path}


def test_slots_of_dead_processes_are_taken_again(tmp_path: Path, dead_pid: int) -> None:
    for _ in range(SLOTS):
        Neighbours("gpu-0", tmp_path, pid=dead_pid)
    assert not Neighbours("gpu-0", tmp_path).busy(10.0)


def test_a_board_full_of_living_processes_refuses(tmp_path: Path) -> None:
    living = [Neighbours("gpu-0", tmp_path) for _ in range(SLOTS)]
    with pytest.raises(NeighboursFullError, match="64 processes"):
        Neighbours("gpu-0", tmp_path)
    living[7].close()
    Neighbours("gpu-0", tmp_path)
