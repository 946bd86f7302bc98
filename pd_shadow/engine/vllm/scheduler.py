"""vLLM's scheduler with shadow work in what its iterations leave unused.

Every step, before vLLM schedules: shadow requests are out of its queues; if the policy grants tokens, the first jobs
are put in last place and the step's token limit is set so that they get exactly these. After it they are taken out
again. vLLM's own code admits them, allocates for them and runs them; it never sees one where something normal waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from pd_shadow.engine.vllm import compat, settings, shadow_blocks
from pd_shadow.engine.vllm.jobs import Job, JobQueue, LegEnd
from pd_shadow.engine.vllm.settings import Controller, PluginSettings, Role
from pd_shadow.engine.vllm.steps import StepLog, StepRecord
from pd_shadow.engine.vllm.tags import RESULT, CallTag, LegKind, call_tag, shadow_tag
from pd_shadow.perf.online import OnlineLatency, StepWork
from pd_shadow.policy.base import Batch, Budget, Iteration, IterationController, RunningRequest, StepReason
from pd_shadow.policy.credit import CreditController
from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.policy.slack import Grant, SlackController, grant

# Jobs that share one step: the first, and one more for what the first leaves of the grant.
JOBS_PER_STEP = 2
# A step may carry this many times the longest chunk timed so far: the latency model is not asked about the unknown.
GROWTH = 2
PROBE_SECONDS = 1.0
CALL = "pd_shadow_call"


class Call:
    """What the policy needs to know of a normal request; hangs on vLLM's request object and goes with it."""

    __slots__ = ("arrived", "first_token_at", "tag", "ttft_slo")

    def __init__(self, tag: CallTag, arrived: float, ttft_slo: float) -> None:
        self.tag = tag
        self.arrived = arrived
        self.ttft_slo = ttft_slo
        self.first_token_at: float | None = None


class Slice(NamedTuple):
    """A job's part in a step. `life` tells whether the job still held its blocks when the step ended."""

    job: Job
    start: int
    tokens: int
    life: int


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


