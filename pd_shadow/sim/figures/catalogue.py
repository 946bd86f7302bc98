"""Every figure by its name."""

import difflib
from collections.abc import Callable, Mapping
from functools import partial

from pd_shadow.sim.figures.approaches import figure_4
from pd_shadow.sim.figures.base import Figure, Scale
from pd_shadow.sim.figures.candidates import figure_16d
from pd_shadow.sim.figures.disaggregation import figure_8d, figure_16f, figure_16g, frontier
from pd_shadow.sim.figures.origin import figure_9a, figure_9c
from pd_shadow.sim.figures.sensitivity import SWEEPS, sweep

FIGURES: Mapping[str, Callable[[Scale], Figure]] = {
    "4": figure_4,
    "8d": figure_8d,
    "9a": figure_9a,
    "9c": figure_9c,
    "16d": figure_16d,
    "16f": figure_16f,
    "16g": figure_16g,
    "frontier": frontier,
    **{name: partial(sweep, name) for name in SWEEPS},
}


def figure_named(name: str, scale: Scale) -> Figure:
    """Raises ValueError with the nearest name."""
    if name not in FIGURES:
        nearest = difflib.get_close_matches(name, FIGURES, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown figure {name!r}; did you mean {nearest!r}? Valid: {', '.join(sorted(FIGURES))}")
    return FIGURES[name](scale)
