"""One instance: continuous batching in virtual time.

As in vLLM and in the paper's section 4: an iteration holds every running decode, then the prompt chunks of running
prefills, then admissions in order of arrival, under a token budget; KV is reserved at admission. Shadow chunks come
last, as the product's iteration controller says. Decode-only iterations in which nothing can change are one event.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pd_shadow.perf.latency import IterationLatency
from pd_shadow.perf.online import StepWork
from pd_shadow.policy.base import Batch, Budget, Iteration, IterationController, RunningRequest, StepReason
from pd_shadow.policy.slack import grant
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.kv_pool import KvPool
from pd_shadow.sim.request import Request
from pd_shadow.sim.shadow_queue import ShadowJob, ShadowQueue

# After a refusal, shadow work is looked at again this much later, or when the batch has changed; as in the plugin.
LOOK_SECONDS = 0.05
# An idle instance without room looks again when blocks may have gone cold.
ROOM_SECONDS = 1.0
# Jobs that an iteration tries: the first may lack what a shorter context fits into.
JOBS_TRIED = 4

_NO_WORK = Budget.refused(StepReason.NO_WORK)


@dataclass(frozen=True)
class EngineLimits:
    """What bounds an iteration."""

    chunk_tokens: int = 2048
    """Prompt and decode tokens (paper section 4)."""
    sequences: int = 256
    shadow_chunk_tokens: int = 4096
    """Shadow tokens of an iteration without normal work."""
    minimum_shadow_tokens: int = 256
    """A smaller shadow chunk is not worth reading its context for (n_min of Algorithm 1)."""
    host_bytes_per_second: float = 25e9
    """Loads from host memory, over PCIe."""


@dataclass
class Usage:
    """What an instance did, for energy and reports; seconds of virtual time."""

    busy_seconds: float = 0.0
    compute_bound_seconds: float = 0.0
    prefill_tokens: int = 0
    shadow_tokens: int = 0
    shadow_iterations: int = 0
    decode_tokens: int = 0

    def __sub__(self, before: "Usage") -> "Usage":
        return Usage(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


class Slice(NamedTuple):
    """What an iteration computes of a shadow job: tokens behind the first `start` of its context."""

    job: ShadowJob
    start: int
    tokens: int


class Engine:
    """One instance of one model.

    A prefill instance `hands_off` its requests with their first token; elsewhere they decode, and their `done` is
    called with the last one.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        latency: IterationLatency,
        pool: KvPool,
        *,
        limits: EngineLimits,
        kv_bytes_per_token: float,
        controller: IterationController | None,
        tpot_slo: float,
        hands_off: "Callable[[Engine, Request, float], None] | None" = None,
    ) -> None:
        self.name = name
        self.pool = pool
        self.limits = limits
        self.usage = Usage()
        self.shadow = ShadowQueue()
        self.controller = controller
        # Prompt tokens placed here and not computed yet.
        self.pending_tokens = 0
        self.requests = 0
        self._clock = clock
        self._latency = latency
        self._kv_bytes_per_token = kv_bytes_per_token
        self._hands_off = hands_off
        self._tpot_slo = tpot_slo
        self._waiting: deque[Request] = deque()
        # Requests that hold KV and whose prefix is on its way from host memory, by when it is there.
        self._loading: list[tuple[float, int, Request]] = []
        self._host_free_at = 0.0
        self._prefills: list[Request] = []
        # Decodes by the iteration count at which they end.
        self._decodes: list[tuple[int, int, Request]] = []
        self._order = 0
        self._decode_kv = 0
        self._step = 0
        # The iteration or run of iterations in flight; a later version makes its event void.
        self._version = 0
        self._running = False
        self._run_started = 0.0
        self._run_length = 0
        self._look_at = 0.0
        self._blocked = False
        self._seconds_per_token = latency.seconds(StepWork(2048, 2048 * 1024.0)) / 2048

    # What the cluster asks and tells.

    @property
    def seconds_per_token(self) -> float:
        """Prefill time of a prompt token on this instance by itself."""
        return self._seconds_per_token

    def submit(self, request: Request, now: float) -> None:
        """A request arrives to be prefilled."""
        self._waiting.append(request)
        held = self.pool.reach(request.context) if request.context is not None else 0
        request.cached = max(min(held, request.reusable), request.warmed)
        self.pending_tokens += request.prompt - request.cached
        self.requests += 1
        self._interrupt(now)

    def join(self, request: Request, now: float) -> None:
        """A request whose KV has arrived from a prefill instance decodes here; it holds its lease already."""
        self.requests += 1
        if request.output == 1:
            self._finish(request, now)
        else:
            self._start_decode(request)
        self._interrupt(now)

    def offer(self, job: ShadowJob, now: float) -> None:
        """A shadow job has something to do here."""
        self.shadow.add(job)
        self._look_at = 0.0
        self._interrupt(now)

    def poke(self, now: float) -> None:
        """Memory may have become free."""
        if self._waiting or self.shadow:
            self._interrupt(now)

    # Iterations.

    def _interrupt(self, now: float) -> None:
        """Something new: start, or let the iteration in flight be the last of its run."""
        if not self._running:
            self._next(now)
        elif self._run_length > 1:
            length = self._iterations_by(now)
            if length < self._run_length:
                self._run_length = length
                end = self._run_started + self._latency.decode_run(len(self._decodes), self._decode_kv, length)
                self._schedule_run_end(end)

    def _iterations_by(self, now: float) -> int:
        """How many iterations of the run have begun by now."""
        decodes, kv = len(self._decodes), self._decode_kv
        elapsed = now - self._run_started
        # None is shorter than the first.
        most = int(elapsed / self._latency.decode_run(decodes, kv, 1)) + 2
        low, high = 1, min(most, self._run_length)
        while low < high:
            middle = (low + high) // 2
            if self._latency.decode_run(decodes, kv, middle) >= elapsed:
                high = middle
            else:
                low = middle + 1
        return low

    def _next(self, now: float) -> None:
        """Start the next iteration, or stop."""
        self._running = False
        while self._loading and self._loading[0][0] <= now:
            self._prefills.append(heapq.heappop(self._loading)[2])
        parts = self._chunks(now)
        decodes = len(self._decodes)
        if not parts and not self.shadow:
            if decodes:
                self._start_run(now)
            return
        tokens, pairs = 0, 0.0
        for request, chunk in parts:
            tokens += chunk
            pairs += chunk * (request.computed + chunk / 2)
        work = StepWork(tokens, pairs, decodes, self._decode_kv)
        slices: list[Slice] = []
        budget = _NO_WORK
        total = work
        if self.shadow and now >= self._look_at:
            budget, slices, total = self._shadow_chunks(now, work, parts)
        if not total.tokens:
            self._sleep(now)
            return
        if not tokens and not slices:
            self._start_run(now, max(1, self._iterations_within(LOOK_SECONDS)))
            return
        seconds = self._latency.seconds(total)
        stretch = seconds - (self._latency.seconds(work) if work.tokens else 0.0) if slices else 0.0
        self._account(total, seconds, sum(part.tokens for part in slices) if slices else 0)
        self.usage.prefill_tokens += tokens
        self._running = True
        self._run_length = 1
        self._version += 1
        version = self._version
        # Nothing can change before the end.
        self._clock.at(
            now + seconds,
            lambda at: self._end_iteration(
                at, version, parts, slices, Iteration(seconds, stretch, False, budget.reason)
            ),
        )

    def _chunks(self, now: float) -> list[tuple[Request, int]]:
        """The prompt chunks of the next iteration, admissions included."""
        left = self.limits.chunk_tokens - len(self._decodes)
        parts: list[tuple[Request, int]] = []
        for request in self._prefills:
            if left <= 0:
                break
            chunk = min(left, request.prompt - request.computed)
            parts.append((request, chunk))
            left -= chunk
        self._blocked = False
        while self._waiting and left > 0:
            if len(self._decodes) + len(self._prefills) + len(self._loading) >= self.limits.sequences:
                break
            request = self._waiting[0]
            if not self._admit(request, now):
                self._blocked = True
                break
            self._waiting.popleft()
            if request.ready_at > now:
                self._order += 1
                heapq.heappush(self._loading, (request.ready_at, self._order, request))
                self._clock.at(request.ready_at, self._interrupt)
                continue
            self._prefills.append(request)
            chunk = min(left, request.prompt - request.computed)
            parts.append((request, chunk))
            left -= chunk
        return parts

    def _admit(self, request: Request, now: float) -> bool:
        # The last prompt token is always computed: its output is wanted.
        reusable = min(request.reusable, request.prompt - 1)
        total = request.prompt if self._hands_off else request.prompt + request.output
        lease = self.pool.reserve(request.context, reusable, total, now)
        if lease is None:
            return False
        request.lease = lease
        expected = request.cached
        request.cached = request.computed = max(lease.cached + lease.loaded, min(request.warmed, reusable))
        self.pending_tokens += expected - request.cached
        if lease.loaded and not request.warmed:
            begin = max(now, self._host_free_at)
            self._host_free_at = begin + lease.loaded * self._kv_bytes_per_token / self.limits.host_bytes_per_second
            request.ready_at = self._host_free_at
        return True

    def _shadow_chunks(
        self, now: float, work: StepWork, parts: list[tuple[Request, int]]
    ) -> tuple[Budget, list[Slice], StepWork]:
        """Algorithm 1: what the next iteration carries of shadow jobs."""
        assert self.controller is not None
        self._look_at = now + LOOK_SECONDS
        batch = Batch(now, bool(self._waiting), self._tpot_slo, self._running_requests(now, parts))
        budget = self.controller.budget(batch)
        if not budget.iteration_seconds:
            return budget, [], work
        seconds = self._latency.seconds
        base = seconds(work) if work.tokens else 0.0
        allowed = Budget.iteration(min(budget.iteration_seconds, base + budget.stretch_seconds), budget.reason)
        most = self.limits.chunk_tokens - work.tokens if work.tokens else self.limits.shadow_chunk_tokens
        slices: list[Slice] = []
        for job, start in self._lacking_jobs():
            lacking = min(job.target - start, job.left, most)
            if lacking <= 0:
                continue
            room = self.pool.shadow_room(job.session, now, lacking)
            total = work
            granted = grant(
                allowed,
                lambda n, total=total, start=start: seconds(total.with_prefill(n, start)),  # type: ignore[misc]
                wanted=lacking,
                room=room,
                minimum=min(self.limits.minimum_shadow_tokens, job.target - start, job.left),
            )
            if granted.tokens:
                slices.append(Slice(job, start, granted.tokens))
                work = work.with_prefill(granted.tokens, start)
                most -= granted.tokens
                self._look_at = 0.0
            if granted.tokens < lacking and granted.tokens:
                break
        return budget, slices, work

    def _lacking_jobs(self) -> list[tuple[ShadowJob, int]]:
        """The first jobs that lack something, each with what is there; jobs that repeat stay queued without it."""
        jobs = self.shadow.first(len(self.shadow))
        lacking = ((job, held) for job in jobs if (held := self.pool.tokens(job.session)) < job.target)
        return list(itertools.islice(lacking, JOBS_TRIED))

    def _running_requests(self, now: float, parts: list[tuple[Request, int]]) -> list[RunningRequest]:
        step = self._step
        running = []
        for _, _, request in self._decodes:
            slo = request.slo
            running.append(
                RunningRequest(
                    request.arrived, request.first_token_at, step - request.started_at_step, slo.ttft, slo.tpot, 0.0,
                    request.routed,
                )
            )  # fmt: skip
        for request in self._prefills:
            remaining = (request.prompt - request.computed) * self._seconds_per_token
            slo = request.slo
            running.append(RunningRequest(request.arrived, None, 0, slo.ttft, slo.tpot, remaining, request.routed))
        return running

    def _sleep(self, now: float) -> None:
        """Only shadow work, and none that can run: until something arrives, or until it may find room."""
        self._version += 1
        version = self._version
        wake = max(self._look_at, now + ROOM_SECONDS)
        self._clock.at(wake, lambda at: self._next(at) if version == self._version and not self._running else None)

    def _start_run(self, now: float, most: int | None = None) -> None:
        """Decode-only iterations until the first decode ends; at most so many when shadow work is to be looked at."""
        self._running = True
        self._run_started = now
        length = self._decodes[0][0] - self._step
        self._run_length = length if most is None else min(most, length)
        self._schedule_run_end(now + self._latency.decode_run(len(self._decodes), self._decode_kv, self._run_length))

    def _iterations_within(self, seconds: float) -> int:
        return int(seconds / self._latency.decode_run(len(self._decodes), self._decode_kv, 1))

    def _schedule_run_end(self, at: float) -> None:
        self._version += 1
        version = self._version
        self._clock.at(at, lambda now: self._end_run(now, version))

    def _end_run(self, now: float, version: int) -> None:
        if version != self._version:
            return
        length = self._run_length
        decodes = len(self._decodes)
        work = StepWork(0, 0.0, decodes, self._decode_kv + decodes * length // 2)
        self._account(work, now - self._run_started, 0)
        if self.controller is not None:
            bound = self._latency.memory_bound(work)
            self.controller.ran(Iteration(now - self._run_started, 0.0, bound, StepReason.NO_WORK))
        self._advance(length, now)
        self._next(now)

    def _end_iteration(
        self,
        now: float,
        version: int,
        parts: list[tuple[Request, int]],
        slices: list[Slice],
        iteration: Iteration,
    ) -> None:
        if version != self._version:
            return
        for job, start, tokens in slices:
            self.pool.grow_shadow(job.session, start, tokens, now)
            job.ran(tokens, now)
        if self.controller is not None:
            self.controller.ran(iteration)
        if self._decodes:
            self._advance(1, now)
        for request, chunk in parts:
            request.computed += chunk
            self.pending_tokens -= chunk
            if request.computed == request.prompt:
                self._prefills.remove(request)
                self._prefilled(request, now)
        self._next(now)

    def _advance(self, iterations: int, now: float) -> None:
        """Every decode has so many more tokens."""
        decodes = self._decodes
        self._step += iterations
        self._decode_kv += iterations * len(decodes)
        self.usage.decode_tokens += iterations * len(decodes)
        while decodes and decodes[0][0] <= self._step:
            _, _, request = heapq.heappop(decodes)
            self._decode_kv -= request.prompt + request.output
            self._finish(request, now)

    def _prefilled(self, request: Request, now: float) -> None:
        request.first_token_at = now
        if self._hands_off is not None:
            self.requests -= 1
            self._hands_off(self, request, now)
        elif request.output == 1:
            self._finish(request, now)
        else:
            self._start_decode(request)

    def _start_decode(self, request: Request) -> None:
        self._order += 1
        request.started_at_step = self._step
        heapq.heappush(self._decodes, (self._step + request.output - 1, self._order, request))
        self._decode_kv += request.prompt + 1

    def _finish(self, request: Request, now: float) -> None:
        self.requests -= 1
        request.finished_at = now
        assert request.lease is not None
        self.pool.release(request.lease, request.context, request.prompt + request.output, now)
        request.lease = None
        if request.done is not None:
            request.done(request, now)

    def _account(self, work: StepWork, seconds: float, shadow_tokens: int) -> None:
        usage = self.usage
        usage.busy_seconds += seconds
        usage.compute_bound_seconds += seconds * self._latency.compute_bound_fraction(work)
        if shadow_tokens:
            usage.shadow_tokens += shadow_tokens
            usage.shadow_iterations += 1
