"""What the paper leaves open, one assumption at a time, on both kinds of cluster; two pairs unless traces are named."""

from collections.abc import Mapping
from typing import Any

from pd_shadow.perf.energy import HIGH_IDLE, LOW_IDLE, PowerModel
from pd_shadow.perf.models import Trace
from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import CALLS, ENERGY, SWITCHES, Metric, energy_increase, metrics
from pd_shadow.sim.config import HardwareSettings, Mode, PolicySettings
from pd_shadow.sim.demand import OTHER_SESSIONS_PER_SECOND, SESSIONS_PER_SECOND
from pd_shadow.sim.figures.base import Figure, Scale, Setting, against, grid, setups
from pd_shadow.sim.kv_pool import EvictionUnit

_TRACES = (Trace.FUSIONBENCH, Trace.GHCP_CODING)
ENERGY_HIGH_IDLE = f"{ENERGY}_at_{HIGH_IDLE.idle_watts:g}_idle_watts"
ENERGY_LOW_IDLE = f"{ENERGY}_at_{LOW_IDLE.idle_watts:g}_idle_watts"

POINTS: Mapping[str, Mapping[str, Any]] = {
    "as assumed": {},
    **{f"link {rate} GB/s": {"hardware": HardwareSettings(link_gb_per_second_per_gpu=rate)} for rate in (10, 160)},
    "outputs a quarter as long": {"output_scale": 0.25},
    "evicts blocks": {"evicts": EvictionUnit.BLOCKS},
    "evicts blocks but extensions are normal": {
        "evicts": EvictionUnit.BLOCKS, "policy": PolicySettings(extensions_are_normal=True),
    },
    "evicts entries but extensions are shadow": {
        "evicts": EvictionUnit.ENTRIES, "policy": PolicySettings(extensions_are_normal=False),
    },
    "lost shadow KV is computed again": {"policy": PolicySettings(recomputes=True)},
    "finished requests leave the cache": {"keeps_finished": False},
    "idle normal KV goes before shadow KV": {"policy": PolicySettings(stale_seconds=10)},
}  # fmt: skip
RATES = (0.5, 2.0)
"""Sessions per second, times what is assumed."""


def assumptions(scale: Scale) -> Figure:
    """Harvest-SLO against No Shadow under each; the energy for both idle powers."""
    settings = []
    traces = _TRACES if set(scale.traces) == set(Trace) else scale.traces
    pairs = [pair for pair in setups(scale) if pair.trace in traces]
    for mode in Mode:
        for point, fields in POINTS.items():
            if mode is Mode.DISAGGREGATED or not point.startswith("link"):
                runs = grid(scale, pairs, **{"mode": mode, "approach": Approach.HARVEST_SLO, **fields})
                settings.append(Setting(f"{point}, {mode.value}", against(runs)))
        for factor in RATES:
            runs = [
                run
                for pair in pairs
                for run in grid(
                    scale, [pair], mode=mode, approach=Approach.HARVEST_SLO,
                    sessions_per_second=factor * SESSIONS_PER_SECOND.get(pair.trace.value, OTHER_SESSIONS_PER_SECOND),
                )
            ]  # fmt: skip
            settings.append(Setting(f"{factor:g} times the sessions, {mode.value}", against(runs)))
    shown = (CALLS, SWITCHES, ENERGY_LOW_IDLE, ENERGY_HIGH_IDLE)
    return Figure("assumptions", "Harvest-SLO under other assumptions", settings, shown, _metrics)


def _metrics(power: PowerModel) -> list[Metric]:
    return [
        *metrics(power),
        Metric(ENERGY_LOW_IDLE, lambda pair: energy_increase(pair, LOW_IDLE)),
        Metric(ENERGY_HIGH_IDLE, lambda pair: energy_increase(pair, HIGH_IDLE)),
    ]
