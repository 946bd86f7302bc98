"""`pd-shadow bench transfer`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from pd_shadow.cli import rig

if TYPE_CHECKING:
    from pd_shadow.bench.transfer import Plan

_QUICK_TOKENS = 512
_QUICK_REPEATS = 3
_QUICK_LAYERS = 4


def _same(name: str) -> str:
    """Underscores and capitals are as good: `--op_type WRITE` is nixlbench's."""
    return name.replace("_", "-").lower()


def _models(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    from pd_shadow.perf.models import model

    try:
        return tuple(model(name).name for name in given)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from error


def _run_length(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[int, ...]:
    lengths = []
    for value in given:
        if value == "all":
            lengths.append(0)
        elif value.isascii() and value.isdecimal() and 1 <= int(value) <= 1 << 20:
            lengths.append(int(value))
        else:
            raise click.BadParameter(f"{value!r} is neither a number of blocks from 1 on nor 'all'", param=option)
    return tuple(lengths)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _same})
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    callback=_models,
    help="Whose KV: a model of the catalogue (L8, Q7).",
)
@click.option(
    "--block-size",
    "--page-size",
    "block_tokens",
    type=click.IntRange(1, 4096),
    multiple=True,
    help="Tokens of a block.",
)
@click.option(
    "--block-bytes",
    "--start-block-size",
    type=click.IntRange(1, 1 << 30),
    help="Bytes of a block in one layer, which is a descriptor.  [default: the model's]",
)
@click.option("--layers", type=click.IntRange(1), help="Only so many of the model's layers: less memory.")
@click.option(
    "--layout",
    "layouts",
    type=click.Choice(["plane-major", "block-major"]),
    multiple=True,
    help="Layers one after another, or blocks with all layers inside.  [default: plane-major]",
)
@click.option(
    "--direction",
    "--op-type",
    "directions",
    type=click.Choice(["write", "read"]),
    multiple=True,
    help="Who moves: P writes into D, or D reads from P.  [default: write]",
)
@click.option(
    "--backend", "backends", type=click.Choice(["ucx", "tcp"]), multiple=True,
    help="UCX as it chooses, or held to TCP on loopback.  [default: ucx]",
)  # fmt: skip
@click.option(
    "--chunk-tokens", "--isl", type=click.IntRange(1, 1 << 20), multiple=True,
    help="Tokens of a chunk; 16 MB go into one post at most.  [default: 4096]",
)  # fmt: skip
@click.option(
    "--concurrency", "--outstanding", type=click.IntRange(1, 64), multiple=True,
    help="Chunks at a time.  [default: 1]",
)  # fmt: skip
@click.option(
    "--run-length", "run_lengths", multiple=True, metavar="BLOCKS|all", callback=_run_length,
    help="Blocks that lie side by side at both ends.  [default: 1]",
)  # fmt: skip
@click.option(
    "--repeat", "--num-iter", "-n", type=click.IntRange(1, 10_000),
    help="Chunks, or sets of chunks at a time, that count.  [default: 10; 3 with --quick]",
)  # fmt: skip
@click.option(
    "--warm-up", "--warmup-iter", "-w", type=click.IntRange(0, 10_000), default=1, show_default=True,
    help="Those before, that do not.",
)  # fmt: skip
@click.option(
    "--sweep/--no-sweep", default=True, help="Whether to measure bandwidths, or only what is asked for below."
)
@click.option("--drills", is_flag=True, help="Also: peers that are killed, hang or restart, and a release in flight.")
@click.option("--contention", is_flag=True, help="Also: normal transfers without and with a backlog of shadow chunks.")
@click.option("--quick", is_flag=True, help="Seconds that show that everything works; too few to measure.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Block tables follow from it.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows here.")
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the rows (.png, .svg, .pdf); needs the extra plot.",
)  # fmt: skip
def transfer(
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
    **options: Any,
) -> None:
    """Measure how fast KV moves between two processes of this machine, beside what the machine itself can do.

    Starts a second process, moves chunks of a model's KV to it over NIXL, and in turns with them lets the kernel copy
    the same bytes between the same addresses: `Of limit` is the ratio. Without an option that names a shape, the usual
    ones of two models are measured: blocks of 16 and of 128 tokens, from coalesced to scattered, a read, and TCP. Of
    options that may be repeated, every combination is a row.

    Names of nixlbench, kvbench and ucx_perftest work where they mean the same: --op_type, --num_iter, --warmup_iter,
    --start_block_size, --page_size, --isl, --outstanding, -n, -w.

    Exit code 0: measured. 1: something did not arrive, or a drill did not end as promised. 2: wrong usage. 130:
    interrupted.

    \b
    Examples:
      pd-shadow bench transfer --quick
      pd-shadow bench transfer --json transfer.json --plot transfer.svg
      pd-shadow bench transfer --model L8 --block-size 16 --block-size 128 --run-length 1 --run-length all
      pd-shadow bench transfer --no-sweep --drills --contention
    """
    for option, file in (("--json", json_file), ("--csv", csv_file), ("--plot", plot_file)):
        rig.check_figures_file(file, option)
    try:
        from pd_shadow.bench import transfer as bench
        from pd_shadow.bench import transfer_report as report
        from transfer.transport.base import TransportError
    except ImportError as error:
        raise click.ClickException(f"the benchmark needs the extra transfer: {error}") from error
    _check_plot(plot_file)
    try:
        plan = _plan(**options)
        plan.check(bench.available_bytes())
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not bench.steps(plan):
        raise click.UsageError("--no-sweep: leaves nothing to measure; add --drills or --contention")
    console = Console()
    with rig.exit_codes((TransportError, OSError, RuntimeError, TimeoutError)):
        figures = _measure(plan, console)
    report.render(figures, console)
    rig.write_figures(figures, json_file, console)
    if csv_file is not None:
        report.write_csv(figures, csv_file)
    if plot_file is not None:
        report.plot(figures, plot_file)
    sys.exit(1 if figures["failed"] else 0)


