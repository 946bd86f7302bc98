"""What shadow work does to the normal traffic of one colocated engine: four modes, the same requests in each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pd_shadow.bench import report, trace
from pd_shadow.bench.load import Load
from pd_shadow.bench.modes import Mode
from pd_shadow.bench.samples import Phase
from pd_shadow.bench.slo import Slo
from pd_shadow.bench.traffic import Traffic
from pd_shadow.demo import models
from pd_shadow.demo.cluster import BOOT_SECONDS, HOST, free_ports
from pd_shadow.demo.process import ManagedProcess
from pd_shadow.engine.settings import PluginSettings, Role, SloSettings
from pd_shadow.engine.vllm.command import EngineCommand

MODEL = models.SMALL
BLOCKS = 4096
"""Of 128 tokens: a quarter of the pool, all that shadow work may have, does not fill up within the seconds after which
it may recycle its own."""
BATCHED_TOKENS = 2048
"""Per iteration, as in the paper: what a stock engine computes of a long prompt at once."""
STOP_SECONDS = 15.0
"""An engine writes its trace when it is told to end."""


@dataclass(frozen=True)
class Plan:
    """How much is measured. `seconds` are per mode, cut into `rounds` in which every mode has its turn.

    `routed_requests` are per pass; there are two passes a round, without shadow work and with it. `minimum_tokens` is
    the plugin's: half of a 25 ms SLO does not hold the 256 tokens of its default on one CPU core.
    """

    seconds: float = 60.0
    rate: float = 4.0
    seed: int = 1
    modes: tuple[Mode, ...] = tuple(Mode)
    rounds: int = 3
    routed_requests: int = 24
    routed_in_flight: int = 2
    warm_up_requests: int = 12
    warm_up_shadow_seconds: float = 10.0
    tpot_floor_seconds: float = 0.025
    minimum_tokens: int = 64

    @classmethod
    def quick(cls) -> "Plan":
        """Shows that everything works; too short to measure."""
        return cls(seconds=6.0, rounds=1, routed_requests=4, warm_up_requests=4, warm_up_shadow_seconds=2.0)

    @property
    def slo(self) -> SloSettings:
        return SloSettings(tpot_floor_seconds=self.tpot_floor_seconds)


@dataclass(frozen=True)
class Measured:
    """All phases of a run. Of `routed` passes, pairs without and with shadow work."""

    slo: Slo
    phases: Mapping[Mode, Sequence[Phase]]
    routed: Sequence[tuple[Phase, Phase]]


async def run(plan: Plan, run_dir: Path, cache_dir: Path, console: Console) -> dict[str, Any]:
    """Run the benchmark and return its figures.

    `run_dir` receives the engines' logs and the plugin's trace, `cache_dir` the model. Raises ProcessDiedError when an
    engine does not come up or ends, RuntimeError when a request to an idle engine fails.
    """
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    trace_file = run_dir / "plugin-trace.jsonl"
    model_dir = await asyncio.to_thread(_prepare, run_dir, trace_file, cache_dir)
    commands = engine_commands(plan, model_dir, trace_file)
    with Progress(*columns, console=console) as progress:
        boot = progress.add_task(f"Starting {len(commands)} vLLM engines", total=len(commands))
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
            _engines(commands, run_dir, http, lambda: progress.advance(boot)) as engines,
        ):
            boot_seconds = time.monotonic() - started
            measured = await _measure(plan, commands, engines, http, progress)
    records = await asyncio.to_thread(trace.read, trace_file) if Mode.PLUGIN in commands else None
    figures = report.build(
        measured.slo,
        measured.phases,
        measured.routed,
        records,
        seed=plan.seed,
        config=asdict(plan),
        engine=_engine_summary(commands),
        model=MODEL,
    )
    figures["boot_seconds"] = round(boot_seconds, 1)
    figures["total_seconds"] = round(time.monotonic() - started, 1)
    return figures


def engine_commands(plan: Plan, model_dir: Path, trace_file: Path) -> dict[Mode, EngineCommand]:
    """One colocated server per mode; they differ by the plugin only."""
    plugin = PluginSettings(minimum_tokens=plan.minimum_tokens, slo=plan.slo, trace_file=trace_file)
    return {
        mode: EngineCommand(
            model_dir=model_dir,
            served_name=MODEL.name,
            role=Role.COLOCATED,
            host=HOST,
            port=port,
            num_gpu_blocks=BLOCKS,
            max_num_batched_tokens=BATCHED_TOKENS,
            plugin=plugin if mode.has_plugin else None,
        )
        for mode, port in zip(plan.modes, free_ports(len(plan.modes)), strict=True)
    }


def _prepare(run_dir: Path, trace_file: Path, cache_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    # Engines append.
    trace_file.unlink(missing_ok=True)
    return models.build(MODEL, cache_dir)


@contextlib.asynccontextmanager
async def _engines(
    commands: Mapping[Mode, EngineCommand], run_dir: Path, http: aiohttp.ClientSession, on_ready: Callable[[], None]
) -> AsyncIterator[Mapping[Mode, ManagedProcess]]:
    """The servers, healthy inside the block and gone after it."""
    processes = {
        mode: ManagedProcess(
            f"{mode} engine", command.argv(), command.env(), run_dir / f"{mode}.log", f"{command.url}/health"
        )
        for mode, command in commands.items()
    }
    try:
        for process in processes.values():
            await process.start()
        for process in processes.values():
            await process.wait_healthy(http, BOOT_SECONDS)
            on_ready()
        yield processes
    finally:
        await asyncio.gather(*(process.stop(STOP_SECONDS) for process in processes.values()))


async def _measure(
    plan: Plan,
    commands: Mapping[Mode, EngineCommand],
    engines: Mapping[Mode, ManagedProcess],
    http: aiohttp.ClientSession,
    progress: Progress,
) -> Measured:
    traffic = Traffic(MODEL, plan.seed)
    loads = {mode: Load(http, command.url, MODEL.name, mode, traffic) for mode, command in commands.items()}
    warm = progress.add_task("Warming up", total=len(loads))
    isolated = None
    for mode, load in loads.items():
        if isolated is None:
            await load.warm_up(plan.warm_up_requests, 0.0)
            isolated = await load.isolated()
        await load.warm_up(plan.warm_up_requests, plan.warm_up_shadow_seconds)
        engines[mode].check()
        progress.advance(warm)
    assert isolated is not None
    parts = [traffic.arrivals(f"round-{r}", plan.seconds / plan.rounds, plan.rate) for r in range(plan.rounds)]
    pairs = plan.rounds if Mode.PLUGIN in loads else 0
    total = len(loads) * sum(map(len, parts)) + 2 * pairs * plan.routed_requests
    bar = progress.add_task("Requests", total=total)

    def on_request() -> None:
        progress.advance(bar)

    phases: dict[Mode, list[Phase]] = {mode: [] for mode in loads}
    order = list(loads)
    for number, requests in enumerate(parts):
        # Another mode begins each round, so that what changes on the machine meanwhile falls on all.
        for mode in order[number % len(order) :] + order[: number % len(order)]:
            progress.update(bar, description=f"Requests, {mode}")
            phases[mode].append(await loads[mode].open_loop(requests, on_request))
            engines[mode].check()
    routed = []
    for number in range(pairs):
        passes = {}
        for shadow in (False, True) if number % 2 == 0 else (True, False):
            progress.update(bar, description=f"Routed calls, {'with' if shadow else 'without'} shadow work")
            passes[shadow] = await loads[Mode.PLUGIN].closed_loop(
                traffic.routed(plan.routed_requests, f"pass-{number}-{shadow}"),
                plan.routed_in_flight,
                shadow=shadow,
                on_request=on_request,
            )
            engines[Mode.PLUGIN].check()
        routed.append((passes[False], passes[True]))
    return Measured(Slo(isolated, plan.slo), phases, routed)


def _engine_summary(commands: Mapping[Mode, EngineCommand]) -> dict[str, Any]:
    own = {"model_dir", "host", "port", "plugin"}
    command = next(iter(commands.values()))
    plugin = next((c.plugin for c in commands.values() if c.plugin is not None), None)
    return {
        **command.model_dump(mode="json", exclude=own),
        "plugin": plugin.model_dump(mode="json", exclude={"trace_file"}) if plugin is not None else None,
    }
