"""The whole demo: boot, replay cold, replay with shadow, compare."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pd_shadow.demo import emulated, models, report
from pd_shadow.demo.cluster import ROLES, Cluster, EmulatedCluster, Engines, Mode, Model
from pd_shadow.demo.replay import CONCURRENT_SESSIONS, Replay, Run
from pd_shadow.demo.router import Router
from pd_shadow.demo.traffic import REQUESTS_PER_SECOND
from pd_shadow.demo.workload import SCALE, Session, build_sessions
from pd_shadow.policy.approach import DEFAULT, TRAITS, Approach, for_engines

APPROACHES = [approach for approach in for_engines() if not TRAITS[approach].host_tier]
"""What the demo's engines can run: they have no host tier."""
ERRORS_SHOWN = 5


@dataclass(frozen=True)
class Plan:
    """What is replayed. `quick` is one small workload to see that everything works, not to measure.

    Four sessions are few, so the default seed is one whose sessions resemble the workload at large (a test holds it to
    that): the switch rate, and the tokens a switch finds uncovered without shadow. Seed 0 does not: seven of its
    sixteen switches are one session alternating at every call, which leaves little to cover.
    """

    sessions: int = 4
    seed: int = 1
    engines: Engines = Engines.EMULATED
    # Of emulated time.
    speed: float = emulated.SPEED
    mode: Mode = Mode.DISAGGREGATED
    # Of the second run; the first is cold.
    approach: Approach = DEFAULT
    # Engines without the plugin.
    stock: bool = False
    # Decides about both runs' steps.
    router: Router = Router.NONE

    @classmethod
    def quick(cls, seed: int) -> "Plan":
        return cls(sessions=2, seed=seed)


async def run(plan: Plan, run_dir: Path, cache_dir: Path, console: Console) -> dict[str, Any]:
    """Run the demo and return its figures.

    Raises ProcessDiedError when a process does not come up or ends, RuntimeError when a warm-up call fails.
    """
    started = time.monotonic()
    of_vllm = plan.engines is Engines.VLLM
    specs: tuple[Model, ...] = (models.SMALL, models.LARGE) if of_vllm else (emulated.SMALL, emulated.LARGE)
    cluster_of = Cluster if of_vllm else EmulatedCluster
    stretch = 1.0 if of_vllm else emulated.STRETCH
    rate = REQUESTS_PER_SECOND if of_vllm else emulated.REQUESTS_PER_SECOND
    concurrent = CONCURRENT_SESSIONS if of_vllm else emulated.CONCURRENT_SESSIONS
    small, large = (spec.name for spec in specs)
    sessions = build_sessions(plan.sessions, plan.seed, small, large, stretch)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    engines = len(specs) * len(ROLES[plan.mode])
    with Progress(*columns, console=console) as progress:
        # vLLM's models are built first, and count too.
        built = len(specs) if of_vllm else 0
        boot = progress.add_task(f"Starting {engines} {plan.engines} engines", total=built + engines)
        async with cluster_of(
            run_dir,
            cache_dir,
            specs,
            progress=lambda line: progress.advance(boot) if not line.startswith("control") else None,
            mode=plan.mode,
            stock=plan.stock,
            speed=1.0 if of_vllm else plan.speed,
        ) as cluster:
            boot_seconds = time.monotonic() - started
            bar = progress.add_task("Calls", total=2 * sum(len(session.steps) for session in sessions))
            runs = {}
            for name, approach in (("cold", Approach.NO_SHADOW), ("shadow", plan.approach)):
                progress.update(bar, description=f"Calls, {name} run")
                async with cluster.control_plane(approach, f"control-{name}") as plane:
                    replay = Replay.over(
                        cluster, plane, f"control-{name}", lambda: progress.advance(bar), rate=rate,
                        concurrent=concurrent, policy=plan.router.policy(cluster.speed),
                    )  # fmt: skip
                    runs[name] = await _one_run(cluster, replay, sessions, plan.seed, f"control-{name}")
    figures = report.build(
        runs["cold"],
        runs["shadow"],
        seed=plan.seed,
        specs=specs,
        mode=plan.mode,
        engines=plan.engines,
        router=plan.router,
        kv_transfer=cluster.kv_transfer,
        config={
            **asdict(plan),
            # At request level Harvest and Harvest-SLO are one and the same rule.
            "shadow_admission": "request level, stock engines" if plan.stock else "iteration level, engine plugin",
            "length_scale": f"1/{SCALE / stretch:g}",
            "concurrent_sessions": concurrent,
            "normal_requests_per_second_per_model": rate,
            "speed": cluster.speed,
        },
    )
    figures["boot_seconds"] = round(boot_seconds, 1)
    figures["total_seconds"] = round(time.monotonic() - started, 1)
    errors = [line for each in runs.values() for line in each.errors]
    for line in errors[:ERRORS_SHOWN]:
        console.print(f"failed: {line}", style="red", markup=False)
    return figures


async def _one_run(cluster: Cluster, replay: Replay, sessions: list[Session], seed: int, name: str) -> Run:
    await replay.warm_up()
    try:
        result = await replay.run(sessions, seed)
    except ExceptionGroup as several:
        cluster.check()
        raise RuntimeError(f"the {name} run broke off: {several.exceptions[0]!r}") from several
    cluster.check()
    with (cluster.run_dir / f"{name}-calls.jsonl").open("w") as lines:
        lines.writelines(json.dumps(call.summary()) + "\n" for call in result.calls)
    return result


def default_cache_dir() -> Path:
    """Where built models are kept between runs: beside this environment, so that it goes away with it."""
    return Path(sys.prefix) / "var" / "pd-shadow" / "models"
