"""Figures as vector files: ours with error bars, the paper's numbers as open diamonds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pd_shadow.sim.figures.base import Figure, Row

WIDTH_INCHES = 3.4
"""One column."""
HEIGHT_INCHES = 1.9
STYLE: Any = {
    "font.family": "serif",
    "font.size": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.linewidth": 0.3,
    "grid.alpha": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
    "figure.constrained_layout.use": True,
}
UNITS = {
    "normal_slo_attainment_points": "percentage points",
    "hit_rate": "%",
    "switch_hit_rate": "%",
    "unused_shadow_tokens": "%",
    "accuracy": "%",
    "accuracy_points_over_always_expensive": "percentage points",
    "switch_calls": "% of all calls",
    "switches_per_session": "number",
    "mean_prompt_tokens": "tokens",
    "p99_prompt_tokens": "tokens",
    "mean_output_tokens": "tokens",
    "hit_rate_without_shadow": "%",
    "same_model_hit_rate_without_shadow": "%",
    "switch_hit_rate_without_shadow": "%",
    "switch_call_slowdown": "times a same-model call",
    "credit_percent": "%",
    "gate_percent": "%",
    "host_tier": "0: without, 1: with",
    "additional_gpus_percent": "%",
}


def draw(figures: Sequence[Figure], rows: Sequence[Row], folder: Path) -> list[Path]:
    """One PDF per figure and metric that has rows; returns their paths. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for figure in figures:
        own = [row for row in rows if row.figure == figure.name and not math.isnan(row.ours)]
        for metric in dict.fromkeys(row.metric for row in own):
            with pyplot.rc_context(rc=STYLE):
                chart, axes = pyplot.subplots()
                _bars(axes, [row for row in own if row.metric == metric])
                axes.set_ylabel(f"{metric.replace('_', ' ')}\n({UNITS.get(metric, '%, against No Shadow')})")
                axes.set_title(figure.title, fontsize=7)
                file = folder / f"figure-{figure.name.replace(', ', '_')}-{metric.replace('_', '-')}.pdf"
                bars = len(axes.get_xticks())
                chart.set_size_inches(max(WIDTH_INCHES, 0.32 * bars), HEIGHT_INCHES)
                chart.savefig(file)
                pyplot.close(chart)
            files.append(file)
    return files


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """Settings named "point, approach" are grouped by point; others stand alone."""
    split = [row.setting.rpartition(", ") for row in rows]
    points = list(dict.fromkeys(point or name for point, _, name in split))
    series = list(dict.fromkeys(name if point else "" for point, _, name in split))
    width = 0.8 / len(series)
    for row, (point, _, name) in zip(rows, split, strict=True):
        place = points.index(point or name) + width * (series.index(name if point else "") - (len(series) - 1) / 2)
        color = f"C{series.index(name if point else '')}"
        first = not any(bar.get_label() == name for bar in axes.containers)
        error = None if math.isnan(row.se) else row.se
        axes.bar(
            place, row.ours, 0.9 * width, yerr=error, color=color, label=name if point and first else None,
            error_kw={"linewidth": 0.6},
        )  # fmt: skip
        if row.paper is not None:
            axes.plot(place, row.paper, "D", markersize=3, markerfacecolor="white", markeredgecolor="black", zorder=3)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(
        range(len(points)), points, rotation=30 if len(points) > 5 else 0, ha="right" if len(points) > 5 else "center"
    )
    if any(row.paper is not None for row in rows):
        axes.plot([], [], "D", markersize=3, markerfacecolor="white", markeredgecolor="black", label="paper")
    if len(series) > 1 or any(row.paper is not None for row in rows):
        axes.legend(fontsize=6)