def _check_plot(file: Path | None) -> None:
    if file is None:
        return
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--plot: {file.name} does not end in .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.ClickException(f"--plot: needs the extra plot: {error}") from error


def _plan(
    *,
    repeat: int | None,
    warm_up: int,
    seed: int,
    sweep: bool,
    quick: bool,
    drills: bool,
    contention: bool,
    layers: int | None,
    chunk_tokens: tuple[int, ...],
    models: tuple[str, ...],
    **shapes: Any,
) -> "Plan":
    """Raises ValueError for shapes that do not fit together."""
    from pd_shadow.bench import transfer as bench
    from transfer.chunks import CHUNK_TOKENS

    given = {name: value for name, value in shapes.items() if value not in ((), None)}
    if not sweep and (given or models or chunk_tokens or layers):
        raise ValueError("--no-sweep: not with options that say what to sweep; leave one of them out")
    if quick:
        layers = layers or _QUICK_LAYERS
        chunk_tokens = chunk_tokens or (_QUICK_TOKENS,)
    if not sweep:
        cases = []
    elif given or len(chunk_tokens) > 1:
        sizes = {"models": models, "chunk_tokens": chunk_tokens, **given}
        cases = bench.Sweep(layers=layers, **{name: value for name, value in sizes.items() if value}).cases()
    else:
        (tokens,) = chunk_tokens or (CHUNK_TOKENS,)
        cases = bench.usual_cases(models or bench.MODELS, tokens, layers)
    return bench.Plan(
        cases=cases,
        repeats=repeat or (_QUICK_REPEATS if quick else bench.Plan.repeats),
        warm_up=warm_up,
        seed=seed,
        drills=drills,
        contention_transfers=(20 if quick else 200) if contention else 0,
    )


def _measure(plan: "Plan", console: Console) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pd_shadow.bench import transfer as bench

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Starting", total=bench.steps(plan))
        begun = 0

        def on_step(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what[:1].upper() + what[1:], completed=begun)
            begun += 1

        figures = bench.run(plan, on_step)
        progress.update(task, description="Measured", completed=begun)
    return figures
