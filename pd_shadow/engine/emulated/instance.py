"""The emulated instance, sans I/O: continuous batching, prefix cache, shadow class and handoff; time comes in.

As in vLLM: an iteration holds every running request in order, then admissions, under a token budget. As in the
simulator, KV is reserved at admission and iterations last as the latency model says. Shadow legs are handled as by the
engine plugin (engine/vllm/scheduler.py), by the same policies, tags, ends and reports.
"""

import bisect
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pd_shadow.engine.attachment import Attachment
from pd_shadow.engine.controllers import DEFAULTS, iteration_controller
from pd_shadow.engine.directives import Directive, DropSession, PauseShadow, ResumeShadow, SetLimits
from pd_shadow.engine.emulated import handoff
from pd_shadow.engine.emulated.block_pool import NOTHING, BlockPool, Content, content_of
from pd_shadow.engine.emulated.config import EmulatedEngine
from pd_shadow.engine.emulated.handoff import Exports, RemoteKv
from pd_shadow.engine.emulated.request import End, EngineRequest, State
from pd_shadow.engine.emulated.tokenizer import Tokenizer
from pd_shadow.engine.jobs import Job, JobQueue, LegEnd
from pd_shadow.engine.settings import PluginSettings
from pd_shadow.engine.snapshot import EngineSnapshot
from pd_shadow.engine.steps import StepLog, StepRecord
from pd_shadow.engine.tags import RESULT, LegKind, call_tag, shadow_tag
from pd_shadow.perf.online import StepWork
from pd_shadow.policy.approach import EngineController
from pd_shadow.policy.base import Batch, Budget, Iteration, RunningRequest, StepReason
from pd_shadow.policy.slack import grant, slack

JOBS_PER_STEP = 2
"""Shadow legs that share an iteration, as in the plugin."""
MAX_JOBS = 1024
LOOK_SECONDS = 0.05
"""An idle engine with legs that may not run now looks again this much later."""
COLD_MARGIN_SECONDS = 0.001
_NO_WORK = Budget.refused(StepReason.NO_WORK)


class Slice(NamedTuple):
    """A leg's share of an iteration; it holds `blocks` from its beginning to its end."""

    job: Job
    start: int
    tokens: int
    blocks: list[int]


class Step(NamedTuple):
    """One iteration. Times are engine seconds."""

    at: float
    seconds: float
    parts: Sequence[tuple[EngineRequest, int]]
    slices: Sequence[Slice]
    work: StepWork
    iteration: Iteration
    budget_seconds: float


class Load(NamedTuple):
    """KV to read from P: into `blocks` of the pool, in their order. Without any, P is told that it may let go."""

    source: RemoteKv
    remote_blocks: Sequence[int]
    blocks: Sequence[int]
    size: int
    request: EngineRequest | None = None
    job: Job | None = None


