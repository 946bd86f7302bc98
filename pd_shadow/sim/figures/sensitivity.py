"""Figures 9d to 9g, 15 and 16a to 16c and 16h: one field of the configuration at a time, on four pairs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import CALLS, SWITCHES
from pd_shadow.sim.config import HardwareSettings, Mode, PolicySettings
from pd_shadow.sim.figures.base import Figure, Scale, Setting, against, grid, setups

_SLO, _HOST, _TIER = Approach.HARVEST_SLO, Approach.HARVEST_SLO_HOST, Approach.HOST_TIER
_ORACLE = Approach.ORACLE_HOST


class Sweep(NamedTuple):
    """A figure: points along one axis, each for every approach; `paper` by (point, approach)."""

    title: str
    points: Mapping[str, Mapping[str, Any]]
    paper: Mapping[tuple[str, Approach], float]
    metric: str = CALLS
    approaches: Sequence[Approach] = (_SLO, _HOST)


def _policy(**fields: float) -> dict[str, Any]:
    return {"policy": PolicySettings.model_validate(fields)}


def _hardware(**fields: float) -> dict[str, Any]:
    return {"hardware": HardwareSettings.model_validate(fields)}


# The default point of each sweep gives the paper's 3.3 % (Harvest-SLO) and 5.0 % (with the host tier) of appendix C,
# unless the text names other values for it.
SWEEPS: Mapping[str, Sweep] = {
    "9d": Sweep(
        "SLO scale, provisioning fixed",
        {f"{scale:g}x": {"slo_scale": scale} for scale in (0.5, 1, 2, 3)},
        {("0.5x", _HOST): 2.7, ("1x", _HOST): 6.7, ("2x", _HOST): 8.7, ("3x", _HOST): 8.7},
    ),
    "9e": Sweep(
        "Load of normal traffic",
        {f"{load:g}": {"load": load} for load in (0.2, 0.5, 0.7, 0.9)},
        {("0.2", _SLO): 4.4, ("0.9", _SLO): 0.7, ("0.9", _HOST): 15.2},
    ),
    "9f": Sweep(
        "Cap of the shadow class",
        {f"{cap:.0%}": _policy(cap_share=cap) for cap in (0.05, 0.25, 0.5, 1.0)},
        {("5%", _HOST): 4.6, ("25%", _HOST): 5.0, ("100%", _HOST): 5.0},
    ),
    "9g": Sweep(
        "Cold-entry age (paper: 4.8 to 5.2 % with the host tier from 2 to 10 s)",
        {f"{age:g} s": _policy(cold_seconds=age) for age in (0, 2, 5, 10, 120)},
        {("0 s", _HOST): 3.6, ("5 s", _HOST): 5.0, ("120 s", _HOST): 2.8},
    ),
    "15a": Sweep(
        "Switch rate, all calls: a Markov router",
        {f"p={p:g}": {"router": "markov", "switch_probability": p} for p in (0.05, 0.1, 0.2, 0.35, 0.5)},
        {("p=0.05", _HOST): -0.2, ("p=0.5", _HOST): 5.8, ("p=0.05", _ORACLE): 4.1, ("p=0.5", _ORACLE): 10.9},
        approaches=(_SLO, _HOST, _ORACLE),
    ),
    "15b": Sweep(
        "Switch rate, switch calls: a Markov router",
        {f"p={p:g}": {"router": "markov", "switch_probability": p} for p in (0.05, 0.1, 0.2, 0.35, 0.5)},
        {("p=0.05", _HOST): 13.4, ("p=0.5", _HOST): 10.8, ("p=0.05", _ORACLE): 30.8, ("p=0.5", _ORACLE): 19.0},
        SWITCHES,
        (_SLO, _HOST, _ORACLE),
    ),
    "15c": Sweep(
        "Router policy",
        {name: {"router": name} for name in ("max-accuracy", "default", "random")},
        {("max-accuracy", _HOST): 5.5, ("default", _HOST): 5.0, ("random", _HOST): 5.7},
    ),
    "15d": Sweep(
        "Iteration cap, times TPOT",
        {f"{beta:g}": _policy(beta=beta) for beta in (0.25, 0.5, 0.75, 1.0)},
        {("0.25", _SLO): -0.2, ("0.25", _HOST): 1.6, ("0.5", _SLO): 3.3, ("0.5", _HOST): 5.0, ("1", _SLO): 4.2,
         ("1", _HOST): 6.0},
    ),
    "15e": Sweep(
        "SLO margin (paper: 4.9 to 5.1 % with the host tier)",
        {f"{margin:g}": _policy(margin=margin) for margin in (0, 0.1, 0.25, 0.5)},
        {},
    ),
    "15f": Sweep(
        "Credit rate of routed iterations",
        {f"{delta:g}": _policy(routed_delta=delta) for delta in (0, 0.025, 0.05, 0.1)},
        {("0", _HOST): 5.4, ("0.025", _HOST): 5.0, ("0.1", _HOST): 4.0},
    ),
    "15g": Sweep(
        "Host memory per GPU",
        {f"{size} GB": _hardware(host_gb_per_gpu=size) for size in (16, 32, 64, 128, 256)},
        {("16 GB", _HOST): 11.9, ("32 GB", _HOST): 12.9, ("256 GB", _HOST): 12.9, ("16 GB", _TIER): 1.3,
         ("32 GB", _TIER): 2.4, ("256 GB", _TIER): 2.4},
        SWITCHES,
        (_TIER, _HOST),
    ),
    "15h": Sweep(
        "PCIe bandwidth (paper: 12.0 to 13.0 %; the oracle 23.0 % throughout)",
        {f"{rate} GB/s": _hardware(host_gb_per_second=rate) for rate in (8, 16, 25, 50, 64)},
        {("8 GB/s", _ORACLE): 23.0, ("64 GB/s", _ORACLE): 23.0},
        SWITCHES,
        (_HOST, _ORACLE),
    ),
    "16a": Sweep(
        "Instances per model; sessions scale with them",
        {f"{count}": {"instances": count} for count in (2, 4, 8, 16)},
        {("2", _HOST): 5.3, ("4", _HOST): 5.0, ("16", _HOST): 6.2, ("2", _ORACLE): 9.6, ("16", _ORACLE): 11.7},
        approaches=(_HOST, _ORACLE),
    ),
    "16b": Sweep(
        "Tensor-parallel degree",
        {f"{factor}x": _hardware(tensor_parallel_factor=factor) for factor in (1, 2)},
        {("1x", _HOST): 5.0, ("2x", _SLO): 2.9, ("2x", _HOST): 3.5, ("1x", _ORACLE): 10.0, ("2x", _ORACLE): 8.0},
        approaches=(_SLO, _HOST, _ORACLE),
    ),
    "16c": Sweep(
        "Normal traffic",
        {name: {"normal": name} for name in ("azure-conversation", "azure-code", "burstgpt")},
        {("azure-conversation", _SLO): 3.3, ("azure-code", _SLO): 5.1, ("azure-code", _HOST): 5.9,
         ("burstgpt", _SLO): 5.7, ("burstgpt", _HOST): 6.5},
    ),
    "16h": Sweep(
        "Chunk sizes (paper: 4.9 to 5.1 % with prefill chunks of 1,024 to 8,192 tokens)",
        {
            **{f"prefill {size}": {"chunk_tokens": size} for size in (512, 1024, 2048, 8192)},
            **{f"shadow {size}": _policy(minimum_tokens=size) for size in (64, 256, 512, 1024)},
        },
        {("prefill 512", _HOST): 5.9, ("shadow 64", _HOST): 6.6, ("shadow 512", _HOST): 2.8,
         ("shadow 1024", _HOST): 1.4},
        approaches=(_HOST,),
    ),
}  # fmt: skip


def sweep(name: str, scale: Scale) -> Figure:
    """One of SWEEPS on colocated clusters. Raises KeyError for another name."""
    found = SWEEPS[name]
    settings = []
    for approach in found.approaches:
        for point, fields in found.points.items():
            runs = grid(scale, setups(scale), **{"mode": Mode.COLOCATED, "approach": approach, **fields})
            said = found.paper.get((point, approach))
            settings.append(
                Setting(f"{point}, {approach.value}", against(runs), {} if said is None else {found.metric: said})
            )
    return Figure(name, found.title, settings, (CALLS, SWITCHES))