class ShadowScheduler(Scheduler):  # type: ignore[misc]
    """For `--scheduler-cls`. Raises IncompatibleVllmError or ConfigError at start where it cannot keep its promises."""

    # vLLM's own.
    max_num_scheduled_tokens: int
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
            pool, int(self.plugin.cap_share * self._pool_blocks), self.plugin.cold_seconds, time.monotonic
        )
        self._stock_allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        self.use_controller(self.plugin.controller or _default_controller(self.role))
        self._steps: deque[Step] = deque()
        self._last_end = 0.0
        self._longest_chunk = self.plugin.minimum_tokens
        self._probed = -PROBE_SECONDS
        # Legs that ended and whose answers wait for the end of the step.
        self._answers: list[tuple[int, EngineCoreOutput]] = []
        self._pinned: dict[str, int] = {}

    # Run-time control.

    @property
    def controller_kind(self) -> Controller:
        return self._kind

    def use_controller(self, kind: Controller) -> None:
        """Decide iterations by another controller from the next step on."""
        plugin = self.plugin
        self._kind = kind
        self.controller: IterationController | None
        match kind:
            case Controller.HARVEST_SLO:
                self.controller = SlackController(delta=plugin.routed_delta, beta=plugin.beta, margin=plugin.margin)
            case Controller.HARVEST:
                self.controller = CreditController(delta=plugin.harvest_delta, beta=plugin.beta)
            case Controller.PREFILL_WINDOW:
                self.controller = PrefillWindowController(window_seconds=plugin.window_seconds, margin=plugin.margin)
            case Controller.OFF | Controller.EAGER:
                self.controller = None

    # vLLM's scheduler interface.

    def add_request(self, request: Any) -> None:
        xargs = request.sampling_params.extra_args if request.sampling_params is not None else None
        tag = shadow_tag(xargs)
        if tag is None or (self._kind is Controller.EAGER and tag.kind is LegKind.PREFILL):
            tagged = call_tag(xargs)
            arrived = time.monotonic() - max(0.0, time.time() - request.arrival_time)
            setattr(request, CALL, Call(tagged, arrived, tagged.ttft_slo or self._ttft_slo(request.num_prompt_tokens)))
            super().add_request(request)
            return
        whole_blocks = request.num_prompt_tokens // self.block_size * self.block_size
        self.jobs.add(Job(request, tag, whole_blocks, time.monotonic()))
        if self.connector is not None:
            self.connector.on_new_request(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        if request_ids is None:
            ids = [*self.requests, *(job.request_id for job in self.jobs)]
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            job = self.jobs.get(request_id)
            if job is not None:
                # vLLM frees only what it knows, and tells the connector, which lets P's blocks go.
                self.requests.setdefault(request_id, job.request)
                self.jobs.remove(job)
        finished: list[Any] = super().finish_requests(ids, finished_status)
        return finished

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now = time.monotonic()
        self._end_what_can_end(now)
        budget, granted, slices = self._plan(now, throttle_prefills)
        limit = self.max_num_scheduled_tokens
        if slices:
            # vLLM serves the running requests in order, so that what is left for the last ones is exact.
            self.max_num_scheduled_tokens = min(limit, self._normal_tokens() + sum(part.tokens for part in slices))
        joined = self._join(slices)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = limit
            self._part(joined)
        self._note_step(output, now, budget, granted)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        self._end_step(scheduler_output, time.monotonic())
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        self._end_fetches()
        answers, self._answers = self._answers, []
        for client_index, answer in answers:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(answer)
        return outputs

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        call = getattr(request, CALL, None)
        if call is not None and call.first_token_at is None:
            call.first_token_at = time.monotonic()
        return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)

    def get_num_unfinished_requests(self) -> int:
        unfinished: int = super().get_num_unfinished_requests()
        if self._pause_state == PauseState.PAUSED_ALL:
            return unfinished
        return unfinished + len(self.jobs) + len(self._answers)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        for job in self.jobs:
            if not job.loading:
                self._end(job, LegEnd.PAUSED)
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        return done

    def shutdown(self) -> None:
        self.log.close()
        super().shutdown()

    # Planning.

    def _plan(self, now: float, throttled: bool) -> tuple[Budget, Grant, list[Slice]]:
        """What the next step carries of prefill jobs."""
        refused = Budget.refused(StepReason.NO_WORK)
        jobs = self.jobs.of(LegKind.PREFILL)
        if not jobs or self.controller is None:
            return refused, Grant(0, StepReason.NO_WORK), []
        if self._pause_state != PauseState.UNPAUSED or throttled:
            return refused, Grant(0, StepReason.PAUSED), []
        self._release_for(jobs[0])
        batch = self._batch(now)
        in_flight = any(step.slices for step in self._steps)
        if in_flight and not batch.requests:
            # One step ahead: an arrival waits for one shadow iteration, never for two.
            return refused, Grant(0, StepReason.IN_FLIGHT), []
        budget = self.controller.budget(batch)
        parts = [self._part_of(job) for job in jobs[:JOBS_PER_STEP]]
        lacking = [job.target_tokens - start for job, start, _, _ in parts]
        room = self._room_tokens(parts, lacking)
        work = self._normal_work()
        most = min(sum(lacking), GROWTH * self._longest_chunk, self.max_num_scheduled_tokens - self._normal_tokens())

        def work_with(tokens: int) -> StepWork:
            whole = work
            for (_, start, _, _), left in zip(parts, lacking, strict=True):
                whole = whole.with_prefill(min(tokens, left), start)
                tokens -= min(tokens, left)
            return whole

        if self.latency.warm:
            granted = grant(
                budget, lambda n: self.latency.seconds(work_with(n)),
                wanted=max(0, most), room=room, minimum=self.plugin.minimum_tokens,
            )  # fmt: skip
        else:
            granted = Grant(0, StepReason.BELOW_MINIMUM if budget.iteration_seconds else budget.reason)
        if granted.reason is StepReason.BELOW_MINIMUM and not batch.requests and not batch.waiting:
            granted = self._probe(now, jobs[0], lacking[0], room)
        if granted.reason is StepReason.NO_ROOM:
            self._end(jobs[0], LegEnd.NO_ROOM)
            return budget, granted, []
        slices = []
        left = granted.tokens
        for (job, start, _, _), lack in zip(parts, lacking, strict=True):
            if left > 0:
                slices.append(Slice(job, start, min(left, lack), job.request.num_preemptions))
                left -= min(left, lack)
        return budget, granted, slices

    def _probe(self, now: float, job: Job, lacking: int, room: int) -> Grant:
        """The smallest chunk on an idle engine: the model learns from it, however wrong it was before."""
        least = min(self.plugin.minimum_tokens, lacking)
        if room < least:
            return Grant(0, StepReason.NO_ROOM)
        if self.latency.warm and now - self._probed < PROBE_SECONDS:
            self._end(job, LegEnd.BELOW_MINIMUM)
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

    def _part_of(self, job: Job) -> tuple[Job, int, int, list[Any]]:
        """A prefill job, the tokens it has, the blocks it holds, and cached ones it would take up again."""
        if job.request.status == RequestStatus.RUNNING:
            held = len(self.kv_cache_manager.get_block_ids(job.request_id)[0])
            return job, job.request.num_computed_tokens, held, []
        hits, tokens = self._cached(job)
        return job, tokens, len(hits[0]), [block for group in hits for block in group]

    def _room_tokens(self, parts: Sequence[tuple[Job, int, int, list[Any]]], lacking: Sequence[int]) -> int:
        """Tokens of shadow KV that the jobs of a step can get, in order."""
        hits = {block.block_id: block for *_, found in parts for block in found if block.ref_cnt == 0}
        groups = len(self.kv_cache_config.kv_cache_groups)
        blocks = self.free_queue.room(list(hits.values())) // groups
        tokens = 0
        for (_, start, held, _), lack in zip(parts, lacking, strict=True):
            ready = held * self.block_size - start
            needed = -(-(lack - ready) // self.block_size)
            if blocks < needed:
                return tokens + max(0, ready + blocks * self.block_size)
            blocks -= max(0, needed)
            tokens += lack
        return tokens

    def _normal_tokens(self) -> int:
        """Tokens vLLM will schedule for the requests that run, as it counts them itself."""
        longest = self.scheduler_config.long_prefill_token_threshold
        total = 0
        for request in self.running:
            tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            total += min(tokens, longest) if longest > 0 else tokens
        return min(total, self.max_num_scheduled_tokens)

    def _normal_work(self) -> StepWork:
        work = StepWork()
        left = self.max_num_scheduled_tokens
        for request in self.running:
            tokens = min(
                left, request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            )
            left -= tokens
            work = _with_request(work, request, request.num_computed_tokens, tokens)
        return work

    # Joining vLLM's queues for one step.

    def _join(self, slices: Sequence[Slice]) -> list[Job]:
        joined = []
        for part in slices:
            if part.job.request.status == RequestStatus.RUNNING:
                self.running.append(part.job.request)
            else:
                self._admit(part.job)
            joined.append(part.job)
        fetch = self._next_fetch()
        if fetch is not None:
            self._admit(fetch)
            joined.append(fetch)
        return joined

    def _admit(self, job: Job) -> None:
        self.requests[job.request_id] = job.request
        self.waiting.add_request(job.request)

    def _part(self, joined: Sequence[Job]) -> None:
        for job in joined:
            request = job.request
            if request in self.running:
                self.running.remove(request)
            elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                job.loading = True
                self.kv_holding_waiting.remove_requests([request])
            else:
                self.waiting.remove_requests([request])
                self.kv_holding_waiting.remove_requests([request])
                # Not admitted this time: out of vLLM's sight until the next try.
                self.requests.pop(job.request_id, None)
            self.deferred_waiting.discard(request)

    def _release_for(self, first: Job) -> None:
        """A likelier job is there: the one that holds blocks lets go of them; what it computed stays cached."""
        for job in self.jobs.of(LegKind.PREFILL):
            if job is not first and job.request.status == RequestStatus.RUNNING and job.probability < first.probability:
                self._release(job)

    def _release(self, job: Job) -> None:
        """Give a job's blocks back at once; it goes on later from what is still cached."""
        request = job.request
        if request in self.running:
            self.running.remove(request)
        # vLLM puts a preempted request where it would be taken for a normal one that waits.
        waiting, self.waiting = self.waiting, create_request_queue(self.policy)
        self._preempt_request(request, time.monotonic())
        self.waiting = waiting
        self.log.released_jobs += 1

    def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the cache manager's: shadow work takes from its class, and gives back what normal work lacks."""
        if request.request_id in self.jobs:
            kwargs["full_sequence_must_fit"] = False
            with self.free_queue.for_shadow():
                return self._stock_allocate_slots(request, *args, **kwargs)
        blocks = self._stock_allocate_slots(request, *args, **kwargs)
        while blocks is None and self._give_back():
            blocks = self._stock_allocate_slots(request, *args, **kwargs)
        hits = kwargs.get("new_computed_blocks")
        if blocks is not None and hits is not None:
            self.free_queue.promote(block for group in hits.blocks for block in group)
        return blocks

    def _give_back(self) -> bool:
        """Release the least likely job that holds blocks; False when none does."""
        for job in reversed(self.jobs.of(LegKind.PREFILL)):
            if job.request.status == RequestStatus.RUNNING:
                self._release(job)
                return True
        return False

    # Legs that need no forward pass.

    def _end_what_can_end(self, now: float) -> None:
        """Exports, jobs with nothing left to compute, jobs that are switched off or stuck."""
        for job in self.jobs:
            if job.loading:
                if now - job.progressed > self.plugin.stuck_seconds:
                    self._end(job, LegEnd.STALLED)
            elif self._kind is Controller.OFF and job.kind is LegKind.PREFILL:
                self._end(job, LegEnd.PAUSED)
            elif job.kind is LegKind.EXPORT:
                self._export(job)
            elif job.kind is LegKind.FETCH and not (job.request.kv_transfer_params or {}).get("do_remote_prefill"):
                self._end(job, LegEnd.NOT_TRANSFERABLE)
            elif job.request.status != RequestStatus.RUNNING and self._cached(job)[1] >= job.target_tokens:
                self._end(job, LegEnd.DONE)
            elif now - job.progressed > self.plugin.stuck_seconds and not self.running and not self.waiting:
                self._end(job, LegEnd.STALLED)

    def _export(self, job: Job) -> None:
        """Hand out a cached prefix: no forward pass, its blocks pinned until D has read them or the lease ends."""
        self._pinned = {id_: blocks for id_, blocks in self._pinned.items() if id_ in self.requests}
        hits, tokens = self._cached(job)
        if self.connector is None or not (job.request.kv_transfer_params or {}).get("do_remote_decode"):
            return self._end(job, LegEnd.NOT_TRANSFERABLE)
        if tokens < job.target_tokens or not tokens:
            return self._end(job, LegEnd.NOT_CACHED)
        count = sum(len(group) for group in hits)
        if sum(self._pinned.values()) + count > self.plugin.pinned_share * self._pool_blocks:
            return self._end(job, LegEnd.NO_ROOM)
        request = job.request
        self.requests[job.request_id] = request
        self._stock_allocate_slots(
            request, 0, num_new_computed_tokens=tokens,
            new_computed_blocks=self.kv_cache_manager.create_kv_cache_blocks(hits),
        )  # fmt: skip
        self.connector.update_state_after_alloc(request, self.kv_cache_manager.get_blocks(job.request_id), 0)
        request.num_computed_tokens = tokens
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        params, _ = self._free_request(request)
        self._pinned[job.request_id] = count
        self.jobs.remove(job)
        self._answer(job, LegEnd.DONE, tokens, params)
        return None

    def _next_fetch(self) -> Job | None:
        """The fetch that may start: nothing normal waits or is on the inbound link, and the class has room for it."""
        if self.waiting or self.kv_holding_waiting or any(job.loading for job in self.jobs):
            return None
        for job in self.jobs.of(LegKind.FETCH):
            hits, tokens = self._cached(job)
            free = [block for group in hits for block in group if block.ref_cnt == 0]
            needed = (job.target_tokens - tokens) // self.block_size * len(self.kv_cache_config.kv_cache_groups)
            if needed <= self.free_queue.room(free):
                return job
            self._end(job, LegEnd.NO_ROOM)
        return None

    def _end_fetches(self) -> None:
        """After a step: fetches whose KV has arrived are cached and done, without a forward pass."""
        for job in self.jobs:
            if not job.loading:
                continue
            request = job.request
            if request.is_finished():
                self.jobs.remove(job)
                self._answer(job, LegEnd.TRANSFER_FAILED, self._cached(job)[1])
            elif job.request_id in self.finished_recving_kv_req_ids:
                failed = job.request_id in self.failed_recving_kv_req_ids
                self._update_waiting_for_remote_kv(request)
                request.status = RequestStatus.WAITING
                self._end(job, LegEnd.TRANSFER_FAILED if failed else LegEnd.DONE)

    # The end of steps and jobs.

    def _note_step(self, output: Any, now: float, budget: Budget, granted: Grant) -> None:
        work, normal, slices = StepWork(), StepWork(), []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens - tokens
            work = _with_request(work, request, start, tokens)
            job = self.jobs.get(request_id)
            if job is None:
                normal = _with_request(normal, request, start, tokens)
            else:
                slices.append(Slice(job, start, tokens, request.num_preemptions))
        reason = None if granted.reason is StepReason.NO_WORK else granted.reason
        self._steps.append(Step(output, now, work, normal, budget, reason, slices))

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
        for job, start, tokens, life in step.slices:
            if job.request_id in self.jobs and job.request.num_preemptions == life:
                job.computed_tokens += tokens
                job.progressed = now
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
        if step.reason is not None:
            budget = min(step.budget.iteration_seconds, without + step.budget.stretch_seconds)
            self.log.add(
                StepRecord(
                    step.at, step.reason, budget, step.shadow_tokens, step.normal_work.tokens, predicted, seconds
                )
            )

    def _end(self, job: Job, end: LegEnd) -> None:
        """Answer a leg with the tokens it covers; its blocks stay cached in the shadow class."""
        request = job.request
        covered = self._cached(job)[1]
        if request.status == RequestStatus.RUNNING:
            covered = min(covered, request.num_computed_tokens // self.block_size * self.block_size)
        self.finish_requests(job.request_id, RequestStatus.FINISHED_STOPPED)
        self._answer(job, end, min(covered, job.target_tokens))

    def _answer(self, job: Job, end: LegEnd, covered: int, params: dict[str, Any] | None = None) -> None:
        self.log.legs[job.kind, end] += 1
        result = {"covered_tokens": covered, "computed_tokens": job.computed_tokens, "end": end.value}
        request = job.request
        self._answers.append(
            (
                request.client_index,
                EngineCoreOutput(
                    request_id=job.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    kv_transfer_params={**(params or {}), RESULT: result},
                    prefill_stats=request.take_prefill_stats(),
                    trace_headers=request.trace_headers,
                ),
            )
        )

    # Estimates.

    def _cached(self, job: Job) -> tuple[tuple[list[Any], ...], int]:
        """The cached blocks of a job's prefix, by KV cache group, and their tokens: whole blocks, to the last token."""
        hits, tokens, _ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
            job.request.block_hashes, job.target_tokens
        )
        return hits, tokens

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


class ShadowAsyncScheduler(ShadowScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same over the scheduler that runs one step ahead of the GPU."""


def _role_of(kv_transfer_config: Any) -> Role:
    if kv_transfer_config is None or kv_transfer_config.kv_role is None:
        return Role.COLOCATED
    if kv_transfer_config.is_kv_producer and kv_transfer_config.is_kv_consumer:
        return Role.COLOCATED
    return Role.PREFILL if kv_transfer_config.is_kv_producer else Role.DECODE


def _default_controller(role: Role) -> Controller:
    return {
        Role.PREFILL: Controller.PREFILL_WINDOW,
        Role.DECODE: Controller.OFF,
        Role.COLOCATED: Controller.HARVEST_SLO,
    }[role]


def _with_request(work: StepWork, request: Any, start: int, tokens: int) -> StepWork:
    """The work with a request's tokens in it: prompt tokens, or a decode that attends to all before it."""
    if tokens <= 0:
        return work
    return work.with_prefill(tokens, start) if start < request.num_prompt_tokens else work.with_decode(start)