class Instance:
    """One instance of one model. Not thread-safe; times never go back."""

    def __init__(self, config: EmulatedEngine, port: int, attachment: Attachment, log: StepLog) -> None:
        self.config = config
        self.port = port
        self.attachment = attachment
        self.log = log
        self.plugin = config.plugin or PluginSettings()
        self.latency = config.latency()
        self.tokenizer = Tokenizer(config.served_name)
        self.block_size = config.block_size
        self.pool = BlockPool(
            config.blocks,
            cap=int(self.plugin.cap_share * config.blocks),
            cold_seconds=self.plugin.cold_seconds,
            stale_seconds=self.plugin.stale_seconds,
        )
        self.exports = Exports(config.kv_lease_seconds)
        self.jobs = JobQueue()
        self.step: Step | None = None
        # Counted for /metrics, since the start.
        self.counts: Counter[str] = Counter()
        self._kv_bytes = config.kv_bytes_per_token
        self._engine_id = f"{config.name}-{port}"
        self._paused = False
        self._waiting: list[EngineRequest] = []
        self._running: list[EngineRequest] = []
        self._loading: list[EngineRequest] = []
        self._loads: list[Load] = []
        self._blocked = False
        self.use_controller(self.plugin.controller or DEFAULTS[config.role])

    # What comes in.

    def submit(self, request: EngineRequest, now: float) -> None:
        """Take a request; one that is tagged as a shadow leg is one where the engine has the plugin's powers."""
        request.arrived = now
        tag = shadow_tag(request.xargs) if self.config.plugin is not None else None
        if tag is None or (self._kind is EngineController.EAGER and tag.kind is LegKind.PREFILL):
            request.tag = call_tag(request.xargs)
            request.ttft_slo = request.tag.ttft_slo or self._ttft_slo(request.prompt_tokens)
            bisect.insort(self._waiting, request, key=lambda each: (each.priority, each.arrived))
            return
        target = request.prompt_tokens // self.block_size * self.block_size
        request.cut(target)
        self.jobs.add(Job(request, tag, target, now))
        if len(self.jobs) > MAX_JOBS:
            self._end_job(self._job(request), LegEnd.NO_ROOM)

    def abort(self, request: EngineRequest, now: float) -> None:
        """The client has left: everything the request holds is given back; it hears nothing more."""
        job = self.jobs.get(request.request_id)
        if job is not None:
            self.jobs.remove(request.request_id)
            if not job.loading:
                self._let_go(request.remote)
            request.state = State.ENDED
            return
        before, request.state = request.state, State.ENDED
        if before is State.WAITING:
            self._waiting.remove(request)
            self._let_go(request.remote)
        elif before is State.RUNNING:
            self._running.remove(request)
            self._hold(request)
            self.pool.release(request.blocks, now)
        # What loads keeps its blocks until nothing can be written there any more.

    def read(self, request_id: str, blocks: Sequence[int], now: float) -> list[Content] | None:
        """A reader asks for handed-out blocks, and is done with them all; None when they are not held for it."""
        export = self.exports.get(request_id)
        if export is None or not set(blocks) <= set(export.blocks):
            return None
        contents = [self.pool.content[block] for block in blocks]
        self.pool.release(self.exports.take(request_id), now)
        return contents

    def take_loads(self) -> list[Load]:
        """What is to be read from P; each load ends with `loaded`."""
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, load: Load, contents: Sequence[Content] | None, now: float) -> None:
        """A load has ended; None: it failed, and what it was to bring is computed here."""
        if not load.blocks:
            return
        if contents is None:
            self.counts["failed_transfers"] += 1
        else:
            self.counts["transfers"] += 1
            self.counts["transferred_bytes"] += load.size
            for block, content in zip(load.blocks, contents, strict=True):
                self.pool.content[block] = content
        if load.job is not None:
            self._fetched(load.job, load.blocks, contents is not None, now)
            return
        request = load.request
        assert request is not None
        self._loading.remove(request)
        if contents is not None:
            for place in range(request.prompt_tokens // self.block_size):
                self.pool.publish(request.blocks[place], request.hash_at(place, self.block_size))
            # The last token is computed here in any case: its output is wanted.
            request.cached = request.computed = request.prompt_tokens - 1
        if request.state is State.ENDED:
            self.pool.release(request.blocks, now)
            return
        request.state = State.RUNNING
        self._running.append(request)

    # Iterations.

    def plan(self, now: float) -> Step | None:
        """Begin the next iteration; None when there is nothing to run. `finish` ends it."""
        for directive in self.attachment.directives():
            self.obey(directive)
        self.attachment.mark(now, busy=self.has_normal_work)
        self._expire(now)
        self._settle(now)
        parts = self._parts(now)
        normal = work = _work(parts)
        budget, reason, slices = self._shadow(now, normal, parts)
        for part in slices:
            work = work.with_prefill(part.tokens, part.start)
        self._start_fetch(now)
        self._note_evictions()
        if not work.tokens:
            self.show(now)
            return None
        seconds = self.latency.seconds(work)
        without = self.latency.seconds(normal)
        bound = not slices and self.latency.memory_bound(work)
        stretch = seconds - without if slices and normal.tokens else 0.0
        iteration = Iteration(seconds, stretch, bound, reason if slices else StepReason.NO_WORK)
        limit = min(budget.iteration_seconds, without + budget.stretch_seconds) if slices else 0.0
        self.step = Step(now, seconds, parts, slices, work, iteration, limit)
        if reason is not StepReason.NO_WORK:
            shadow_tokens = work.tokens - normal.tokens
            self.log.add(StepRecord(now, reason, limit, shadow_tokens, normal.tokens, seconds, seconds))
        return self.step

    def finish(self, now: float) -> None:
        """The iteration that was planned has ended."""
        step, self.step = self.step, None
        assert step is not None
        if self.controller is not None:
            self.controller.ran(step.iteration)
        for job, start, tokens, blocks in step.slices:
            self._compute(job.request, blocks, start, start + tokens)
            self.attachment.hold(job.session, blocks)
            self.pool.release(blocks, now)
            if job.request_id in self.jobs:
                job.computed_tokens += tokens
                job.since = now
                self.attachment.progress(job.session, start + tokens)
                if start + tokens >= job.target_tokens:
                    self._end_job(job, LegEnd.DONE)
        for request, tokens in step.parts:
            if request.state is State.RUNNING:
                self._advance(request, tokens, now)
        self._note_evictions()
        self.show(now)

    def next_look(self, now: float) -> float | None:
        """When an engine that runs nothing has something to do by itself; None: never."""
        times = [time for time in (self.exports.next_expiry,) if time is not None]
        if self.jobs.of(LegKind.PREFILL) or self._waiting:
            times.append(now + LOOK_SECONDS)
        elif len(self.jobs):
            times.append(min(job.since for job in self.jobs) + self.plugin.stuck_seconds)
        return min(times, default=None)

    @property
    def has_normal_work(self) -> bool:
        return bool(self._running or self._waiting or self._loading)

    # Normal requests.

    def _parts(self, now: float) -> list[tuple[EngineRequest, int]]:
        """What the next iteration computes of normal requests, admissions included."""
        left = self.config.max_num_batched_tokens
        parts = []
        for request in self._running:
            if left <= 0:
                break
            tokens = min(left, len(request.tokens) - request.computed)
            parts.append((request, tokens))
            left -= tokens
        self._blocked = False
        while self._waiting and left > 0:
            if len(self._running) + len(self._loading) >= self.config.max_num_seqs:
                break
            request = self._waiting[0]
            if not self._admit(request, now):
                self._blocked = True
                break
            del self._waiting[0]
            if request.state is State.RUNNING:
                self._running.append(request)
                tokens = min(left, request.prompt_tokens - request.computed)
                parts.append((request, tokens))
                left -= tokens
        return parts

    def _admit(self, request: EngineRequest, now: float) -> bool:
        """Reserve KV for a request, and start what comes from P; False without room."""
        size = self.block_size
        # The last prompt token is always computed: its output is wanted.
        hits = self.pool.find(request.hashes((request.prompt_tokens - 1) // size, size))
        total = -(-(request.prompt_tokens + request.max_tokens) // size)
        blocks = self.pool.take(hits, total - len(hits), now)
        if blocks is None:
            return False
        request.blocks = blocks
        request.cached = request.computed = len(hits) * size
        self.counts["prefix_queries"] += request.prompt_tokens
        self.counts["prefix_hits"] += request.cached
        request.state = State.RUNNING
        remote = request.remote
        if remote is None:
            return True
        held = -(-request.prompt_tokens // size)
        if remote.tokens < request.prompt_tokens or len(remote.blocks) < held:
            self._let_go(remote)
            return True
        request.state = State.LOADING
        self._loading.append(request)
        self._load(remote, blocks, len(hits), held, request=request)
        return True

    def _load(
        self,
        source: RemoteKv,
        blocks: Sequence[int],
        start: int,
        end: int,
        *,
        request: EngineRequest | None = None,
        job: Job | None = None,
    ) -> None:
        """Have the blocks at places [start, end) of a context read."""
        size = (end - start) * self.block_size * self._kv_bytes
        self._loads.append(Load(source, source.blocks[start:end], blocks[start:end], size, request, job))

    def _let_go(self, remote: RemoteKv | None) -> None:
        """Tell P that nobody will read what it holds."""
        if remote is not None:
            self._loads.append(Load(remote, (), (), 0))

    def _advance(self, request: EngineRequest, tokens: int, now: float) -> None:
        """So many more tokens of a request are computed; with the last known one comes the next."""
        self._compute(request, request.blocks, request.computed, request.computed + tokens)
        self.counts["prompt_tokens"] += tokens if request.computed < request.prompt_tokens else 0
        request.computed += tokens
        if request.computed < len(request.tokens):
            return
        token = self._next_token(request)
        request.tokens.append(token)
        self.counts["generated_tokens"] += 1
        if request.first_token_at is None:
            request.first_token_at = now
        request.on_token(token)
        if request.output_tokens >= request.max_tokens:
            self._end(request, now)

    def _compute(self, request: EngineRequest, blocks: Sequence[int], start: int, end: int) -> None:
        """Tokens [start, end) of a context are computed into its blocks; those that are whole can be found now."""
        size, content = self.block_size, self.pool.content
        for place in range(start // size, end // size):
            block = blocks[place]
            if content[block] == NOTHING:
                before = content[blocks[place - 1]] if place else NOTHING
                content[block] = content_of(before, request.tokens[place * size : (place + 1) * size].tobytes())
            self.pool.publish(block, request.hash_at(place, size))

    def _next_token(self, request: EngineRequest) -> int:
        """A function of the model and of the KV that the request really has."""
        whole = request.computed // self.block_size
        before = self.pool.content[request.blocks[whole - 1]] if whole else NOTHING
        tail = request.tokens[whole * self.block_size :].tobytes()
        name = hashlib.blake2b(self.config.served_name.encode(), digest_size=16).digest()
        digest = hashlib.blake2b(before + tail, digest_size=8, key=name).digest()
        return self.tokenizer.word(int.from_bytes(digest, "big"))

    def _end(self, request: EngineRequest, now: float) -> None:
        request.state = State.ENDED
        self._running.remove(request)
        self._hold(request)
        params = None
        if request.exports:
            held = -(-request.computed // self.block_size)
            params = self._export(request, request.blocks[:held], request.computed, now, shadow=False)
            self.pool.release(request.blocks[held:], now)
        else:
            self.pool.release(request.blocks, now)
        request.on_end(End(request.finish_reason, params))

    def _hold(self, request: EngineRequest) -> None:
        self.attachment.hold(request.tag.session, request.blocks[: request.computed // self.block_size])

    def _export(
        self, request: EngineRequest, blocks: list[int], tokens: int, now: float, *, shadow: bool
    ) -> dict[str, Any]:
        """Keep held blocks for a reader."""
        self.exports.hold(request.request_id, blocks, now, shadow=shadow)
        kv = RemoteKv(self.config.host, self.port, request.request_id, tuple(blocks), tokens)
        return handoff.export_params(self._engine_id, kv)

    def _expire(self, now: float) -> None:
        for blocks in self.exports.take_expired(now):
            self.pool.release(blocks, now)

    # Shadow legs.

    def _shadow(
        self, now: float, work: StepWork, parts: Sequence[tuple[EngineRequest, int]]
    ) -> tuple[Budget, StepReason, list[Slice]]:
        """What the next iteration carries of prefill legs."""
        jobs = self.jobs.of(LegKind.PREFILL)
        if not jobs or self.controller is None:
            return _NO_WORK, StepReason.NO_WORK, []
        if self.attachment.neighbours_busy(now):
            return _NO_WORK, StepReason.HARDWARE_BUSY, []
        budget = self.controller.budget(self._batch(now))
        base = self.latency.seconds(work)
        allowed = Budget.iteration(min(budget.iteration_seconds, base + budget.stretch_seconds), budget.reason)
        if not allowed.iteration_seconds:
            return budget, budget.reason, []
        most = self.config.max_num_batched_tokens - work.tokens
        minimum = max(self.block_size, self.plugin.minimum_tokens if parts else self.plugin.idle_minimum_tokens)
        reason = budget.reason
        slices: list[Slice] = []
        for job in jobs:
            hits = self._cached(job)
            start = len(hits) * self.block_size
            if start >= job.target_tokens:
                self._end_job(job, LegEnd.DONE)
                continue
            lacking = self._whole(min(job.target_tokens - start, most))
            if not lacking:
                break
            room = self.pool.shadow_room(hits, now, lacking // self.block_size) * self.block_size
            granted = grant(
                allowed,
                lambda n, work=work, start=start: self.latency.seconds(work.with_prefill(n, start)),  # type: ignore[misc]
                wanted=lacking,
                room=room,
                minimum=min(minimum, lacking),
            )
            tokens = self._whole(granted.tokens)
            blocks = self.pool.take_for_shadow(hits, tokens // self.block_size, now) if tokens else None
            if blocks is None:
                if granted.reason is StepReason.NO_ROOM:
                    self._end_job(job, LegEnd.NO_ROOM)
                elif granted.reason is StepReason.BELOW_MINIMUM and not parts and not slices:
                    self._end_job(job, LegEnd.BELOW_MINIMUM)
                reason = reason if slices else granted.reason
                break
            slices.append(Slice(job, start, tokens, blocks))
            work = work.with_prefill(tokens, start)
            most -= tokens
            if tokens < lacking or len(slices) == JOBS_PER_STEP:
                break
        return budget, reason, slices

    def _settle(self, now: float) -> None:
        """End legs that need no iteration or get none."""
        for job in self.jobs:
            if now - job.since > self.plugin.stuck_seconds:
                self._end_job(job, LegEnd.STALLED)
            elif job.loading:
                continue
            elif job.kind is LegKind.EXPORT:
                self._export_leg(job, now)
            elif job.kind is LegKind.PREFILL and (self.controller is None or self._paused):
                self._end_job(job, LegEnd.PAUSED)

    def _export_leg(self, job: Job, now: float) -> None:
        """Hand out a cached prefix."""
        blocks = self._cached(job)
        if not job.request.exports:
            self._end_job(job, LegEnd.NOT_TRANSFERABLE)
        elif not blocks or len(blocks) * self.block_size < job.target_tokens:
            self._end_job(job, LegEnd.NOT_CACHED)
        elif self.exports.shadow_blocks + len(blocks) > self.plugin.pinned_share * self.pool.size:
            self._end_job(job, LegEnd.NO_ROOM)
        else:
            self.pool.hold(blocks)
            params = self._export(job.request, blocks, job.target_tokens, now, shadow=True)
            self._end_job(job, LegEnd.DONE, params)

    def _start_fetch(self, now: float) -> None:
        """One fetch at a time, while nothing normal waits or is on the inbound link."""
        if self._waiting or self._loading or any(job.loading for job in self.jobs):
            return
        for job in self.jobs.of(LegKind.FETCH):
            remote: RemoteKv | None = job.request.remote
            places = job.target_tokens // self.block_size
            if remote is None or remote.tokens < job.target_tokens or len(remote.blocks) < places:
                self._refuse_fetch(job, LegEnd.NOT_TRANSFERABLE)
                continue
            hits = self._cached(job)
            if len(hits) == places:
                self._refuse_fetch(job, LegEnd.DONE)
                continue
            blocks = self.pool.take_for_shadow(hits, places - len(hits), now)
            if blocks is None:
                self._refuse_fetch(job, LegEnd.NO_ROOM)
                continue
            job.loading, job.since = True, now
            job.request.blocks = blocks
            self._load(remote, blocks, len(hits), places, job=job)
            return

    def _refuse_fetch(self, job: Job, end: LegEnd) -> None:
        self._let_go(job.request.remote)
        self._end_job(job, end)

    def _fetched(self, job: Job, loaded: Sequence[int], arrived: bool, now: float) -> None:
        request: EngineRequest = job.request
        if arrived:
            for place, block in enumerate(request.blocks):
                self.pool.publish(block, request.hash_at(place, self.block_size))
            self.attachment.hold(job.session, request.blocks)
        self.pool.release(request.blocks, now)
        job.loading = False
        if job.request_id in self.jobs:
            if arrived:
                self.attachment.progress(job.session, job.target_tokens)
            self._end_job(job, LegEnd.DONE if arrived else LegEnd.TRANSFER_FAILED)

    def _end_job(self, job: Job, end: LegEnd, params: dict[str, Any] | None = None) -> None:
        """Answer a leg with the tokens it covers."""
        self.jobs.remove(job.request_id)
        self.log.legs[job.kind, end] += 1
        covered = len(self._cached(job)) * self.block_size
        result = {"covered_tokens": covered, "computed_tokens": job.computed_tokens, "end": end.value}
        job.request.cached = max(0, covered - job.computed_tokens)
        job.request.state = State.ENDED
        job.request.on_end(End("stop", {**(params or {}), RESULT: result}))

    def _job(self, request: EngineRequest) -> Job:
        job = self.jobs.get(request.request_id)
        assert job is not None
        return job

    def _cached(self, job: Job) -> list[int]:
        """The cached blocks of a leg's prefix."""
        return self.pool.find(job.request.hashes(job.target_tokens // self.block_size, self.block_size))

    def _whole(self, tokens: int) -> int:
        return tokens // self.block_size * self.block_size

    # Run-time control, and what is shown outside.

    def use_controller(self, kind: EngineController) -> None:
        """Decide iterations by another controller from the next one on."""
        self._kind = kind
        self.controller = iteration_controller(kind, self.plugin)

    def obey(self, directive: Directive) -> None:
        """Do what the controller wants."""
        match directive:
            case PauseShadow():
                self._paused = True
            case ResumeShadow():
                self._paused = False
            case DropSession(session):
                for job in self.jobs:
                    if job.session == session and not job.loading:
                        self._let_go(job.request.remote)
                        self._end_job(job, LegEnd.PAUSED)
                self.pool.cache.expire(self.attachment.held(session))
            case SetLimits():
                self.plugin = self.plugin.model_copy(update=directive.model_dump(exclude_none=True))
                self.pool.set_cap(int(self.plugin.cap_share * self.pool.size))
                self.pool.cache.stale_seconds = self.plugin.stale_seconds
                self.use_controller(directive.controller or self._kind)

    def _note_evictions(self) -> None:
        evicted = self.pool.drain_evicted()
        if evicted:
            self.log.evicted_blocks += len(evicted)
            self.attachment.evicted(evicted)

    def show(self, now: float) -> None:
        """Tell the controller and the neighbours where the engine stands."""
        if not self.has_normal_work:
            self.attachment.mark(now, busy=False)
        self.attachment.publish(now, lambda: self.snapshot(now), last=not self.has_normal_work and not len(self.jobs))

    def snapshot(self, now: float) -> EngineSnapshot:
        """The engine as load reports and /metrics show it."""
        cache, log = self.pool.cache, self.log
        credit = getattr(self.controller, "credit", None)
        ahead = 0.0 if self.has_normal_work else self.plugin.cold_seconds + COLD_MARGIN_SECONDS
        requests = self._batch(now).requests
        return EngineSnapshot(
            waiting=len(self._waiting) + len(self._loading),
            running=len(self._running),
            kv_usage=self.pool.used / self.pool.size,
            shadow_blocks=cache.size,
            shadow_cap_blocks=cache.cap,
            shadow_pinned_blocks=self.exports.shadow_blocks,
            shadow_room_tokens=cache.room(now + ahead, most=cache.cap) * self.block_size,
            shadow_jobs=len(self.jobs),
            slack_seconds=min((slack(now, request, self.plugin.margin) for request in requests), default=math.inf),
            credit_seconds=credit.seconds if credit is not None else 0.0,
            link_busy=bool(self._loading),
            step_reason=log.last.reason if log.last is not None else StepReason.NO_WORK,
            shadow_tokens=log.shadow_tokens,
            steps_over_budget=log.over_budget_steps,
            evicted_blocks=log.evicted_blocks,
        )

    # Estimates.

    def _batch(self, now: float) -> Batch:
        tpot_slo = self._tpot_slo()
        requests = []
        for request in self._running:
            left = request.prompt_tokens - request.computed
            requests.append(
                RunningRequest(
                    request.arrived,
                    request.first_token_at,
                    max(0, request.output_tokens - 1),
                    request.ttft_slo,
                    request.tag.tpot_slo or tpot_slo,
                    self._prefill_seconds(left, request.computed) if left > 0 else 0.0,
                    request.tag.routed,
                )
            )
        return Batch(now, bool(self._waiting or self._loading) or self._blocked, tpot_slo, requests)

    def _tpot_slo(self) -> float:
        slo = self.plugin.slo
        return max(slo.tpot_floor_seconds, slo.multiple * self.latency.decode_seconds(self.block_size))

    def _ttft_slo(self, prompt_tokens: int) -> float:
        slo = self.plugin.slo
        return max(slo.ttft_floor_seconds, slo.multiple * self._prefill_seconds(prompt_tokens, 0))

    def _prefill_seconds(self, tokens: int, cached: int) -> float:
        """Time to prefill so many tokens behind cached ones, alone."""
        seconds = 0.0
        while tokens > 0:
            new = min(tokens, self.config.max_num_batched_tokens)
            seconds += self.latency.seconds(StepWork().with_prefill(new, cached))
            tokens, cached = tokens - new, cached + new
        return seconds


def _work(parts: Sequence[tuple[EngineRequest, int]]) -> StepWork:
    """What an iteration computes for normal requests."""
    work = StepWork()
    for request, tokens in parts:
        if request.computed < request.prompt_tokens:
            work = work.with_prefill(tokens, request.computed)
        else:
            work = work.with_decode(request.computed)
    return work
