"""One simulated instance and requests for it; small whole runs."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

from pd_shadow.perf.latency import IterationLatency
from pd_shadow.perf.models import model
from pd_shadow.policy.base import IterationController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.engine import Engine, EngineLimits
from pd_shadow.sim.kv_pool import KvPool
from pd_shadow.sim.request import Request, Slo
from pd_shadow.sim.simulation import RunResult, run

MODEL = model("Llama-3.1-8B-Instruct")
LATENCY = IterationLatency(MODEL)
SLO = Slo(1.0, 0.03)


class Given(NamedTuple):
    """A request to be."""

    arrived: float
    prompt: int
    output: int
    routed: bool = False


def instance(
    clock: Clock,
    *,
    tokens: int = 400_000,
    controller: IterationController | None = None,
    limits: EngineLimits | None = None,
) -> Engine:
    pool = KvPool(tokens, cap_share=0.25, cold_seconds=5.0)
    return Engine(
        "i", clock, LATENCY, pool, limits=limits or EngineLimits(), kv_bytes_per_token=MODEL.kv_bytes_per_token,
        controller=controller, tpot_slo=SLO.tpot,
    )  # fmt: skip


def serve(engine: Engine, clock: Clock, given: Sequence[Given]) -> list[Request]:
    """Requests, once all of them have ended."""
    requests = [Request(each.arrived, each.prompt, each.output, SLO, routed=each.routed) for each in given]
    for request in requests:
        clock.at(request.arrived, lambda now, request=request: engine.submit(request, now))  # type: ignore[misc]
    clock.run(lambda: all(request.finished_at is not None for request in requests))
    return requests


MODELS = ("Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct")
RATES = {MODELS[0]: 3.0, MODELS[1]: 1.0}
"""Normal requests per second on two instances: an eighth of what they carry."""


def tiny(**fields: object) -> RunConfig:
    """A run of a second or less."""
    given = {"models": MODELS, "seconds": 20, "warm_up_seconds": 5, "instances": 2, "sessions_per_second": 0.3}
    return RunConfig.model_validate({**given, **fields})


def simulated(config: RunConfig) -> RunResult:
    """Its result, at RATES, one prefill instance unless configured."""
    split = (config.prefill_instances or 1) if config.mode is Mode.DISAGGREGATED else None
    return run(config, [RATES.get(name, 1.0) for name in config.models], [split] * len(config.models))


@functools.cache
def outcome(**fields: object) -> RunResult:
    """`simulated(tiny(...))`, once for all tests."""
    return simulated(tiny(**fields))


class Inline(Executor):
    """Runs what is submitted at once; from the `fails_at`-th on it raises `error`."""

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.submitted: list[str] = []
        self._fails_at = fails_at
        self._error = error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._fails_at == len(self.submitted):
            assert self._error is not None
            future.set_exception(self._error)
        else:
            future.set_result(fn(*args, **kwargs))
        self.submitted.append(fn.__name__)
        return future
