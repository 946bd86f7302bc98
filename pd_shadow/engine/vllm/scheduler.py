"""vLLM's scheduler with shadow work in what its iterations leave unused.

Every step, before vLLM schedules: shadow requests are out of its queues; if the policy grants tokens, the first jobs
are put in last place and the step's token limit is set so that they get exactly these. After it they are taken out
again. vLLM's own code admits them, allocates for them and runs them; it never sees one where something normal waits.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from pd_shadow.common.config import ConfigError
from pd_shadow.engine import settings
from pd_shadow.engine.attachment import Attachment
from pd_shadow.engine.controllers import DEFAULTS, iteration_controller
from pd_shadow.engine.directives import Directive, DropSession, PauseShadow, ResumeShadow, SetLimits
from pd_shadow.engine.jobs import Job, JobQueue, LegEnd
from pd_shadow.engine.settings import PluginSettings, Role
from pd_shadow.engine.snapshot import EngineFacts, EngineSnapshot
from pd_shadow.engine.steps import StepLog, StepRecord
from pd_shadow.engine.tags import RESULT, CallTag, LegKind, call_tag, shadow_tag
from pd_shadow.engine.vllm import compat, shadow_blocks
from pd_shadow.perf.online import OnlineLatency, StepWork
from pd_shadow.policy.approach import EngineController
from pd_shadow.policy.base import Batch, Budget, Iteration, IterationController, RunningRequest, StepReason
from pd_shadow.policy.slack import Grant, grant, slack

# Jobs that share one step: the first, and one more for what the first leaves of the grant.
JOBS_PER_STEP = 2
# A step may carry this many times the longest chunk timed so far: the latency model is not asked about the unknown.
GROWTH = 2
PROBE_SECONDS = 1.0
# Iterations of busy engines come every few milliseconds, and most of those that carry a routed call have no credit to
# spend: the jobs themselves are looked at no more often than this where it is plain that nothing fits.
LOOK_SECONDS = 0.05
# What was used so much longer ago than the cold age is cold for certain.
COLD_MARGIN_SECONDS = 0.001
# A controller keeps a few legs on an engine; whoever sends so many more gets them back.
MAX_JOBS = 1024
# Pause of an engine that has nothing to do but shadow work and lets its neighbours on the hardware go first.
YIELD_SECONDS = 0.003
CALL = "pd_shadow_call"
# Where vLLM must preempt a request for a joined shadow, it is a shadow.
LAST = sys.maxsize
# Without one of these NIXL takes a fetch for granted and never hears of it again.
REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")


class Call:
    """What the policy needs to know of a normal request; hangs on vLLM's request object and goes with it."""

    __slots__ = ("arrived", "first_token_at", "tag", "ttft_slo")

    def __init__(self, tag: CallTag, arrived: float, ttft_slo: float) -> None:
        self.tag = tag
        self.arrived = arrived
        self.ttft_slo = ttft_slo
        self.first_token_at: float | None = None


class Part(NamedTuple):
    """A prefill job before a step: tokens it has, blocks it holds, free cached ones it would take up, what it lacks."""

    job: Job
    start: int
    held: int
    hits: Sequence[Any]
    lacking: int


class Slice(NamedTuple):
    """A job's share of a step. `life` tells whether the job still held its blocks when the step ended."""

    job: Job
    start: int
    tokens: int
    life: int


class Plan(NamedTuple):
    """Shadow work of a step: what it may cost, what was granted of it, and to whom; `normal` tokens go before it."""

    budget: Budget
    granted: Grant
    slices: Sequence[Slice] = ()
    normal: int = 0


class Step(NamedTuple):
    """A scheduled step until its output is there. Times are monotonic seconds."""

    output: Any
    at: float
    work: StepWork
    normal_work: StepWork
    budget: Budget
    reason: StepReason | None
    slices: Sequence[Slice]

    @property
    def shadow_tokens(self) -> int:
        return sum(part.tokens for part in self.slices)


class Answer(NamedTuple):
    """The answer to a leg that has ended; sent once the step whose output is `after` has ended."""

    client_index: int
    output: Any
    after: Any


