"""One simulated instance and requests for it."""

from collections.abc import Sequence
from typing import NamedTuple

from pd_shadow.perf.latency import IterationLatency
from pd_shadow.perf.models import model
from pd_shadow.policy.base import IterationController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.engine import Engine, EngineLimits
from pd_shadow.sim.kv_pool import KvPool
from pd_shadow.sim.request import Request, Slo

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
