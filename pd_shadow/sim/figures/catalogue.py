"""Every figure by its name."""

from collections.abc import Callable, Mapping
from functools import partial

from pd_shadow.common.suggestion import unknown
from pd_shadow.sim.figures.accuracy import figure_7
from pd_shadow.sim.figures.approaches import figure_4, figure_5, figure_6, figure_8a
from pd_shadow.sim.figures.assumptions import assumptions
from pd_shadow.sim.figures.base import Figure, Scale
from pd_shadow.sim.figures.candidates import figure_16d
from pd_shadow.sim.figures.disaggregation import figure_8d, figure_16f, figure_16g, frontier
from pd_shadow.sim.figures.origin import figure_9a, figure_9c
from pd_shadow.sim.figures.sensitivity import SWEEPS, sweep
from pd_shadow.sim.figures.workloads import figure_2, table_1, table_2, table_5

FIGURES: Mapping[str, Callable[[Scale], Figure]] = {
    "2": figure_2,
    "4": figure_4,
    "5": figure_5,
    "6": figure_6,
    "7": figure_7,
    "8a": figure_8a,
    "8d": figure_8d,
    "9a": figure_9a,
    "9c": figure_9c,
    "16d": figure_16d,
    "16f": figure_16f,
    "16g": figure_16g,
    "table1": table_1,
    "table2": table_2,
    "table5": table_5,
    "frontier": frontier,
    "assumptions": assumptions,
    **{name: partial(sweep, name) for name in SWEEPS},
}


def figure_named(name: str, scale: Scale) -> Figure:
    """Raises ValueError with the nearest name."""
    if name not in FIGURES:
        raise ValueError(unknown("figure", name, sorted(FIGURES)))
    return FIGURES[name](scale)