class ShadowScheduler(Scheduler):  # type: ignore[misc]
    """For `--scheduler-cls`. Raises IncompatibleVllmError or ConfigError at start where it cannot keep its promises."""

    # vLLM's own.
    max_num_scheduled_tokens: int
    num_lookahead_tokens: int
    block_size: int
    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plugin: PluginSettings = settings.from_additional_config(self.vllm_config.additional_config)
        self._check()
        self.role = self.plugin.role or _role_of(self.vllm_config.kv_transfer_config)
        self.jobs = JobQueue()
        self.latency = OnlineLatency()
        self.log = StepLog(self.plugin.trace_file)
        pool = self.kv_cache_manager.block_pool
        self._pool_blocks = len(pool.blocks) - 1
        self.free_queue = shadow_blocks.install(
            pool, self._cap_blocks, self.plugin.cold_seconds, time.monotonic, self.plugin.stale_seconds
        )
        self._groups = len(self.kv_cache_config.kv_cache_groups)
        self._stock_allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        self.use_controller(self.plugin.controller or DEFAULTS[self.role])
        self._steps: deque[Step] = deque()
        self._last_end = 0.0
        self._longest_chunk = self.plugin.minimum_tokens
        self._probed = -PROBE_SECONDS
        # Whether the last probe took longer than its budget.
        self._overran = False
        self._looked = -LOOK_SECONDS
        # When last something ran, waited or was loaded.
        self._moved = time.monotonic()
        # Jobs in vLLM's queues, during one step.
        self._joined: list[Job] = []
        self._answers: list[Answer] = []
        self._pinned: dict[str, int] = {}
        self._paused = False
        self.attachment = Attachment(self.plugin, self._facts(), self.log)
        # Nothing is stepped until a request comes, and the controller sends no shadow work where there is no room.
        self._show(time.monotonic())

    # Run-time control.

    @property
    def _cap_blocks(self) -> int:
        return int(self.plugin.cap_share * self._pool_blocks)

    @property
    def controller_kind(self) -> EngineController:
        return self._kind

    def use_controller(self, kind: EngineController) -> None:
        """Decide iterations by another controller from the next step on."""
        self._kind = kind
        self.controller: IterationController | None = iteration_controller(kind, self.plugin)

    def _obey(self, directive: Directive) -> None:
        """Do what the controller wants."""
        match directive:
            case PauseShadow():
                self._paused = True
            case ResumeShadow():
                self._paused = False
            case DropSession(session):
                for job in self.jobs:
                    if job.session == session:
                        self._end(job, LegEnd.PAUSED)
                self.free_queue.cache.expire(self.attachment.held(session))
            case SetLimits():
                given = directive.model_dump(exclude_none=True)
                self.plugin = self.plugin.model_copy(update=given)
                self.free_queue.cache.set_cap(self._cap_blocks)
                self.free_queue.cache.stale_seconds = self.plugin.stale_seconds
                self.use_controller(directive.controller or self._kind)

    # vLLM's scheduler interface.

    def add_request(self, request: Any) -> None:
        xargs = request.sampling_params.extra_args if request.sampling_params is not None else None
        tag = shadow_tag(xargs)
        if tag is None or (self._kind is EngineController.EAGER and tag.kind is LegKind.PREFILL):
            tagged = call_tag(xargs)
            arrived = time.monotonic() - max(0.0, time.time() - request.arrival_time)
            setattr(request, CALL, Call(tagged, arrived, tagged.ttft_slo or self._ttft_slo(request.num_prompt_tokens)))
            super().add_request(request)
            return
        # vLLM knows the request until it has ended, but has it in its queues only while it runs or is admitted.
        self.requests[request.request_id] = request
        request.priority = LAST
        if self.connector is not None:
            self.connector.on_new_request(request)
        job = Job(request, tag, self._cut(request), time.monotonic())
        self.jobs.add(job)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        if len(self.jobs) > MAX_JOBS:
            self._end(job, LegEnd.NO_ROOM)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        finished: list[Any] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.jobs.remove(request.request_id)
        return finished

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now = time.monotonic()
        for directive in self.attachment.directives():
            self._obey(directive)
        self.attachment.mark(now, busy=self._has_normal_work())
        self._settle(now)
        self._make_way()
        plan = self._plan(now, throttle_prefills)
        limit = self.max_num_scheduled_tokens
        if plan.slices:
            # vLLM serves the running requests in order, so that what is left for the last ones is exact.
            self.max_num_scheduled_tokens = min(limit, plan.normal + sum(part.tokens for part in plan.slices))
        self._join(plan.slices)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = limit
            self._part(now)
        self._note_step(output, now, plan)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        if model_runner_output.kv_connector_output is not None:
            self._note_failed_loads(model_runner_output.kv_connector_output)
        self._end_step(scheduler_output, time.monotonic())
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        self._end_loads()
        in_flight = [step.output for step in self._steps]
        answers, self._answers = self._answers, []
        for answer in answers:
            if any(answer.after is output for output in in_flight):
                self._answers.append(answer)
            else:
                outputs.setdefault(answer.client_index, EngineCoreOutputs()).outputs.append(answer.output)
        self._show(time.monotonic())
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        call, job = getattr(request, CALL, None), self.jobs.get(request.request_id)
        session = job.session if job is not None else call.tag.session if call is not None else ""
        if session:
            whole = request.num_computed_tokens // self.block_size
            self.attachment.hold(session, self.kv_cache_manager.get_block_ids(request.request_id)[0][:whole])
        return super()._free_request(request, *args, **kwargs)

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        call = getattr(request, CALL, None)
        if call is not None and call.first_token_at is None:
            call.first_token_at = time.monotonic()
        return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)

    def get_request_counts(self) -> tuple[int, int]:
        """Normal requests: one that has the engine to itself keeps it, whatever joins it for a step."""
        running, waiting = super().get_request_counts()
        joined = sum(job.request.status == RequestStatus.RUNNING for job in self._joined)
        return running - joined, waiting - (len(self._joined) - joined)

    def get_num_unfinished_requests(self) -> int:
        unfinished: int = super().get_num_unfinished_requests()
        match self._pause_state:
            case PauseState.UNPAUSED:
                return unfinished + len(self.jobs) + len(self._answers)
            case PauseState.PAUSED_NEW:
                # Only what is on its way still ends.
                return unfinished + sum(job.loading for job in self.jobs) + len(self._answers)
        return unfinished

    def has_finished_requests(self) -> bool:
        if self.finished_req_ids or self.connector is None:
            return bool(self.finished_req_ids)
        # vLLM takes what it knows and has in no queue for finished; jobs are not.
        return len(self.requests) - len(self.jobs) > sum(self.get_request_counts())

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        self._moved = time.monotonic()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        for job in self.jobs:
            if not job.loading:
                self._end(job, LegEnd.PAUSED)
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        if done:
            self.free_queue.forget()
            self.attachment.cache_reset()
        return done

    def shutdown(self) -> None:
        self.attachment.close()
        self.log.close()
        super().shutdown()

    # Planning.

    def _plan(self, now: float, throttled: bool) -> Plan:
        """What the next step carries of prefill jobs."""
        if self.controller is None or not self.jobs.of(LegKind.PREFILL):
            return _nothing(StepReason.NO_WORK)
        if self._pause_state != PauseState.UNPAUSED or throttled:
            return _nothing(StepReason.PAUSED)
        batch = self._batch(now)
        if self.attachment.neighbours_busy(now):
            if not batch.requests and not batch.waiting:
                time.sleep(YIELD_SECONDS)
            return _nothing(StepReason.HARDWARE_BUSY)
        in_flight = any(step.slices for step in self._steps)
        if in_flight and not batch.requests:
            # One step ahead: an arrival waits for one shadow iteration, never for two.
            return _nothing(StepReason.IN_FLIGHT)
        budget = self.controller.budget(batch)
        # What steps in flight are stretched by is spent, too, and not booked yet.
        ahead = sum(self.latency.seconds(step.work) - self.latency.seconds(step.normal_work) for step in self._steps)
        budget = budget._replace(stretch_seconds=budget.stretch_seconds - ahead)
        work = _work((request, request.num_computed_tokens, tokens) for request, tokens in self._normal_tokens())
        normal = work.prefill_tokens + work.decodes
        soon = now - self._looked < LOOK_SECONDS
        if batch.requests and soon and (not self.latency.warm or self._hopeless(budget, work)):
            return Plan(budget, _too_little(budget))
        self._looked = now
        parts = self._next_parts()
        if not parts:
            return _nothing(StepReason.NO_WORK)
        room = self._room_tokens(parts)
        lacking = sum(part.lacking for part in parts)
        most = min(lacking, GROWTH * self._longest_chunk, self.max_num_scheduled_tokens - normal)

        def work_with(tokens: int) -> StepWork:
            whole = work
            for part in parts:
                whole = whole.with_prefill(min(tokens, part.lacking), part.start)
                tokens -= min(tokens, part.lacking)
            return whole

        first = parts[0]
        minimum = self.plugin.minimum_tokens if batch.requests else self.plugin.idle_minimum_tokens
        if self.latency.warm:
            granted = grant(
                budget, lambda n: self.latency.seconds(work_with(n)), wanted=max(0, most), room=room,
                minimum=min(minimum, first.lacking),
            )  # fmt: skip
        else:
            granted = _too_little(budget)
        if granted.reason is StepReason.BELOW_MINIMUM and not batch.waiting:
            if not batch.requests:
                granted = self._probe(now, first, room)
            elif budget.reason is StepReason.SLACK and not self.latency.warm and now - self._probed >= PROBE_SECONDS:
                # An engine that decodes from its first request on must learn what a chunk costs, too.
                granted = self._probe(now, first, room, self.plugin.idle_minimum_tokens)
        if granted.reason is StepReason.NO_ROOM:
            self._end(first.job, LegEnd.NO_ROOM)
            return Plan(budget, granted)
        slices = []
        left = granted.tokens
        for part in parts:
            if left > 0:
                tokens = min(left, part.lacking)
                slices.append(Slice(part.job, part.start, tokens, part.job.request.num_preemptions))
                left -= tokens
        return Plan(budget, granted, slices, normal)

    def _hopeless(self, budget: Budget, work: StepWork) -> bool:
        """Whether not even the cheapest chunk fits, the smallest one of a context's beginning."""
        limit = min(budget.iteration_seconds, self.latency.seconds(work) + budget.stretch_seconds)
        return self.latency.seconds(work.with_prefill(self.plugin.minimum_tokens, 0)) > limit

    def _probe(self, now: float, first: Part, room: int, tokens: int | None = None) -> Grant:
        """The smallest chunk: the model learns from it, however wrong it was before."""
        least = self.plugin.idle_minimum_tokens if self.latency.warm else self.plugin.minimum_tokens
        least = min(least if tokens is None else tokens, first.lacking)
        if room < least:
            return Grant(0, StepReason.NO_ROOM)
        # What a probe really took decides, not what the model says: one that was taught by slow first steps must not
        # starve the engine, and every probe within its budget makes it better.
        if self._overran and now - self._probed < PROBE_SECONDS:
            self._end(first.job, LegEnd.BELOW_MINIMUM)
            return Grant(0, StepReason.BELOW_MINIMUM)
        self._probed = now
        return Grant(least, StepReason.PROBE)

    def _batch(self, now: float) -> Batch:
        waiting = bool(self.waiting) or bool(self.kv_holding_waiting)
        # What is still running ends before anything planned now begins.
        now += sum(max(0.0, self.latency.seconds(step.work) - (now - step.at)) for step in self._steps)
        tpot_slo = self._tpot_slo()
        requests = []
        for request in self.running:
            call = getattr(request, CALL)
            left = request.num_prompt_tokens - request.num_computed_tokens
            requests.append(
                RunningRequest(
                    call.arrived,
                    call.first_token_at,
                    max(0, request.num_output_tokens + request.num_output_placeholders - 1),
                    call.ttft_slo,
                    call.tag.tpot_slo or tpot_slo,
                    self._prefill_seconds(left, request.num_computed_tokens) if left > 0 else 0.0,
                    call.tag.routed,
                )
            )
        return Batch(now, waiting, tpot_slo, requests)

    def _next_parts(self) -> list[Part]:
        """The first jobs that lack tokens. Those that lack none end on the way, less likely ones let go of blocks."""
        parts: list[Part] = []
        longest = self._longest_part()
        for job in self.jobs.of(LegKind.PREFILL):
            requests = [*self.running, *(part.job.request for part in parts), job.request]
            # As vLLM does, no request comes back in the step that preempts it: connectors are told of both at once, and
            # take a load that begins for one of the old life.
            if job.loading or job.request_id in self.reset_preempted_req_ids or not self._adapters_fit(requests):
                continue
            hits: list[Any] = []
            if _holds_blocks(job):
                start = job.request.num_computed_tokens
                held = len(self.kv_cache_manager.coordinator.get_blocks(job.request_id)[0])
            else:
                groups, start = self._cached(job)
                held = len(groups[0])
                hits = _free(groups)
            if start < job.target_tokens:
                if not parts:
                    self._release_for(job)
                parts.append(Part(job, start, held, hits, min(job.target_tokens - start, longest)))
            elif not _holds_blocks(job):
                self._end(job, LegEnd.DONE)
            if len(parts) == JOBS_PER_STEP:
                break
        return parts

    def _room_tokens(self, parts: Sequence[Part]) -> int:
        """Tokens of shadow KV for the jobs of a step, in order; earlier ones may evict for it what later ones hit."""
        hits: dict[int, Any] = {}
        tokens = used = 0
        for part in parts:
            hits.update((block.block_id, block) for block in part.hits)
            ready = part.held * self.block_size - part.start - self.num_lookahead_tokens
            needed = max(0, -(-(part.lacking - ready) // self.block_size))
            # Counted no further than needed: in a large pool gone cold, counting all of it takes milliseconds.
            room = self.free_queue.room(list(hits.values()), most=(used + needed) * self._groups)
            blocks = room // self._groups - used
            if blocks < needed:
                return tokens + max(0, ready + max(0, blocks) * self.block_size)
            used += needed
            tokens += part.lacking
        return tokens

    def _longest_part(self) -> int:
        """The most tokens that vLLM gives one request in a step."""
        config = self.scheduler_config
        longest: int = config.long_prefill_token_threshold
        if not longest or len(self.running) < 2:
            return self.max_num_scheduled_tokens
        if config.long_prefill_token_threshold_adaptive:
            longest = max(longest, config.max_num_batched_tokens // len(self.running))
        return min(longest, self.max_num_scheduled_tokens)

    def _normal_tokens(self) -> Iterator[tuple[Any, int]]:
        """The tokens vLLM will schedule for each request that runs, as it counts them itself."""
        left, longest = self.max_num_scheduled_tokens, self._longest_part()
        for request in self.running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                # Its last token is in flight.
                continue
            tokens = min(left, longest, request.num_tokens_with_spec + ahead - computed)
            left -= tokens
            yield request, tokens

    def _adapters_fit(self, requests: Iterable[Any]) -> bool:
        """Whether one step can hold the LoRA adapters of all; vLLM looks only when it admits a request."""
        if self.lora_config is None:
            return True
        adapters = {request.lora_request.lora_int_id for request in requests if request.lora_request}
        return bool(len(adapters) <= self.lora_config.max_loras)

    # Joining vLLM's queues for one step.

    def _join(self, slices: Sequence[Slice]) -> None:
        self._joined = [part.job for part in slices]
        for job in self._joined:
            if _holds_blocks(job):
                self.running.append(job.request)
            else:
                self.waiting.add_request(job.request)
        fetch = self._next_fetch()
        if fetch is not None:
            self.waiting.add_request(fetch.request)
            self._joined.append(fetch)

    def _part(self, now: float) -> None:
        joined, self._joined = self._joined, []
        for job in joined:
            request = job.request
            # What a parked job still lacks is nothing that loads of normal requests leave room for.
            self._inflight_prefills.discard(request)
            if request in self.running:
                self.running.remove(request)
                continue
            self.waiting.remove_requests([request])
            self.kv_holding_waiting.remove_requests([request])
            self.deferred_waiting.discard(request)
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                job.loading, job.since = True, now
            else:
                self._set_kv_fetch_stage(request, None)
                if job.refused is not None:
                    self._end(job, job.refused)

    def _make_way(self) -> None:
        """A parked request keeps its place in the model runner: normal ones that may be admitted come first."""
        places = self.max_num_running_reqs - len(self.running) - len(self.waiting) - len(self.kv_holding_waiting)
        for job in self._holders()[max(0, places) :]:
            self._release(job)

    def _holders(self) -> list[Job]:
        return [job for job in self.jobs.of(LegKind.PREFILL) if _holds_blocks(job)]

    def _release_for(self, first: Job) -> None:
        """A likelier job is there: those that hold blocks let go of them, and give way to it within the class."""
        for job in self._holders():
            if job is not first and job.probability < first.probability:
                blocks = [block for group in self.kv_cache_manager.get_blocks(job.request_id).blocks for block in group]
                self._release(job)
                self.free_queue.expire(blocks)

    def _release(self, job: Job) -> None:
        """Give a job's blocks back at once; it goes on later from what is still cached."""
        request = job.request
        if job in self._joined:
            self._joined.remove(job)
            self.running.remove(request)
        # vLLM puts a preempted request where it would be taken for a normal one that waits.
        waiting, self.waiting = self.waiting, create_request_queue(self.policy)
        # What is in flight for it is of no use, and vLLM would not admit it again before it is back.
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.waiting = waiting
        self.log.released_jobs += 1

    def _allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """In place of the cache manager's: shadow work takes from its class, and gives back what normal work lacks."""
        found = kwargs.get("new_computed_blocks")
        hits = found.blocks if found is not None else ()
        job = self.jobs.get(request.request_id)
        if job is not None:
            return self._allocate_for_shadow(job, num_new_tokens, hits, *args, **kwargs)
        blocks = self._stock_allocate_slots(request, num_new_tokens, *args, **kwargs)
        while blocks is None and self._give_back():
            blocks = self._stock_allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is not None:
            self.free_queue.promote(block for group in hits for block in group)
        return blocks

    def _allocate_for_shadow(
        self, job: Job, num_new_tokens: int, hits: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        if job.kind is LegKind.FETCH and num_new_tokens:
            # Its connector has nothing for it, and a fetch computes nothing.
            job.refused = LegEnd.NOT_TRANSFERABLE
            return None
        kwargs["full_sequence_must_fit"] = False
        with self.free_queue.for_shadow(_free(hits)):
            blocks = self._stock_allocate_slots(job.request, num_new_tokens, *args, **kwargs)
        if blocks is None and kwargs.get("num_external_computed_tokens"):
            # A connector loads all it has or nothing: there is no smaller chunk to try next.
            job.refused = LegEnd.NO_ROOM
        return blocks

    def _give_back(self) -> bool:
        """Release the least likely job that holds blocks; False when none does."""
        holders = self._holders()
        if holders:
            self._release(holders[-1])
        return bool(holders)

    # Legs that need no forward pass.

    def _settle(self, now: float) -> None:
        """End jobs that need no forward pass or get none."""
        for job in self.jobs:
            if now - (job.since if job.loading else max(job.since, self._moved)) > self.plugin.stuck_seconds:
                self._end(job, LegEnd.STALLED)
            elif job.loading or self._pause_state != PauseState.UNPAUSED:
                continue
            elif job.kind is LegKind.EXPORT:
                self._export(job)
            elif job.kind is LegKind.FETCH and not self._can_fetch(job):
                self._end(job, LegEnd.NOT_TRANSFERABLE)
            elif job.kind is LegKind.PREFILL and (self.controller is None or self._paused):
                self._end(job, LegEnd.PAUSED)

    def _export(self, job: Job) -> None:
        """Hand out a cached prefix: no forward pass, its blocks pinned until D has read them or the lease ends."""
        self._pinned = {id_: blocks for id_, blocks in self._pinned.items() if id_ in self.requests}
        request = job.request
        hits, tokens = self._cached(job)
        if not self._can_export or not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return self._end(job, LegEnd.NOT_TRANSFERABLE)
        if tokens < job.target_tokens or not tokens:
            return self._end(job, LegEnd.NOT_CACHED)
        count = sum(len(group) for group in hits)
        if sum(self._pinned.values()) + count > self.plugin.pinned_share * self._pool_blocks:
            return self._end(job, LegEnd.NO_ROOM)
        self._stock_allocate_slots(
            request, 0, num_new_computed_tokens=tokens, has_scheduled_reqs=False,
            new_computed_blocks=self.kv_cache_manager.create_kv_cache_blocks(hits),
        )  # fmt: skip
        self.connector.update_state_after_alloc(request, self.kv_cache_manager.get_blocks(job.request_id), 0)
        request.num_computed_tokens = tokens
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        params, _ = self._free_request(request)
        self._pinned[job.request_id] = count
        self.jobs.remove(job.request_id)
        # Blocks count as cached once a step is to compute them; nobody may read them before it has.
        after = self._steps[-1].output if self._steps else None
        self._answer(job, LegEnd.DONE if params else LegEnd.NOT_TRANSFERABLE, tokens, params, after)
        return None

    def _can_fetch(self, job: Job) -> bool:
        """Whether a fetch says where its KV is, and whether all of it is there."""
        params = job.request.kv_transfer_params or {}
        blocks = params.get("remote_block_ids")
        if self.connector is None or not params.get("do_remote_prefill"):
            return False
        if not isinstance(blocks, list | tuple) or any(params.get(key) is None for key in REMOTE):
            # There is no P that NIXL could tell of the end.
            params["do_remote_prefill"] = False
            return False
        return len(blocks) == self._groups and (params.get("remote_num_tokens") or 0) >= job.target_tokens

    def _next_fetch(self) -> Job | None:
        """The fetch that may start: nothing normal waits or is on the inbound link, and the class has room for it."""
        if self.waiting or self.kv_holding_waiting or any(job.loading for job in self.jobs):
            return None
        for job in self.jobs.of(LegKind.FETCH):
            hits, tokens = self._cached(job)
            needed = (job.target_tokens - tokens) // self.block_size * self._groups
            if not needed:
                self._end(job, LegEnd.DONE)
            elif needed > self.free_queue.room(_free(hits), most=needed):
                self._end(job, LegEnd.NO_ROOM)
            else:
                return job
        return None

    def _note_failed_loads(self, transfers: Any) -> None:
        """vLLM looks for requests whose KV did not arrive in its own queues, and fails them."""
        failed, invalid = transfers.failed_recving, transfers.invalid_block_ids
        if not failed and not invalid:
            return
        for job in self.jobs:
            blocks = [block for group in self.kv_cache_manager.get_block_ids(job.request_id) for block in group]
            bad = next((index for index, block in enumerate(blocks) if block in invalid), None)
            if job.loading:
                job.failed |= bad is not None or job.request_id in failed
            elif bad is not None:
                # Loaded within a step: what came after it was computed from it.
                self.kv_cache_manager.evict_blocks(set(blocks[bad:]))
                self._end(job, LegEnd.TRANSFER_FAILED)
        transfers.failed_recving = {request_id for request_id in failed if request_id not in self.jobs}

    def _end_loads(self) -> None:
        """After a step: KV that has arrived is cached. A fetch is done, a prefill goes on from there."""
        for job in self.jobs:
            if not job.loading or job.request_id not in self.finished_recving_kv_req_ids:
                continue
            request = job.request
            job.loading = False
            if job.failed:
                self._end(job, LegEnd.TRANSFER_FAILED)
                continue
            self._update_waiting_for_remote_kv(request)
            self._free_request_blocks(request)
            self._set_kv_fetch_stage(request, None)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            if job.kind is LegKind.FETCH:
                self._end(job, LegEnd.DONE)

    # The end of steps and jobs.

    def _note_step(self, output: Any, now: float, plan: Plan) -> None:
        normal, slices = [], []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens - tokens
            job = self.jobs.get(request_id)
            if job is None:
                normal.append((request, start, tokens))
            else:
                slices.append(Slice(job, start, tokens, request.num_preemptions))
        normal_work = work = _work(normal)
        for part in slices:
            work = work.with_prefill(part.tokens, part.start)
        reason = None if plan.granted.reason is StepReason.NO_WORK else plan.granted.reason
        self._steps.append(Step(output, now, work, normal_work, plan.budget, reason, slices))
        self._note_evictions()

    def _note_evictions(self) -> None:
        evicted = self.free_queue.cache.drain_evicted()
        if evicted:
            self.log.evicted_blocks += len(evicted)
            self.attachment.evicted(evicted)
            # Put out of the class by a lower cap, and still free: nobody may hit what was given up for lost.
            self.kv_cache_manager.evict_blocks({block for block in evicted if block in self.free_queue.cache})

    def _end_step(self, output: Any, now: float) -> None:
        """Learn from a step, and end the jobs it completed before vLLM takes their last token for an answer."""
        while self._steps:
            step = self._steps.popleft()
            if step.output is output:
                break
        else:
            return
        seconds = now - max(step.at, self._last_end)
        self._last_end = now
        if step.work.tokens:
            self._learn(step, seconds)
        loading = any(job.loading for job in self.jobs)
        if step.work.tokens or self.running or self.waiting or self.kv_holding_waiting or loading:
            self._moved = now
        for job, start, tokens, life in step.slices:
            if job.request_id in self.jobs and job.request.num_preemptions == life:
                job.computed_tokens += tokens
                self.attachment.progress(job.session, start + tokens)
                if start + tokens >= job.target_tokens:
                    self._end(job, LegEnd.DONE)

    def _learn(self, step: Step, seconds: float) -> None:
        predicted, without = self.latency.seconds(step.work), self.latency.seconds(step.normal_work)
        warm = self.latency.warm
        self.latency.observe(step.work, seconds)
        self._longest_chunk = max(self._longest_chunk, step.work.prefill_tokens)
        if self.controller is not None:
            # What an overrun really cost is charged, too; before the model is warm nothing is known.
            stretch = max(predicted - without, seconds - without) if step.slices and warm and without else 0.0
            memory_bound = step.work.decodes > 0 and not step.work.prefill_tokens
            self.controller.ran(Iteration(seconds, stretch, memory_bound, step.reason or StepReason.NO_WORK))
        if step.reason is StepReason.PROBE:
            self._overran = warm and seconds > step.budget.iteration_seconds
        if step.reason is not None:
            budget = min(step.budget.iteration_seconds, without + step.budget.stretch_seconds)
            self.log.add(
                StepRecord(
                    step.at, step.reason, budget, step.shadow_tokens, step.normal_work.tokens, predicted, seconds
                )
            )

    def _end(self, job: Job, end: LegEnd) -> None:
        """Answer a leg with the tokens it covers; its blocks stay cached in the shadow class."""
        covered = self._cached(job)[1]
        # Connectors take what is not aborted for computed to its end.
        self.finish_requests(job.request_id, RequestStatus.FINISHED_ABORTED)
        self._answer(job, end, covered)

    def _answer(
        self, job: Job, end: LegEnd, covered: int, params: dict[str, Any] | None = None, after: Any = None
    ) -> None:
        self.log.legs[job.kind, end] += 1
        result = {"covered_tokens": covered, "computed_tokens": job.computed_tokens, "end": end.value}
        request = job.request
        if self.log_stats and all(event.type != EngineCoreEventType.SCHEDULED for event in request.events):
            # vLLM's request histograms count from it.
            request.record_event(EngineCoreEventType.SCHEDULED)
        output = EngineCoreOutput(
            request_id=job.request_id,
            new_token_ids=[],
            finish_reason=FinishReason.STOP,
            events=request.take_events(),
            kv_transfer_params={**(params or {}), RESULT: result},
            prefill_stats=request.take_prefill_stats(),
            trace_headers=request.trace_headers,
        )
        self._answers.append(Answer(request.client_index, output, after))

    # What is shown outside.

    def _has_normal_work(self) -> bool:
        return bool(self.running or self.waiting or self.kv_holding_waiting)

    def _show(self, now: float) -> None:
        """Tell the controller, the metrics page and the neighbours where the engine stands."""
        idle = not self._has_normal_work()
        if idle:
            self.attachment.mark(now, busy=False)
        self.attachment.publish(now, lambda: self._snapshot(now), last=idle and not self.jobs)

    def _snapshot(self, now: float) -> EngineSnapshot:
        cache, log = self.free_queue.cache, self.log
        credit = getattr(self.controller, "credit", None)
        return EngineSnapshot(
            waiting=len(self.waiting) + len(self.kv_holding_waiting),
            running=len(self.running),
            kv_usage=self.get_kv_cache_usage(),
            shadow_blocks=cache.size,
            shadow_cap_blocks=cache.cap,
            shadow_pinned_blocks=sum(self._pinned.values()),
            shadow_room_tokens=self._room_to_report(),
            shadow_jobs=len(self.jobs),
            slack_seconds=min(
                (slack(now, request, self.plugin.margin) for request in self._batch(now).requests), default=math.inf
            ),
            credit_seconds=credit.seconds if credit is not None else 0.0,
            link_busy=any(r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in self.kv_holding_waiting),
            step_reason=log.last.reason if log.last is not None else StepReason.NO_WORK,
            shadow_tokens=log.shadow_tokens,
            steps_over_budget=log.over_budget_steps,
            evicted_blocks=log.evicted_blocks,
        )

    def _room_to_report(self) -> int:
        """Tokens shadow work may take now; of an idle engine, once what it used last has gone cold.

        An idle engine makes no step in which it could say later that it has room by then.
        """
        ahead = 0.0 if self._has_normal_work() else self.plugin.cold_seconds + COLD_MARGIN_SECONDS
        return self.free_queue.room(most=self.free_queue.cache.cap, ahead=ahead) // self._groups * self.block_size

    def _facts(self) -> EngineFacts:
        model, cache = self.vllm_config.model_config, self.cache_config
        named = model.served_model_name
        kv_bytes = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        return EngineFacts(
            role=self.role,
            model=named if isinstance(named, str) else named[0],
            block_size=cache.block_size,
            hash_algorithm=str(cache.prefix_caching_hash_algo),
            max_context_tokens=self.max_model_len,
            kv_bytes_per_token=kv_bytes // (self.kv_cache_config.num_blocks * self.block_size),
            vllm_version=vllm.__version__,
        )

    # Estimates.

    def _cached(self, job: Job) -> tuple[tuple[list[Any], ...], int]:
        """The cached blocks of a job's prefix, by KV cache group, and their tokens: whole blocks, to the last token."""
        hits, tokens, _ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
            job.request.block_hashes, job.target_tokens
        )
        return hits, tokens

    def _cut(self, request: Any) -> int:
        """Leave of a shadow request the whole blocks, which are all that can be hit; returns their tokens."""
        whole: int = request.num_prompt_tokens // self.block_size * self.block_size
        if whole and request.prompt_embeds is None:
            request.prompt_token_ids = request.prompt_token_ids[:whole]
            del request._all_token_ids[whole:]
            request.num_prompt_tokens = whole
        return whole

    def _tpot_slo(self) -> float:
        slo = self.plugin.slo
        return max(slo.tpot_floor_seconds, slo.multiple * self.latency.seconds(StepWork().with_decode(self.block_size)))

    def _ttft_slo(self, prompt_tokens: int) -> float:
        slo = self.plugin.slo
        return max(slo.ttft_floor_seconds, slo.multiple * self._prefill_seconds(prompt_tokens, 0))

    def _prefill_seconds(self, tokens: int, cached: int) -> float:
        """Predicted time to prefill so many tokens behind cached ones, alone, in chunks as long as a step allows."""
        chunk = self.scheduler_config.max_num_batched_tokens
        seconds = 0.0
        while tokens > 0:
            new = min(tokens, chunk)
            seconds += self.latency.seconds(StepWork().with_prefill(new, cached))
            tokens -= new
            cached += new
        return seconds

    def _check(self) -> None:
        compat.check_version(vllm.__version__, allow_untested=self.plugin.allow_untested_version)
        manager = self.kv_cache_manager
        compat.check_attributes(
            {
                "Scheduler": (self, compat.SCHEDULER),
                "KVCacheManager": (manager, compat.KV_CACHE_MANAGER),
                "BlockPool": (manager.block_pool, compat.BLOCK_POOL),
                "FreeKVCacheBlockQueue": (manager.block_pool.free_block_queue, compat.FREE_QUEUE),
            }
        )
        compat.check_free_queue(manager.block_pool.free_block_queue)
        if not self.cache_config.enable_prefix_caching:
            raise ConfigError("shadow work needs prefix caching: start vLLM with --enable-prefix-caching")

    @property
    def _can_export(self) -> bool:
        # With a host buffer NIXL hands out copies that only a forward pass makes.
        device = self.vllm_config.device_config.device_type
        return self.connector is not None and (
            device == "cpu" or self.vllm_config.kv_transfer_config.kv_buffer_device != "cpu"
        )


class ShadowAsyncScheduler(ShadowScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same over the scheduler that runs one step ahead of the GPU."""


def _role_of(kv_transfer_config: Any) -> Role:
    if kv_transfer_config is None or kv_transfer_config.kv_role is None:
        return Role.COLOCATED
    if kv_transfer_config.is_kv_producer and kv_transfer_config.is_kv_consumer:
        return Role.COLOCATED
    return Role.PREFILL if kv_transfer_config.is_kv_producer else Role.DECODE


def _nothing(reason: StepReason) -> Plan:
    """No shadow work in this step, and no budget asked for."""
    return Plan(Budget.refused(StepReason.NO_WORK), Grant(0, reason))


def _too_little(budget: Budget) -> Grant:
    """No tokens, because the budget holds none, or none worth it."""
    return Grant(0, StepReason.BELOW_MINIMUM if budget.iteration_seconds else budget.reason)


def _work(parts: Iterable[tuple[Any, int, int]]) -> StepWork:
    """What an iteration computes for requests, each with where it starts and its tokens: of its prompt, or a decode."""
    prefill = pairs = decodes = kv = 0
    for request, start, tokens in parts:
        if tokens <= 0:
            continue
        if start < request.num_prompt_tokens:
            prefill += tokens
            pairs += tokens * (2 * start + tokens)
        else:
            decodes += 1
            kv += start
    return StepWork(prefill, pairs / 2, decodes, kv)


def _holds_blocks(job: Job) -> bool:
    """Whether a job was admitted and holds what it has computed, be it in a step or parked."""
    return bool(job.request.status == RequestStatus.RUNNING)


def _free(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """Of the blocks of all groups, those nobody uses."""
    return [block for group in groups for block in group if block.ref_cnt == 0 and not block.is_null]
