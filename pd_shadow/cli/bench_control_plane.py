"""`pd-shadow bench control-plane`."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pd_shadow.cli import rig

_QUICK = {"sessions": 1_000, "instances": 8, "memory_sessions": 2_000, "calls": 200, "rate": 200.0, "repeats": 2}


@click.command("control-plane", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sessions", type=click.IntRange(1, 10_000_000), help="Live sessions.  [default: 100000; quick: 1000]")
@click.option("--instances", type=click.IntRange(4, 10_000), help="Ready instances.  [default: 100; quick: 8]")
@click.option(
    "--memory-sessions", type=click.IntRange(1, 10_000_000),
    help="Sessions whose memory is measured.  [default: 200000; quick: 2000]",
)  # fmt: skip
@click.option("--calls", type=click.IntRange(1, 1_000_000), help="Calls of a repetition.  [default: 5000; quick: 200]")
@click.option(
    "--rate", type=click.FloatRange(0, 1e6, min_open=True),
    help="Calls offered to the server per second.  [default: 1000; quick: 200]",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(1, 100), help="Repetitions.  [default: 3; quick: 2]")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Which sessions call which models.")
@click.option("--quick", is_flag=True, help="Seconds that show that everything works; too few to measure.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
def control_plane(json_file: Path | None, quick: bool, seed: int, **options: Any) -> None:
    """Measure what a decision of the controller costs, in time and in memory.

    The decision core alone; BeginCall at a controller in a process of its own, over TCP; short prompts against long
    ones; resident bytes per session. Instances are made up: no engine runs.

    Exit code 0: measured, whether the bars are met or not. 1: the controller did not start, or a call failed. 2: wrong
    usage. 130: interrupted.

    \b
    Examples:
      pd-shadow bench control-plane --quick
      pd-shadow bench control-plane --json control-plane.json
      pd-shadow bench control-plane --sessions 10000 --instances 16 --rate 500
    """
    rig.check_figures_file(json_file)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pd_shadow.bench import control_plane as bench
    from pd_shadow.bench import control_plane_report as report

    given = {name: value for name, value in options.items() if value is not None}
    plan = bench.Plan(**{**(_QUICK if quick else {}), **given}, seed=seed)
    try:
        plan.check()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with rig.exit_codes((RuntimeError, OSError)), Progress(*columns, console=console) as progress:
        task = progress.add_task("Starting", total=bench.STEPS)
        begun = 0

        def on_step(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what[:1].upper() + what[1:], completed=begun)
            begun += 1

        core, served, bytes_per_session = bench.run(plan, on_step)
        progress.update(task, description="Measured", completed=begun)
    figures = report.build(plan, core, served, bytes_per_session)
    report.render(figures, console)
    rig.write_figures(figures, json_file, console)
