"""The campaign itself: schedules pass, replay exactly, and find faults that are put into the core on purpose."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from controller.core.call import Call
from controller.core.instance import Instance, InstanceRef
from controller.core.registry import Registry
from controller.core.shadow_jobs import ShadowJobs
from tests.controller.campaign.__main__ import main
from tests.controller.campaign.simulation import Simulation

# Enough for a first look; the campaign runs thousands.
SEEDS = 100
SEEDS_UNTIL_FOUND = 100


def test_no_schedule_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", f"0:{SEEDS}"]) == 0, capsys.readouterr().out
    assert f"{SEEDS} schedules, 0 failed" in capsys.readouterr().out


def test_a_seed_is_the_same_schedule_in_every_process() -> None:
    told: list[list[str]] = [[], []]
    first, second = (Simulation(11, lines.append).run() for lines in told)
    assert first == second
    assert told[0] == told[1]
    command = [sys.executable, "-m", "tests.controller.campaign", "--seed", "11"]
    # Hashes of strings differ between processes, and with them the order of sets.
    other = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True, timeout=60
    )
    assert f"seed 11: digest {first.digest}" in other.stdout
    assert Simulation(12).run().digest != first.digest


def _gate_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Call, "_end_transfer", lambda self, now: None)


def _reservation_leaked(patch: pytest.MonkeyPatch) -> None:
    released = Call.release

    def release(self: Call, now: float) -> None:
        held = self.call_id in self.decode.instance.decode_calls
        released(self, now)
        # Only of a call that never got as far as its transfer.
        if held and self.prefilled_at is None:
            self.decode.instance.decode_calls.add(self.call_id)

    patch.setattr(Call, "release", release)


def _old_life_accepted(patch: pytest.MonkeyPatch) -> None:
    end = Registry._end

    def forgetful(self: Registry, instance: Instance, why: Any, changes: Any) -> None:
        end(self, instance, why, changes)
        self._past.clear()

    patch.setattr(Registry, "_end", forgetful)


def _address_taken_for_identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Registry, "live", lambda self, ref: self._lives.get(ref.name) if isinstance(ref, InstanceRef) else None
    )


def _legs_outlive_their_instance(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShadowJobs, "abort_on", lambda self, now, instance, reason: None)


def _silent_legs_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShadowJobs, "tick", lambda self, now: None)


@pytest.mark.parametrize(
    "mutate",
    [
        _gate_not_released,
        _reservation_leaked,
        _old_life_accepted,
        _address_taken_for_identity,
        _legs_outlive_their_instance,
        _silent_legs_are_kept,
    ],
)
def test_a_fault_in_the_core_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert _first_failing(range(SEEDS_UNTIL_FOUND)) is not None


def _first_failing(seeds: Iterable[int]) -> int | None:
    for seed in seeds:
        try:
            Simulation(seed).run()
        except (AssertionError, KeyError, ValueError):
            return seed
    return None


def test_a_failing_seed_says_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _gate_not_released(monkeypatch)
    seed = next(s for s in itertools.count() if _first_failing([s]) is not None)
    assert main(["--seeds", f"{seed}:{seed + 1}"]) == 1
    out = capsys.readouterr().out
    assert f"replay it with: python -m tests.controller.campaign --seed {seed} -v" in out
    assert "1 schedules, 1 failed" in out


@pytest.mark.parametrize("seeds", ["5", "9:3", "a:b"])
def test_seeds_that_make_no_sense_are_refused(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--seeds", seeds])
    assert caught.value.code == 2
    assert "LAST" in capsys.readouterr().err
