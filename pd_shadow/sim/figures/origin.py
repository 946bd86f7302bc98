"""Figures 9a to 9c: where the benefit of Harvest-SLO with the host tier comes from, switch call by switch call."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pd_shadow.perf.models import model
from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import COST, SWITCHES
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.figures.base import Figure, Scale, Setting, against, grid, pairs_of
from pd_shadow.sim.sessions import CallRecord

_APPROACHES = (Approach.HARVEST_SLO, Approach.HARVEST_SLO_HOST, Approach.ORACLE_HOST)


class Bin(NamedTuple):
    """Values from `low` on and below `high`, and what the text says of Harvest-SLO with the host tier there."""

    name: str
    low: float
    high: float
    paper: Mapping[str, float]


# Section 5.5, over 283 pairs there.
SIZES = (
    Bin("below 15B", 0, 15e9, {SWITCHES: 12.0, COST: 40.0}),
    Bin("15B to 50B", 15e9, 50e9, {SWITCHES: 4.0, COST: 37.0}),
    Bin("above 50B", 50e9, math.inf, {SWITCHES: 3.0, COST: 24.0}),
)
CONTEXTS = (
    Bin("below 2K", 0, 2_000, {SWITCHES: 0.7}),
    Bin("2K to 8K", 2_000, 8_000, {}),
    Bin("8K to 32K", 8_000, 32_000, {}),
    Bin("32K to 64K", 32_000, 64_000, {}),
    Bin("above 64K", 64_000, math.inf, {SWITCHES: 20.5}),
)


def figure_9a(scale: Scale) -> Figure:
    """Switch calls by the size of the model they go to; 9b is the cost of the same calls."""
    settings = _settings(scale, SIZES, lambda call, config: model(config.models[call.model]).parameters)
    return Figure("9a-b", "Switch calls by the size of their target", settings, (SWITCHES, COST))


def figure_9c(scale: Scale) -> Figure:
    """Switch calls by the length of their prompts."""
    settings = _settings(scale, CONTEXTS, lambda call, config: call.prompt)
    return Figure("9c", "Switch calls by the length of their context", settings, (SWITCHES,))


def _settings(scale: Scale, bins: tuple[Bin, ...], value: Callable[[CallRecord, RunConfig], float]) -> list[Setting]:
    settings = []
    for approach in _APPROACHES:
        runs = against(grid(scale, pairs_of(scale), mode=Mode.COLOCATED, approach=approach))
        for each in bins:
            paper = each.paper if approach is Approach.HARVEST_SLO_HOST else {}
            settings.append(Setting(f"{each.name}, {approach.value}", runs, paper, _within(each, value)))
    return settings


def _within(each: Bin, value: Callable[[CallRecord, RunConfig], float]) -> Callable[[CallRecord, RunConfig], bool]:
    return lambda call, config: call.switch and each.low <= value(call, config) < each.high
