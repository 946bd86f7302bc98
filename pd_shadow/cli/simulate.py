"""`pd-shadow simulate`."""

import csv
import importlib.util
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pd_shadow.cli import rig

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from pd_shadow.sim.config import RunConfig
    from pd_shadow.sim.figures.base import Figure, Row, Scale
    from pd_shadow.sim.simulation import RunResult

FIGURES = (
    "2", "4", "5", "6", "7", "8a", "8d", "9a", "9c", "9d", "9e", "9f", "9g", "15a", "15b", "15c", "15d", "15e", "15f",
    "15g", "15h", "16a", "16b", "16c", "16d", "16f", "16g", "16h", "table1", "table2", "table5",
    "frontier", "assumptions",
)  # fmt: skip
WINDOWS = ("peak", "median", "trough")
TRACES = ("xRouteBench", "FusionBench", "Router-R1", "GHCP-coding")
DEFAULT_FOLDER = Path("simulations")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--preset", "presets", multiple=True, type=click.Choice(FIGURES), help="A figure of the paper; may be repeated."
)
@click.option(
    "--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="A run of your own, as YAML."
)
@click.option("--what-if", is_flag=True, help="With --config: every approach, colocated and disaggregated, in a table.")
@click.option("--quick", is_flag=True, help="One seed, the peak hour, one pair per trace, 200 s: to look around.")
@click.option("--seeds", type=click.IntRange(1, 100), help="Repetitions.  [default: 3; 1 with --quick]")
@click.option("--window", "windows", multiple=True, type=click.Choice(WINDOWS), help="Only this hour; may be repeated.")
@click.option("--pairs", type=click.IntRange(1), help="At most so many pairs of models per trace.")
@click.option("--trace", "traces", multiple=True, type=click.Choice(TRACES), help="Only this trace; may be repeated.")
@click.option(
    "--evicts",
    type=click.Choice(["entries", "blocks"]),
    help="How KV pools make room: in whole entries, as in the paper, or in blocks, as in the engine plugin.  "
    "[default: entries]",
)
@click.option("--seconds", type=click.FloatRange(1), help="Measured time per run.  [default: the paper's]")
@click.option(
    "--idle-watts", type=click.Choice(["75", "300"]), default="75", show_default=True, help="Of one idle GPU."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_FOLDER,
    show_default=True,
    help="Where results are kept; runs found there are not run again.",
)
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option("--dask", metavar="ADDRESS", help="Run on the workers of this Dask scheduler instead (extra `dask`).")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all rows here.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all rows here, as CSV.")
@click.option(
    "--plot", "plot_folder", type=click.Path(file_okay=False, path_type=Path), help="Draw figures here (extra `plot`)."
)
def simulate(
    presets: tuple[str, ...],
    config_file: Path | None,
    what_if: bool,
    quick: bool,
    seeds: int | None,
    windows: tuple[str, ...],
    pairs: int | None,
    traces: tuple[str, ...],
    evicts: str | None,
    seconds: float | None,
    idle_watts: str,
    folder: Path,
    jobs: int | None,
    dask: str | None,
    json_file: Path | None,
    csv_file: Path | None,
    plot_folder: Path | None,
) -> None:
    """Say what shadow prefill brings before there are GPUs: simulate clusters, sessions and normal traffic.

    A preset repeats one of the paper's figures and prints its numbers beside ours. A configuration compares its
    approach with No Shadow; with --what-if, every approach on both kinds of cluster. Interrupted, it goes on where it
    stopped when it is started again with the same --folder.

    Exit code 0: simulated. 1: a run failed. 2: wrong usage or configuration. 130: interrupted.

    \b
    Examples:
      pd-shadow simulate --preset 8d --quick
      pd-shadow simulate --preset 8d --preset 16f --json rows.json --plot plots
      pd-shadow simulate --config run.yaml
      pd-shadow simulate --config run.yaml --what-if
    """
    rig.check_figures_file(json_file)
    if csv_file is not None and not csv_file.parent.is_dir():
        raise click.UsageError(f"--csv: {csv_file.parent} is not a directory")
    if seconds is not None and not math.isfinite(seconds):
        raise click.UsageError(f"--seconds: {seconds} is no duration")
    if plot_folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs the extra plot: pip install 'pd-shadow[plot]'")
    if dask is not None and importlib.util.find_spec("distributed") is None:
        raise click.UsageError("--dask needs the extra dask: pip install 'pd-shadow[dask]'")
    if bool(presets) == (config_file is not None):
        raise click.UsageError("give --preset (one of the paper's figures) or --config (a run of your own)")
    if what_if and config_file is None:
        raise click.UsageError("--what-if: needs --config, the cluster and workload in question")
    if config_file is not None and (windows or pairs or traces or evicts):
        raise click.UsageError(
            "--window, --pairs, --trace, --evicts: only with --preset; a configuration has `window`, `models`, `trace` "
            "and `evicts`"
        )
    from pd_shadow.common.config import ConfigError
    from pd_shadow.perf.energy import HIGH_IDLE, LOW_IDLE
    from pd_shadow.perf.models import Trace
    from pd_shadow.sim.figures.base import Scale
    from pd_shadow.sim.kv_pool import EvictionUnit

    scale = Scale(
        seeds=seeds or (1 if quick else 3),
        windows=windows or (("peak",) if quick else WINDOWS),
        seconds=seconds or (200.0 if quick else None),
        most_pairs=pairs or (1 if quick else None),
        traces=tuple(Trace(name) for name in dict.fromkeys(traces)) or tuple(Trace),
        evicts=EvictionUnit(evicts or EvictionUnit.ENTRIES),
    )
    try:
        figures = _figures(presets, config_file, what_if, scale)
    except (ConfigError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    _check_folder("--folder", folder)
    if plot_folder is not None:
        _check_folder("--plot", plot_folder)
    console = Console()
    results = _run(figures, folder, _executor(dask, jobs), console)
    power = LOW_IDLE if idle_watts == "75" else HIGH_IDLE
    rows = [row for figure in figures for row in figure.rows(results, power)]
    for figure in figures:
        console.print(_table(figure, rows))
    overloaded = sum(result.overloaded for result in results.values())
    if overloaded:
        console.print(f"{overloaded} of {len(results)} runs were overloaded and given up; what ended in them counts.")
    try:
        _write(rows, json_file, csv_file)
        if plot_folder is not None:
            from pd_shadow.sim import plots

            for file in plots.draw(figures, rows, plot_folder):
                console.print(f"Plot: {file}", markup=False)
    except OSError as error:
        click.echo(f"error: {error}; the results are in {folder}, start again to write them", err=True)
        sys.exit(1)


def _check_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"{option}: {folder}: {os.strerror(error.errno or 0)}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.UsageError(f"{option}: {folder} is not writable")


def _figures(presets: Sequence[str], config_file: Path | None, what_if: bool, scale: "Scale") -> list["Figure"]:
    from pd_shadow.common import config
    from pd_shadow.sim.config import RunConfig
    from pd_shadow.sim.figures import own
    from pd_shadow.sim.figures.catalogue import figure_named
    from pd_shadow.sim.simulation import check

    if config_file is None:
        return [figure_named(name, scale) for name in dict.fromkeys(presets)]
    try:
        run = config.load(RunConfig, config_file)
        check(run)
    except ValueError as error:
        raise config.ConfigError(f"{config_file}: {error}") from error
    return [own.what_if(run, scale) if what_if else own.comparison(run, scale)]


def _executor(dask: str | None, jobs: int | None) -> "AbstractContextManager[Executor]":
    from pd_shadow.sim import runner

    return runner.local(jobs or os.cpu_count() or 1) if dask is None else runner.on_dask(dask)


def _run(
    figures: Sequence["Figure"],
    folder: Path,
    executor: "AbstractContextManager[Executor]",
    console: Console,
) -> "Mapping[RunConfig, RunResult]":
    from pd_shadow.sim import runner

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    configs = [config for figure in figures for config in figure.configs]
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), console=console,
    )  # fmt: skip
    try:
        with bar, executor as workers:
            return runner.execute(configs, folder, workers, _Bar(bar))
    except KeyboardInterrupt:
        click.echo(f"interrupted; what is finished is in {folder}, start again to go on", err=True)
        sys.exit(130)
    except BrokenExecutor:
        click.echo("error: a process that ran simulations was killed, perhaps for memory; try fewer --jobs", err=True)
        sys.exit(1)
    except (OSError, ValueError, MemoryError) as error:
        click.echo(f"error: {str(error) or 'out of memory; try fewer --jobs'}", err=True)
        sys.exit(1)


