"""The approaches the paper compares (Table 2) and one of ours, as data: what each sets, under the name it has."""

import difflib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

PREDICTIVE_GATE = 0.25
"""Least switch probability that Predictive shadows (paper Table 2)."""
STALE_SECONDS = 10.0
"""Idle time from which Warm-first gives up normal cached KV before shadow KV; docs/reproduction.md has the sweep."""


class EngineController(StrEnum):
    """Who decides, inside an engine with the plugin, what shadow work an iteration carries.

    Stock engines are driven at request level: HARVEST and HARVEST_SLO are then the same rule (request_harvest.py).
    """

    # No shadow work at all.
    OFF = "off"
    # A fixed credit on every busy iteration.
    HARVEST = "harvest"
    # The slack of the requests in flight, credit for routed ones.
    HARVEST_SLO = "harvest-slo"
    # Iterations of bounded length on an idle prefill instance.
    PREFILL_WINDOW = "prefill-window"
    # Shadow work as requests like any other.
    EAGER = "eager"


class Approach(StrEnum):
    """Names as in the paper's Table 2, in the spelling of configuration files; warm-first is ours."""

    NO_SHADOW = "no-shadow"
    HOST_TIER = "host-tier"
    HARVEST = "harvest"
    HARVEST_SLO = "harvest-slo"
    HARVEST_SLO_HOST = "harvest-slo+host"
    PREDICTIVE = "predictive"
    EAGER = "eager"
    DEDICATED = "dedicated"
    ORACLE = "oracle"
    ORACLE_HOST = "oracle+host"
    # Harvest-SLO with the host tier, and cached KV that nothing has used for a while gives way to shadow KV.
    WARM_FIRST = "warm-first"


class Traits(NamedTuple):
    """What an approach consists of."""

    controller: EngineController
    # Models below this switch probability get no shadow.
    gate_probability: float = 0.0
    # Whether evicted session contexts are kept in host memory.
    host_tier: bool = False
    # Normal cached KV idle for longer gives way before shadow KV does; 0: never, the paper's order.
    stale_seconds: float = 0.0
    # Needs what no real cluster has: knowledge of the future, or instances that the approach adds by itself.
    simulator_only: bool = False

    @property
    def shadows(self) -> bool:
        """Whether there is any shadow work."""
        return self.controller is not EngineController.OFF


TRAITS: Mapping[Approach, Traits] = {
    Approach.NO_SHADOW: Traits(EngineController.OFF),
    Approach.HOST_TIER: Traits(EngineController.OFF, host_tier=True),
    Approach.HARVEST: Traits(EngineController.HARVEST),
    Approach.HARVEST_SLO: Traits(EngineController.HARVEST_SLO),
    Approach.HARVEST_SLO_HOST: Traits(EngineController.HARVEST_SLO, host_tier=True),
    Approach.PREDICTIVE: Traits(EngineController.HARVEST, gate_probability=PREDICTIVE_GATE),
    Approach.EAGER: Traits(EngineController.EAGER),
    # The model's own instances harvest nothing; the one that is added does all shadow work.
    Approach.DEDICATED: Traits(EngineController.OFF, simulator_only=True),
    Approach.ORACLE: Traits(EngineController.OFF, simulator_only=True),
    Approach.ORACLE_HOST: Traits(EngineController.OFF, host_tier=True, simulator_only=True),
    Approach.WARM_FIRST: Traits(EngineController.HARVEST_SLO, host_tier=True, stale_seconds=STALE_SECONDS),
}

DEFAULT = Approach.HARVEST_SLO


def for_engines() -> list[Approach]:
    """The approaches that real engines can run."""
    return [approach for approach in Approach if not TRAITS[approach].simulator_only]


def named(name: str, among: Iterable[Approach] | None = None) -> Approach:
    """The approach of that name, one of `among` (by default those that real engines can run).

    Raises ValueError with the nearest valid name, or saying that only the simulator knows the approach.
    """
    valid = [approach.value for approach in (for_engines() if among is None else among)]
    if name in valid:
        return Approach(name)
    names = ", ".join(valid)
    if name in list(Approach):
        where = "only the simulator runs it" if TRAITS[Approach(name)].simulator_only else "it cannot run here"
        raise ValueError(f"approach {name!r}: {where}; valid here: {names}")
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown approach {name!r}; did you mean {nearest!r}? Valid: {names}")
