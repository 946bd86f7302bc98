"""The figures of the transfer benchmark: as data, as tables, as CSV and as a plot."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pd_shadow.perf import models
from transfer.bench.contention import Contention
from transfer.bench.drills import Drill
from transfer.bench.memory import huge_pages_available
from transfer.bench.row import Row
from transfer.bench.verdict import judge

Figures = dict[str, Any]
MEAN_GROWTH_MOST = 0.05
"""A normal transfer's mean may grow by this share beside shadow chunks."""
_LIMITS = {
    "single_copy": "process_vm_writev (read: process_vm_readv) by the sender, the same addresses, 64 vectors a call",
    "tcp_loopback": "one plain TCP stream on loopback, the same number of bytes",
}


def build(rows: Sequence[Row], crossed: Contention | None, drilled: Sequence[Drill], seed: int) -> Figures:
    """Everything that was measured, ready for JSON; parts that were left out have no key."""
    figures: Figures = {
        "failed": any(not drill.passed for drill in drilled),
        "seed": seed,
        "huge_pages": huge_pages_available(),
        "limits": _limits(rows),
        "rows": [
            {
                **row._asdict(),
                "verdicts": [
                    {"reason": verdict.reason.value, "text": verdict.text, "evidence": verdict.evidence}
                    for verdict in verdicts
                ],
            }
            for row, verdicts in zip(rows, judge(rows), strict=True)
        ],
    }
    if crossed is not None:
        figures["contention"] = _contention(crossed)
    if drilled:
        figures["drills"] = [drill._asdict() for drill in drilled]
    return figures


def _limits(rows: Sequence[Row]) -> Figures:
    found: Figures = {}
    for name in sorted({row.limit for row in rows}):
        speeds = [row.limit_gb_per_s for row in rows if row.limit == name]
        low, middle, high = (float(value) for value in np.percentile(speeds, [0, 50, 100]))
        found[name] = {
            "what": _LIMITS[name],
            "lowest_gb_per_s": low,
            "median_gb_per_s": middle,
            "highest_gb_per_s": high,
        }
    return found


def _contention(crossed: Contention) -> Figures:
    alone, beside = crossed.alone, crossed.with_shadow
    figures = crossed._asdict()
    figures["alone"], figures["with_shadow"] = alone._asdict(), beside._asdict()
    figures["verdicts"] = {
        "p99_within_one_chunk": beside.p99_s <= alone.p99_s + crossed.chunk_s,
        "mean_within_5_percent": beside.mean_s <= (1 + MEAN_GROWTH_MOST) * alone.mean_s,
    }
    return figures


def render(figures: Figures, console: Console) -> None:
    if figures["rows"]:
        _render_rows(figures, console)
    if "contention" in figures:
        _render_contention(figures["contention"], console)
    if "drills" in figures:
        _render_drills(figures["drills"], console)


def _render_rows(figures: Figures, console: Console) -> None:
    table = Table(title="Moving KV between two processes", caption=_caption(figures))
    table.add_column("Chunk, block, run")
    table.add_column("Way")
    for name in ("Descriptors", "GB/s", "Of limit", "p50 ms", "p99", "CPU s/GB"):
        table.add_column(name, justify="right", no_wrap=name == "Descriptors")
    table.add_column("Verdict")
    for row in figures["rows"]:
        way = f"{row['direction']}, {row['backend']}" + (f" ×{row['concurrency']}" if row["concurrency"] > 1 else "")
        table.add_row(
            _shape(row),
            way,
            f"{row['descriptors_before']} → {row['descriptors_after']}",
            f"{row['gb_per_s']:.2f}",
            f"{row['ratio_to_limit']:.2f}",
            f"{1e3 * row['p50_s']:.1f}",
            f"{1e3 * row['p99_s']:.1f}",
            f"{row['cpu_s_per_gb']:.2f}",
            ", ".join(verdict["reason"] for verdict in row["verdicts"]),
        )
    console.print(table)
    said: dict[str, str] = {}
    for row in figures["rows"]:
        for verdict in row["verdicts"]:
            said.setdefault(verdict["reason"], verdict["text"])
    for reason, text in said.items():
        console.print(f"[bold]{reason}[/bold]: {escape(text)}", highlight=False)


