"""Many runs: over the cores of this machine or the workers of a cluster, each result kept as soon as it is there."""

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

    Raises what a run raises; results that were there by then are kept.
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
    try:
        for future in as_completed(futures):
            result = future.result()
            results.save(folder, result)
            found[futures[future]] = result
            progress.advance()
    finally:
        for future in futures:
            future.cancel()
    return {config: result for config, result in found.items() if result is not None}


@contextmanager
def local(processes: int) -> Iterator[Executor]:
    """Processes of this machine. Interrupted, it waits for the runs in flight at most."""
    with ProcessPoolExecutor(processes) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def on_dask(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster. Raises ImportError without Dask, OSError when nobody answers at the address."""
    from distributed import Client

    with Client(address) as client:  # type: ignore[no-untyped-call]
        yield client.get_executor()


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
    try:
        for future in as_completed(futures):
            capacities.add(*futures[future], future.result())
            progress.advance()
    finally:
        for future in futures:
            future.cancel()
