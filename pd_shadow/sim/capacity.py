"""How much normal traffic a model's instances carry: the rate at which 90 % of requests meet both SLOs (paper 5.1)."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pd_shadow.policy.approach import Approach
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.demand import NormalTraffic
from pd_shadow.sim.feeder import Feeder
from pd_shadow.sim.simulation import deployment

ATTAINMENT = 0.9
WARM_UP_SECONDS = 30.0
SECONDS = 120.0
PRECISION = 0.02
"""Relative width of the bracket that the search ends with."""


class Capacity(NamedTuple):
    """Requests per second of all instances of a model together, and the split that carries them."""

    rate: float
    # None: colocated.
    prefill_instances: int | None


class Capacities:
    """Capacities found so far, kept in a file; they are found anew where it cannot be read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Capacity] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            self._known = {key: Capacity(*value) for key, value in json.loads(file.read_text()).items()}

    def has(self, config: RunConfig, name: str) -> bool:
        """Whether the capacity of one model of a run is known."""
        return _key(config, name) in self._known

    def known(self, config: RunConfig, name: str) -> Capacity:
        """The capacity of one model of a run. Raises KeyError if it was not found yet."""
        return self._known[_key(config, name)]

    def add(self, config: RunConfig, name: str, capacity: Capacity) -> None:
        """Remember what `find` found."""
        self._known[_key(config, name)] = capacity
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._known, indent=1, sort_keys=True))
        part.rename(self._file)


def find(config: RunConfig, name: str) -> Capacity:
    """The best of all splits, or that of the configured one."""
    splits: Sequence[int | None] = [config.prefill_instances]
    if config.mode is Mode.DISAGGREGATED and config.prefill_instances is None:
        splits = range(1, config.instances)
    best: Capacity | None = None
    # With equal capacities more prefill instances: they are what prompts wait for.
    for split in reversed(splits):
        rate = _highest_rate(config, name, split, 0.0 if best is None else best.rate)
        if best is None or rate > best.rate:
            best = Capacity(rate, split)
    assert best is not None
    return best


def attainment(config: RunConfig, name: str, prefill_instances: int | None, rate: float) -> float:
    """Share of normal requests that meet both SLOs at a rate."""
    clock = Clock()
    served = deployment(config, name, clock, prefill_instances)
    end = WARM_UP_SECONDS + SECONDS
    feeder = Feeder(clock, served, NormalTraffic(config, rate, 0).draw, (WARM_UP_SECONDS, end))
    # What has not ended this long after the last arrival has missed its SLOs, or comes close enough to it.
    clock.run(lambda: clock.now > end and (not feeder.left or clock.now > 1.2 * end))
    return feeder.normal.attainment


def essence(config: RunConfig) -> RunConfig:
    """What capacity depends on; the rest as by default, so that runs share what was found."""
    return RunConfig(
        models=("any", "any"),
        mode=config.mode,
        approach=Approach.NO_SHADOW,
        instances=config.instances,
        prefill_instances=config.prefill_instances,
        normal=config.normal,
        normal_trace=config.normal_trace,
        chunk_tokens=config.chunk_tokens,
        hardware=config.hardware.without_host(),
    )


def _key(config: RunConfig, name: str) -> str:
    return f"{name} {hashlib.sha256(essence(config).model_dump_json().encode()).hexdigest()[:16]}"


def _highest_rate(config: RunConfig, name: str, split: int | None, beaten: float) -> float:
    """To PRECISION; a search that can no longer exceed `beaten` ends at once, with a lower rate than that."""
    low, high = 0.0, 4.0
    while attainment(config, name, split, high) >= ATTAINMENT:
        low, high = high, 2 * high
    while high > beaten and high - low > PRECISION * high:
        middle = (low + high) / 2
        if attainment(config, name, split, middle) >= ATTAINMENT:
            low = middle
        else:
            high = middle
    return low