class _Bar:
    """The runner's progress on the console."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: Any = None

    def stage(self, name: str, total: int) -> None:
        self._task = self._bar.add_task(name, total=total)

    def advance(self) -> None:
        self._bar.advance(self._task)


def _table(figure: "Figure", rows: Sequence["Row"]) -> Table:
    table = Table(title=f"Figure {figure.name}: {figure.title}" if figure.name[0].isdigit() else figure.title)
    table.add_column("setting")
    table.add_column("metric")
    for name in ("ours", "± SE", "paper", "runs"):
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        if row.figure == figure.name:
            table.add_row(
                row.setting if row.setting != last else "",
                row.metric.replace("_", " "),
                _number(row.ours),
                _number(row.se),
                "-" if row.paper is None else _number(row.paper),
                str(row.runs),
            )
            last = row.setting
    return table


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _write(rows: Sequence["Row"], json_file: Path | None, csv_file: Path | None) -> None:
    # JSON has no NaN.
    plain = [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in row._asdict().items()
        }
        for row in rows
    ]
    if json_file is not None:
        json_file.write_text(json.dumps(plain, indent=1) + "\n")
    if csv_file is not None:
        with csv_file.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(plain[0]) if plain else ["figure"])
            writer.writeheader()
            writer.writerows(plain)
