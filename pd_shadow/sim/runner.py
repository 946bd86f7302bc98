"""Many runs: over the cores of this machine or the workers of a cluster, each result kept as soon as it is there."""

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pd_shadow.sim import results
from pd_shadow.sim.capacity import Capacities, Capacity, essence, find
from pd_shadow.sim.config import RunConfig
from pd_shadow.sim.demand import window_load
from pd_shadow.sim.simulation import RunResult, run


class Progress(Protocol):
    """What a long experiment tells: how many parts of a stage are done."""

    def stage(self, name: str, total: int) -> None:
        """A stage of so many parts begins."""
        ...

    def advance(self) -> None:
        """One part is done."""
        ...


def execute(
    configs: Iterable[RunConfig], folder: Path, executor: Executor, progress: Progress
) -> dict[RunConfig, RunResult]:
    """The result of every configuration, computed unless `folder` has it.

    Raises what a run raises; results that were there by then are kept. What is still to run is left to whoever owns the
    executor, as `local` and `on_dask` do.
    """
    wanted = list(dict.fromkeys(configs))
    folder.mkdir(parents=True, exist_ok=True)
    found = {config: results.load(folder, config) for config in wanted}
    missing = [config for config, result in found.items() if result is None]
    capacities = Capacities(folder / "capacities.json")
    _find_capacities(missing, capacities, executor, progress)
    progress.stage("Simulating", len(wanted))
    for _ in range(len(wanted) - len(missing)):
        progress.advance()
    futures = {executor.submit(_run, config, _capacities_of(config, capacities)): config for config in missing}
    for future in as_completed(futures):
        result = future.result()
        results.save(folder, result)
        found[futures[future]] = result
        progress.advance()
    return {config: result for config, result in found.items() if result is not None}


@contextmanager
def local(processes: int) -> Iterator[Executor]:
    """Processes of this machine. Interrupted, or when a run fails, it ends the runs in flight."""
    before = set(multiprocessing.active_children())
    # Spawned: a process forked beside other threads, gRPC's for instance, may never end.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _take_signals_from_parent) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - before:
                # Not to be caught: they hold nothing that a kill could hurt.
                worker.kill()
            raise


@contextmanager
def on_dask(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster.

    Raises ImportError without Dask, ValueError for what is no address, OSError when nobody answers at the address or
    workers keep dying.
    """
    from distributed import Client, KilledWorker

    with Client(address) as client:  # type: ignore[no-untyped-call]
        try:
            yield client.get_executor()
        except KilledWorker as error:
            raise OSError(f"workers of {address} died of a run: {error}") from error


def _take_signals_from_parent() -> None:
    """Ctrl-C reaches every process of the terminal's group: workers leave it to their parent, which ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(config: RunConfig, capacities: Sequence[Capacity]) -> RunResult:
    share = config.load * window_load(config)
    return run(
        config,
        [share * capacity.rate for capacity in capacities],
        [capacity.prefill_instances for capacity in capacities],
    )


def _capacities_of(config: RunConfig, capacities: Capacities) -> list[Capacity]:
    return [capacities.known(config, name) for name in config.models]


def _find_capacities(
    configs: Iterable[RunConfig], capacities: Capacities, executor: Executor, progress: Progress
) -> None:
    wanted = {(essence(config), name) for config in configs for name in config.models}
    missing = sorted((pair for pair in wanted if not capacities.has(*pair)), key=repr)
    if not missing:
        return
    progress.stage("Finding capacities", len(missing))
    futures = {executor.submit(find, config, name): (config, name) for config, name in missing}
    for future in as_completed(futures):
        capacities.add(*futures[future], future.result())
        progress.advance()
