"""What a figure is made of: settings, each with the runs it compares and what the paper says of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_shadow.perf.energy import PowerModel
from pd_shadow.perf.models import PAIRS, ModelPair, Trace, pair
from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import Metric, Pair, metrics, spread
from pd_shadow.sim.config import PolicySettings, RunConfig
from pd_shadow.sim.kv_pool import EvictionUnit
from pd_shadow.sim.sessions import CallRecord
from pd_shadow.sim.simulation import RunResult
from pd_shadow.sim.workload.traffic import Window

LONG_TRACE = Trace.GHCP_CODING
LONG_SECONDS = 1800.0
"""Measured time of the coding trace; the others' is the configuration's default (paper section 5.1)."""
SETUPS: Mapping[Trace, str] = {
    Trace.XROUTEBENCH: "Q2.5-7B / L3.3-70B",
    Trace.FUSIONBENCH: "L3.1-8B / L3.1-70B",
    Trace.ROUTER_R1: "Q2.5-7B / L3.1-70B",
    Trace.GHCP_CODING: "G2-9B / Mx-8x7B",
}
"""One pair per trace for the sensitivity studies. The paper has such four and does not name them: these are ours."""


class Row(NamedTuple):
    """One number of a figure. `se` is the standard error over seeds and windows, pairs averaged before."""

    figure: str
    setting: str
    metric: str
    ours: float
    se: float
    runs: int
    paper: float | None


@dataclass(frozen=True)
class Setting:
    """One bar or point: pairs of runs, baseline and approach, whose mean it is."""

    name: str
    pairs: Sequence[tuple[RunConfig, RunConfig]]
    # By metric.
    paper: Mapping[str, float] = field(default_factory=dict)
    # Which calls are looked at.
    keeps: Callable[[CallRecord, RunConfig], bool] = lambda *_: True


@dataclass(frozen=True)
class Figure:
    """`shown` are the metrics of its rows; empty: all."""

    name: str
    title: str
    settings: Sequence[Setting]
    shown: Sequence[str] = ()
    metrics: Callable[[PowerModel], Sequence[Metric]] = metrics

    @property
    def configs(self) -> list[RunConfig]:
        """Every run, each once."""
        runs = [config for setting in self.settings for pair in setting.pairs for config in pair]
        return list(dict.fromkeys(runs))

    def rows(self, results: Mapping[RunConfig, RunResult], power: PowerModel) -> list[Row]:
        """The figure's numbers; settings without a finished pair of runs have none."""
        rows: list[Row] = []
        for setting in self.settings:
            pairs = [
                Pair(results[base], results[other], setting.keeps)
                for base, other in setting.pairs
                if base in results and other in results
            ]
            if pairs:
                rows.extend(self._row(setting, metric, pairs) for metric in self._metrics(power))
        return rows

    def _metrics(self, power: PowerModel) -> Iterable[Metric]:
        return (metric for metric in self.metrics(power) if not self.shown or metric.name in self.shown)

    def _row(self, setting: Setting, metric: Metric, pairs: Sequence[Pair]) -> Row:
        # Models differ far more than seeds do: their means are averaged, and the error is that of the repetitions.
        repetitions: dict[tuple[int, str], list[float]] = {}
        for compared in pairs:
            config = compared.other.config
            repetitions.setdefault((config.seed, config.window), []).append(metric.of(compared))
        found = spread(spread(values).mean for values in repetitions.values())
        return Row(
            self.name, setting.name, metric.name, found.mean, found.error, len(pairs), setting.paper.get(metric.name)
        )


@dataclass(frozen=True)
class Computed(Figure):
    """A table that needs no runs."""

    compute: Callable[[], list[Row]] = list

    def rows(self, results: Mapping[RunConfig, RunResult], power: PowerModel) -> list[Row]:
        """What was computed, whatever was run."""
        return self.compute()


@dataclass(frozen=True)
class Scale:
    """How much of the paper's grid is run: 3 seeds, 3 windows and all pairs in the paper."""

    seeds: int = 3
    windows: Sequence[str] = tuple(Window)
    seconds: float | None = None
    """Measured time of every run; None: the paper's."""
    most_pairs: int | None = None
    """Of each trace."""
    traces: Sequence[Trace] = tuple(Trace)
    evicts: EvictionUnit = EvictionUnit.ENTRIES
    """As the paper's text has it; the engine plugin evicts blocks."""


def pairs_of(scale: Scale) -> list[ModelPair]:
    """The paper's pairs, as far as the scale goes."""
    return [each for trace in scale.traces for each in [p for p in PAIRS if p.trace is trace][: scale.most_pairs]]


def setups(scale: Scale) -> list[ModelPair]:
    """The four pairs of the sensitivity studies, as far as the scale goes."""
    return [pair(trace, label) for trace, label in SETUPS.items() if trace in scale.traces]


def grid(scale: Scale, pairs: Iterable[ModelPair], **fields: object) -> list[RunConfig]:
    """The runs of one approach on some pairs: every seed and window."""
    configs = []
    for each in pairs:
        seconds = scale.seconds or (LONG_SECONDS if each.trace is LONG_TRACE else None)
        given = {
            "models": (each.small.name, each.large.name),
            "trace": each.trace.value,
            "evicts": scale.evicts,
            **({"seconds": seconds} if seconds else {}),
            **fields,
        }
        configs += [
            RunConfig.model_validate({"seed": seed, "window": window, **given})
            for seed in range(scale.seeds)
            for window in scale.windows
        ]
    return configs


def against(configs: Iterable[RunConfig]) -> list[tuple[RunConfig, RunConfig]]:
    """Each run beside No Shadow's."""
    return [(_baseline(config), config) for config in configs]


def _baseline(config: RunConfig) -> RunConfig:
    """What does nothing without shadow work and host tier is as by default, so that settings share the run."""
    update = {"approach": Approach.NO_SHADOW, "policy": PolicySettings(), "hardware": config.hardware.without_host()}
    return config.model_copy(update=update)
