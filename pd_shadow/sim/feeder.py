"""Normal traffic on its way into a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_shadow.sim.clock import Clock
from pd_shadow.sim.deployment import Deployment
from pd_shadow.sim.request import Request
from pd_shadow.sim.workload.base import NormalRequest

# Drawn this many seconds at a time, for as long as the run lasts.
SLAB_SECONDS = 300.0


@dataclass(frozen=True)
class Normal:
    """Normal requests that arrived in the measured time."""

    requests: int = 0
    good: int = 0
    # Sums over the requests that ended.
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0

    def __add__(self, other: "Normal") -> "Normal":
        return Normal(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def attainment(self) -> float:
        """Share that met both SLOs; requests without an end did not."""
        return self.good / self.requests if self.requests else 1.0


class Feeder:
    """Sends one model's normal traffic, and keeps account of it."""

    def __init__(
        self,
        clock: Clock,
        deployment: Deployment,
        draw: Callable[[float], Sequence[NormalRequest]],
        measured: tuple[float, float],
    ) -> None:
        # Requests of the measured time that have not ended.
        self.left = 0
        self._requests = 0
        self._good = 0
        self._ttft = 0.0
        self._tpot = 0.0
        self._clock = clock
        self._deployment = deployment
        self._draw = draw
        self._measured = measured
        self._offset = 0.0
        self._next: list[NormalRequest] = []
        self._refill()

    @property
    def normal(self) -> Normal:
        """The account so far."""
        return Normal(self._requests, self._good, self._ttft, self._tpot)

    def _refill(self, now: float = 0.0) -> None:
        self._next = list(reversed(self._draw(SLAB_SECONDS)))
        self._base, self._offset = self._offset, self._offset + SLAB_SECONDS
        if self._next:
            self._clock.at(self._base + self._next[-1].arrival, self._send)
        else:
            self._clock.at(self._offset, self._refill)

    def _send(self, now: float) -> None:
        given = self._next.pop()
        deployment = self._deployment
        request = Request(
            now, given.prompt_tokens, given.output_tokens, deployment.slos.of(given.prompt_tokens),
            context=given.context, reusable=given.shared_tokens,
        )  # fmt: skip
        if self._measured[0] <= now < self._measured[1]:
            self._requests += 1
            self.left += 1
            request.done = self._ended
        deployment.submit(request, now)
        if self._next:
            self._clock.at(self._base + self._next[-1].arrival, self._send)
        else:
            self._refill(now)

    def _ended(self, request: Request, now: float) -> None:
        self.left -= 1
        self._good += request.meets_slo
        self._ttft += request.ttft
        self._tpot += request.tpot
