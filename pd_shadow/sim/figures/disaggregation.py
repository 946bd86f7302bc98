"""Figures 8d, 16f and 16g: what disaggregation does for shadow prefill, and what it costs."""

from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import CALLS, ENERGY, SWITCHES
from pd_shadow.sim.config import HardwareSettings, Mode
from pd_shadow.sim.figures.base import Figure, Scale, Setting, against, grid, pairs_of, setups


def figure_8d(scale: Scale) -> Figure:
    """Harvest-SLO on colocated and disaggregated clusters, over all pairs."""
    pairs = pairs_of(scale)
    paper = {
        Mode.COLOCATED: {CALLS: 3.7, SWITCHES: 7.7, ENERGY: 0.8},
        Mode.DISAGGREGATED: {CALLS: 5.2, SWITCHES: 14.0, ENERGY: 11.5},
    }
    settings = [
        Setting(mode.value, against(grid(scale, pairs, mode=mode, approach=Approach.HARVEST_SLO)), paper[mode])
        for mode in Mode
    ]
    settings += [
        Setting(f"{mode.value}, oracle", against(grid(scale, pairs, mode=mode, approach=Approach.ORACLE)))
        for mode in Mode
    ]
    return Figure("8d", "Harvest-SLO, colocated and disaggregated, against No Shadow", settings)


def frontier(scale: Scale) -> Figure:
    """Ours against the paper's policies and what no policy can beat, on disaggregated clusters, over all pairs."""
    approaches = (
        Approach.HARVEST_SLO,
        Approach.HARVEST_SLO_HOST,
        Approach.WARM_FIRST,
        Approach.ORACLE,
        Approach.ORACLE_HOST,
    )
    settings = [
        Setting(approach.value, against(grid(scale, pairs_of(scale), mode=Mode.DISAGGREGATED, approach=approach)))
        for approach in approaches
    ]
    return Figure("frontier", "Policies on disaggregated clusters, against No Shadow", settings)


def figure_16f(scale: Scale) -> Figure:
    """Prefill instances out of four."""
    paper = {
        (1, Approach.HARVEST_SLO): 8.7,
        (3, Approach.HARVEST_SLO): 4.9,
        (1, Approach.ORACLE): 11.7,
        (3, Approach.ORACLE): 7.3,
    }
    settings = []
    for approach in (Approach.HARVEST_SLO, Approach.ORACLE):
        for prefill in (1, 2, 3):
            runs = grid(scale, setups(scale), mode=Mode.DISAGGREGATED, approach=approach, prefill_instances=prefill)
            said = paper.get((prefill, approach))
            settings.append(
                Setting(f"{prefill} prefill, {approach.value}", against(runs), {} if said is None else {CALLS: said})
            )
    return Figure("16f", "Latency reduction by prefill instances out of four", settings, (CALLS, SWITCHES))


def figure_16g(scale: Scale) -> Figure:
    """Bandwidth of KV transfers."""
    settings = []
    for rate in (10, 20, 40, 80, 160):
        hardware = HardwareSettings(link_gb_per_second_per_gpu=rate)
        runs = grid(scale, setups(scale), mode=Mode.DISAGGREGATED, approach=Approach.HARVEST_SLO, hardware=hardware)
        # The text gives the range over all five only.
        settings.append(Setting(f"{rate} GB/s per GPU", against(runs)))
    return Figure(
        "16g", "Latency reduction by KV-transfer bandwidth (paper: 4.9 to 5.4 %)", settings, (CALLS, SWITCHES)
    )