def _shape(row: Figures) -> str:
    layout = ", block-major" if row["layout"] == "block_major" else ""
    return (
        f"{models.model(row['model']).label} {_bytes(row['chunk_bytes'])}, {row['block_tokens']}, "
        f"{row['run_length']}{layout}"
    )


def _caption(figures: Figures) -> str:
    return "; ".join(
        f"{name}: {limit['median_gb_per_s']:.1f} GB/s ({limit['what']})" for name, limit in figures["limits"].items()
    )


def _render_contention(crossed: Figures, console: Console) -> None:
    table = Table(title="Normal transfers of one link")
    table.add_column("")
    for name in ("Transfers", "mean ms", "p50", "p90", "p99", "longest"):
        table.add_column(name, justify="right")
    for name, side in (("alone", crossed["alone"]), ("beside shadow chunks", crossed["with_shadow"])):
        seconds = (side[key] for key in ("mean_s", "p50_s", "p90_s", "p99_s", "longest_s"))
        table.add_row(name, str(side["transfers"]), *(f"{1e3 * value:.2f}" for value in seconds))
    console.print(table)
    console.print(
        f"Longest wait {1e3 * crossed['longest_wait_s']:.2f} ms; one shadow chunk takes {1e3 * crossed['chunk_s']:.2f} "
        f"ms; shadow chunks moved {crossed['shadow_gb_per_s']:.2f} GB/s beside.",
        highlight=False,
    )
    for name, holds in crossed["verdicts"].items():
        console.print(f"{name}: {'yes' if holds else '[bold red]no[/bold red]'}", highlight=False)


def _render_drills(drilled: Sequence[Figures], console: Console) -> None:
    table = Table(title="Drills")
    for name in ("Drill", "Ended as promised", "After", "How"):
        table.add_column(name, justify="right" if name == "After" else "left")
    for drill in drilled:
        passed = "yes" if drill["passed"] else "[bold red]no[/bold red]"
        table.add_row(drill["name"], passed, f"{drill['seconds']:.3f} s", escape(drill["detail"]))
    console.print(table)


def write_csv(figures: Figures, file: Path) -> None:
    """The rows, verdicts as reasons."""
    columns = [*Row._fields, "verdicts"]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        for row in figures["rows"]:
            writer.writerow({**row, "verdicts": " ".join(verdict["reason"] for verdict in row["verdicts"])})


def plot(figures: Figures, file: Path) -> None:
    """Bandwidths beside their limits, a pair of bars per row; the file's ending decides the format.

    Raises ImportError without matplotlib, ValueError for a format it does not know.
    """
    from matplotlib.figure import Figure

    rows = figures["rows"]
    drawing = Figure(figsize=(9, 1.5 + 0.45 * len(rows)), layout="constrained")
    axes = drawing.subplots()
    places = np.arange(len(rows))
    axes.barh(places + 0.2, [row["limit_gb_per_s"] for row in rows], 0.4, label="limit", color="0.8")
    axes.barh(places - 0.2, [row["gb_per_s"] for row in rows], 0.4, label="NIXL")
    labels = [
        f"{row['model']}  {row['block_tokens']}-token blocks, runs of {row['run_length']}, {row['layout']}, "
        f"{row['direction']}, {row['backend']}, ×{row['concurrency']}, {row['chunk_tokens']} tokens"
        for row in rows
    ]
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.legend()
    drawing.savefig(file)


def _bytes(count: float) -> str:
    if count >= 1 << 20:
        return f"{count / (1 << 20):.0f} MB"
    return f"{count / (1 << 10):.0f} KB" if count >= 1 << 10 else f"{count:.0f} B"
