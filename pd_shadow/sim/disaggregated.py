"""Prefill and decode instances, and the KV that moves between them (paper section 3.5 and appendix B)."""

from collections import deque
from collections.abc import Callable, Sequence

from pd_shadow.policy.base import IterationController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.deployment import Deployment, Hardware
from pd_shadow.sim.engine import Engine
from pd_shadow.sim.inbound import Inbound
from pd_shadow.sim.kv_pool import Lease
from pd_shadow.sim.link import Link
from pd_shadow.sim.request import Request
from pd_shadow.sim.shadow_queue import ShadowJob


class DecodeSide(Inbound):
    """One decode instance, and the requests that wait for its memory."""

    def __init__(self, engine: Engine, clock: Clock, hardware: Hardware, held: Callable[[int], int]) -> None:
        super().__init__(
            engine,
            clock,
            bytes_per_second=hardware.link_bytes_per_second,
            bytes_per_token=hardware.model.kv_bytes_per_token,
            held=held,
        )
        self._clock = clock
        # Tokens reserved or waiting, which tells instances apart.
        self.load = 0
        self._bytes_per_token = hardware.model.kv_bytes_per_token
        self._sequences = hardware.limits.sequences
        self._host_bytes_per_second = hardware.limits.host_bytes_per_second
        self._host_free_at = 0.0
        self._accepted = 0
        self._waiting: deque[tuple[Request, Engine]] = deque()

    def receive(self, request: Request, source: Engine, now: float) -> None:
        """A prompt is computed on `source`, which keeps its KV until it is here."""
        self.load += request.prompt + request.output
        self._waiting.append((request, source))
        self._accept(now)

    def finished(self, request: Request, now: float) -> None:
        """A request has ended here."""
        self._accepted -= 1
        self.load -= request.prompt + request.output
        self._accept(now)

    def _accept(self, now: float) -> None:
        while self._waiting and self._accepted < self._sequences:
            request, source = self._waiting[0]
            lease = self.engine.pool.reserve(request.context, request.reusable, request.prompt + request.output, now)
            if lease is None:
                return
            self._waiting.popleft()
            self._accepted += 1
            found = max(lease.cached + lease.loaded, min(request.warmed, request.reusable))
            self._fetch(request, source, lease, request.prompt - found, now)

    def _fetch(self, request: Request, source: Engine, lease: Lease, tokens: int, now: float) -> None:
        sent, request.lease = request.lease, lease
        assert sent is not None
        loaded_at = now
        if lease.loaded and not request.warmed:
            begin = max(now, self._host_free_at)
            self._host_free_at = begin + lease.loaded * self._bytes_per_token / self._host_bytes_per_second
            loaded_at = self._host_free_at

        def arrived(at: float) -> None:
            source.pool.release(sent, request.context, request.prompt, at)
            source.poke(at)
            if loaded_at > at:
                self._clock.at(loaded_at, lambda later: self.engine.join(request, later))
            else:
                self.engine.join(request, at)

        self.link.normal(tokens * self._bytes_per_token, now, arrived)


class Disaggregated(Deployment):
    """`prefill` and `decode` instances of a model; `controller` makes the one of a prefill instance."""

    def __init__(
        self,
        hardware: Hardware,
        clock: Clock,
        prefill: int,
        decode: int,
        controller: Callable[[], IterationController | None],
        slo_scale: float = 1.0,
    ) -> None:
        super().__init__(hardware, clock, slo_scale)
        name = hardware.model.name
        self._prefill: list[Engine] = []
        for number in range(prefill):
            engine = hardware.engine(f"{name}-p{number}", clock, self.slos, controller(), self._prefilled)
            self._prefill.append(engine)
        self._decode: list[DecodeSide] = []
        for number in range(decode):
            engine = hardware.engine(f"{name}-d{number}", clock, self.slos, None)
            self._decode.append(DecodeSide(engine, clock, hardware, self._held))
        self._decode_of: dict[int, DecodeSide] = {}

    @property
    def engines(self) -> Sequence[Engine]:
        return [*self._prefill, *(side.engine for side in self._decode)]

    @property
    def links(self) -> Sequence[Link]:
        """One per decode instance."""
        return [side.link for side in self._decode]

    @property
    def _entries(self) -> Sequence[Engine]:
        return self._prefill

    def suspend(self, session: int) -> None:
        super().suspend(session)
        job = self._jobs.get(session)
        if job is not None:
            self._side(session).withdraw(job)

    def _prefilled(self, source: Engine, request: Request, now: float) -> None:
        if request.shadow:
            # Nothing is generated; its KV moves in the gaps of the link.
            assert request.lease is not None
            assert request.context is not None
            source.pool.release(request.lease, request.context, request.prompt, now)
            job = self._jobs.get(request.context)
            if job is not None:
                self._covered(job, now)
            return
        side = self._side(request.context) if request.context is not None else min(self._decode, key=_decode_load)
        done = request.done

        def finished(ended: Request, at: float) -> None:
            side.finished(ended, at)
            if done is not None:
                done(ended, at)

        request.done = finished
        side.receive(request, source, now)

    def _covered(self, job: ShadowJob, now: float) -> None:
        self._side(job.session).offer(job, now)

    def _side(self, session: int) -> DecodeSide:
        """The session's decode instance, sticky; the least loaded one at first."""
        side = self._decode_of.get(session)
        if side is None:
            side = self._decode_of[session] = min(self._decode, key=_decode_load)
        return side

    def _held(self, session: int) -> int:
        bound = self._bound.get(session)
        return 0 if bound is None else bound.pool.tokens(session)


def _decode_load(side: DecodeSide) -> tuple[int, str]:
    return side.load, side.engine.name
