"""All shadow jobs: retargeting, legs, and their schedule.

Admission (paper sections 3.1 and 3.5, at request level): jobs run in order of switch probability; one shadow leg per P
and only while P has no normal work; exports and fetches only while D's inbound link carries no normal transfer. On a
colocated instance there is the prefill leg alone, while nothing waits there (appendix D.1).

An instance with the plugin decides inside every iteration what a leg gets, so its legs start beside normal work, a few
at a time, and stay when more arrives. Pushes are sized to the room that D reports. Such engines may cover less than
asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from controller.config import ShadowConfig
from controller.core.coverage import Coverage
from controller.core.effects import CancelLeg, Effect, StartLeg
from controller.core.instance import Instance
from controller.core.ledger import CallLedger
from controller.core.links import Links
from controller.core.session import Session, SessionKey
from controller.core.shadow_job import JobInput, JobState, Leg, ShadowJob
from controller.core.shadow_policy import ShadowPolicy
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.reasons import label
from pd_shadow.policy import request_harvest
from transfer.chunks import Chunk, whole_blocks
from transfer.gate import GateState

# A dispatcher that reports nothing for this long past a leg's deadline has lost it.
REPORT_GRACE_SECONDS = 2.0
# Of a wait; beyond, any is the longest, and a float would overflow.
MAX_DOUBLINGS = 64
# Prefill legs on a P with the plugin: one to work on, one to follow it without a gap.
PLUGIN_PREFILL_LEGS = 2

_HARVEST_REASON = {
    verdict: pb.ShadowReason.Value(f"SHADOW_REASON_{verdict.name}")
    for verdict in request_harvest.Verdict
    if verdict is not request_harvest.Verdict.ADMIT
}
_GATE_REASON = {
    GateState.NORMAL_TRANSFER: pb.SHADOW_REASON_LINK_BUSY,
    GateState.SHADOW_IN_FLIGHT: pb.SHADOW_REASON_LINK_TAKEN,
    GateState.PAUSED: pb.SHADOW_REASON_PAUSED,
}
_NONE = pb.SHADOW_REASON_UNSPECIFIED


class ShadowJobs:
    """Jobs by (session, model) and legs by id."""

    def __init__(
        self,
        config: ShadowConfig,
        policy: ShadowPolicy,
        coverage: Coverage,
        links: Links,
        calls: CallLedger,
        emit: Callable[[Effect], None],
        note: Callable[[ShadowJob, pb.ShadowReason.ValueType, str], None],
        neighbours: Callable[[Instance], list[Instance]],
    ) -> None:
        self._config = config
        # The one in force; `follow` changes it.
        self.policy = policy
        self._coverage = coverage
        self._links = links
        self._calls = calls
        self._emit = emit
        self._note = note
        self._neighbours = neighbours
        self._jobs: dict[tuple[SessionKey, str], ShadowJob] = {}
        self._legs: dict[str, tuple[ShadowJob, Leg]] = {}
        # Jobs that could take a leg, so that a schedule looks at work and not at every session ever seen. In order of
        # their coming, so that equal jobs take turns the same way in every replay of a history.
        self._open: dict[ShadowJob, None] = {}
        self._ids = itertools.count(1)

    def __iter__(self) -> Iterator[ShadowJob]:
        return iter(self._jobs.values())

    def get(self, session: SessionKey, model: str) -> ShadowJob | None:
        return self._jobs.get((session, model))

    @property
    def legs_in_flight(self) -> int:
        return len(self._legs)

    def follow(self, policy: ShadowPolicy) -> None:
        """Take another policy; one that pauses takes back the prefill legs in flight."""
        self.policy = policy
        if not policy.enabled:
            for job, leg in list(self._legs.values()):
                if leg.kind == pb.LEG_KIND_PREFILL:
                    self.cancel(job, pb.SHADOW_REASON_PAUSED)

    def want(
        self, now: float, session: Session, model: str, prefill: Instance, decode: Instance | None, probability: float
    ) -> ShadowJob:
        """The job for (session, model), made if new; an idle job follows the placement it is given."""
        job = self._jobs.get((session.key, model))
        if job is None:
            job = ShadowJob(session.key, model, session.binding(model), prefill, decode, created=now)
            self._jobs[session.key, model] = job
        job.probability = probability
        if job.leg is None:
            job.prefill, job.decode = prefill, decode
        job.suspended = _NONE if job.target_tokens else pb.SHADOW_REASON_RENDERING
        self._refresh(job)
        return job

    def suspend(self, job: ShadowJob, reason: pb.ShadowReason.ValueType) -> None:
        """No new legs for now; a prefill leg in flight is taken back."""
        job.suspended = job.reason = reason
        job.apply(JobInput.SUSPEND)
        if job.leg is not None and job.leg.kind == pb.LEG_KIND_PREFILL:
            self.cancel(job, reason)
        self._refresh(job)

    def has_leg_on(self, session: SessionKey, instance: Instance) -> bool:
        """Whether a leg of the session's job for the instance's model is in flight there."""
        job = self._jobs.get((session, instance.model))
        return job is not None and job.leg is not None and job.leg.instance is instance

    def homeless(self, model: str) -> list[ShadowJob]:
        """Jobs of a model without a leg whose P, D or colocated instance is no more."""
        return [
            job
            for job in self._jobs.values()
            if job.model == model and job.leg is None and not (job.prefill.alive and _has_live_decode(job))
        ]

    def rehome(self, job: ShadowJob, prefill: Instance, decode: Instance | None) -> None:
        """Give a job without a leg another P and D."""
        job.prefill, job.decode = prefill, decode
        self._refresh(job)

    def rendered(self, job: ShadowJob, revision: int, tokens: int, kept_tokens: int, in_use: bool) -> None:
        """The target engine rendered the context: `tokens` long, `kept_tokens` of it as before."""
        if revision <= job.revision:
            return
        block_size = job.prefill.facts.block_size
        limit = job.prefill.facts.max_context_tokens
        cut = job.leg if job.leg is not None and kept_tokens < job.leg.chunk.end else None
        if cut is not None:
            self._book(job, cut)
        held = job.binding.prefill_tokens
        lost = self._coverage.cut_back(job.binding, kept_tokens, block_size)
        if lost:
            self._note(job, pb.SHADOW_REASON_CUT_BACK, f"{held} tokens cut back to {job.binding.prefill_tokens}")
        if cut is not None:
            cut.cut_back(whole_blocks(kept_tokens, block_size))
            self.cancel(job, pb.SHADOW_REASON_CUT_BACK)
        job.revision = revision
        job.target_tokens = tokens
        if in_use:
            job.suspended = pb.SHADOW_REASON_MODEL_IN_USE
        elif limit and tokens >= limit:
            job.suspended = pb.SHADOW_REASON_EXCEEDS_CONTEXT
        else:
            job.suspended = _NONE
        if job.state is not JobState.EXPORTED:
            job.apply(JobInput.TARGET)
        job.reason = job.suspended or job.reason
        self._refresh(job)

    def preempt(self, instance: Instance) -> None:
        """Normal work arrived: prefill legs here and on the same hardware give way; an export is short and ends.

        Eager legs stay: they are requests like any other. An engine with the plugin makes way within an iteration, by
        itself, and for engines on its hardware too.
        """
        if self.policy.eager:
            return
        for taken in (instance, *self._neighbours(instance)):
            if not taken.request_level:
                continue
            for leg_id, kind in taken.shadow_legs.items():
                if kind == pb.LEG_KIND_PREFILL:
                    self.cancel(self._legs[leg_id][0], pb.SHADOW_REASON_PREEMPTED)

    def cancel(self, job: ShadowJob, reason: pb.ShadowReason.ValueType) -> None:
        """Ask the dispatcher to stop the leg; what it holds is given back when the dispatcher says that it stopped."""
        leg = job.leg
        if leg is not None and not leg.cancelled:
            leg.cancelled = True
            job.reason = reason
            self._emit(CancelLeg(leg.gateway_id, leg.leg_id, reason))

    def schedule(self, now: float, connected: Callable[[str], bool], gateway_of: Callable[[SessionKey], str]) -> None:
        """Start every leg that may start, likeliest switch first."""
        if not self.policy.enabled:
            for job in self._open:
                job.reason = pb.SHADOW_REASON_PAUSED
            return
        for job in sorted(self._open, key=lambda job: (-job.probability, job.created)):
            if job.state is JobState.BACKOFF:
                if now < job.retry_at:
                    continue
                job.apply(JobInput.RETRY_DUE)
            gateway = gateway_of(job.session)
            if not connected(gateway):
                job.reason = pb.SHADOW_REASON_NO_DISPATCHER
                continue
            job.reason = self._advance(now, job, gateway)
            self._refresh(job)

    def finished(
        self,
        now: float,
        leg_id: str,
        gateway_id: str,
        outcome: pb.LegOutcome.ValueType,
        cached_tokens: int,
        covered_tokens: int | None,
        detail: str,
        *,
        transfer_failed: bool,
    ) -> None:
        """A dispatcher's word on how a leg ended; too late for a leg that was given up.

        `covered_tokens` is the instance's word on what it holds, None where a finished leg covers what was asked.
        """
        entry = self._legs.get(leg_id)
        if entry is None or entry[1].gateway_id != gateway_id:
            return
        job, leg = entry
        self._calls.legs[job.model, leg.kind, outcome] += 1
        if leg.kind == pb.LEG_KIND_FETCH:
            done = outcome == pb.LEG_OUTCOME_DONE
            failed = outcome in (pb.LEG_OUTCOME_FAILED, pb.LEG_OUTCOME_TIMED_OUT) or transfer_failed
            # Only what D holds beyond the chunk's start came over the link; a stock D says what it found cached.
            held = (cached_tokens if covered_tokens is None else covered_tokens) if done else 0
            self._judge_link(now, job, failed=failed, arrived=held > leg.chunk.start)
        if outcome == pb.LEG_OUTCOME_DONE:
            self._done(now, job, leg, cached_tokens, covered_tokens, detail)
        else:
            self._book(job, leg)
            self._release(now, job, leg)
            if outcome in (pb.LEG_OUTCOME_CANCELLED, pb.LEG_OUTCOME_STALE):
                job.cancelled_prefill |= leg.kind == pb.LEG_KIND_PREFILL
                job.apply(JobInput.LEG_CANCELLED)
            else:
                self._back_off(now, job, pb.SHADOW_REASON_BACKOFF, pb.LegOutcome.Name(outcome), detail)
        self._settle(job)

    def progressed(self, job: ShadowJob, instance: Instance, tokens: int) -> None:
        """The instance says how far the job's leg on it has come."""
        leg = job.leg
        if leg is not None and leg.instance is instance and leg.kind != pb.LEG_KIND_EXPORT:
            covered = min(whole_blocks(tokens, instance.facts.block_size), leg.chunk.end)
            leg.covered = max(leg.covered, covered)

    def shrunk(self, job: ShadowJob, instance: Instance, tokens: int) -> None:
        """The instance holds no more than `tokens` of the context.

        A warm job stays closed until the session's next call or rendering: what was evicted for want of room would only
        push out what another job has there.
        """
        if job.leg is not None and job.leg.instance is instance:
            job.leg.covered = max(job.leg.booked, min(job.leg.covered, tokens))
        elif job.state is JobState.WAITING and self._missing(job):
            job.reason = pb.SHADOW_REASON_EVICTED

    def tick(self, now: float) -> None:
        """Give up legs whose dispatcher has gone silent."""
        for job, leg in list(self._legs.values()):
            if now >= leg.deadline + REPORT_GRACE_SECONDS:
                self._calls.legs[job.model, leg.kind, pb.LEG_OUTCOME_TIMED_OUT] += 1
                self._emit(CancelLeg(leg.gateway_id, leg.leg_id, pb.SHADOW_REASON_BACKOFF))
                self._book(job, leg)
                self._release(now, job, leg)
                self._back_off(now, job, pb.SHADOW_REASON_BACKOFF, "no report", "")
                self._settle(job)

    def abort_on(self, now: float, instance: Instance, reason: pb.ShadowReason.ValueType) -> None:
        """An instance is gone, or drains: its legs end here and now, whatever is still said about them."""
        for job, leg in [entry for entry in self._legs.values() if self._touches(entry[0], entry[1], instance)]:
            self._abort(now, job, leg, reason)

    def abort_leg(self, now: float, job: ShadowJob, reason: pb.ShadowReason.ValueType) -> None:
        """The job goes on elsewhere: its leg, if any, ends here and now."""
        if job.leg is not None:
            self._abort(now, job, job.leg, reason)

    def pause_on(self, instance: Instance) -> None:
        """An instance is paused: its prefill legs are taken back; exports and fetches are short and end."""
        for leg_id, kind in instance.shadow_legs.items():
            if kind == pb.LEG_KIND_PREFILL:
                self.cancel(self._legs[leg_id][0], pb.SHADOW_REASON_PAUSED)

    def abort_of(self, now: float, gateway_id: str, reason: pb.ShadowReason.ValueType) -> None:
        """A dispatcher is gone, and its legs with it."""
        for job, leg in [entry for entry in self._legs.values() if entry[1].gateway_id == gateway_id]:
            self._abort(now, job, leg, reason)

    def drop(self, now: float, session: SessionKey, models: list[str], reason: pb.ShadowReason.ValueType) -> None:
        """Forget a session's jobs."""
        for model in models:
            job = self._jobs.pop((session, model), None)
            if job is None:
                continue
            if job.leg is not None:
                self._abort(now, job, job.leg, reason)
            job.apply(JobInput.DROP)
            self._open.pop(job, None)

    # Internals.

    def _advance(self, now: float, job: ShadowJob, gateway: str) -> pb.ShadowReason.ValueType:
        """Start the job's next leg if it may start; the reason why it runs, is finished or waits."""
        prefill, decode = job.prefill, job.decode
        if not prefill.ready or (decode is not None and not decode.ready):
            drains = prefill.draining or (decode is not None and decode.draining)
            return pb.SHADOW_REASON_INSTANCE_DRAINING if drains else pb.SHADOW_REASON_NO_INSTANCE
        # Of D, its gate says the same about pushes.
        if prefill.paused:
            return pb.SHADOW_REASON_PAUSED
        chunk = job.next_prefill(self._config.chunk_tokens)
        push = job.next_push(self._config.chunk_tokens) if chunk is None else None
        if chunk is None and push is None:
            return pb.SHADOW_REASON_WARM
        if push is not None and decode is not None:
            if decode.gate.state is not GateState.OPEN:
                return _GATE_REASON[decode.gate.state]
            if not self._links.usable(now, prefill, decode):
                return pb.SHADOW_REASON_LINK_QUARANTINED
            push = _fit(push, decode)
            if push is None:
                return pb.SHADOW_REASON_NO_ROOM
        held_back = self._held_back(prefill, prefilling=chunk is not None)
        if held_back:
            return held_back
        if chunk is not None:
            job.apply(JobInput.START_PREFILL)
            self._start(now, job, pb.LEG_KIND_PREFILL, prefill, gateway, chunk)
        elif push is not None and decode is not None:
            decode.settled_gate(now).begin_shadow()
            self._links.begin(now, prefill, decode, job)
            job.apply(JobInput.START_EXPORT)
            self._start(now, job, pb.LEG_KIND_EXPORT, prefill, gateway, push)
        return pb.SHADOW_REASON_RUNNING

    def _held_back(self, instance: Instance, *, prefilling: bool) -> pb.ShadowReason.ValueType:
        """Why a P or colocated instance takes no leg now, prefill or export."""
        if not instance.request_level:
            if not prefilling:
                return _NONE
            if sum(kind == pb.LEG_KIND_PREFILL for kind in instance.shadow_legs.values()) >= PLUGIN_PREFILL_LEGS:
                return pb.SHADOW_REASON_PREFILL_TAKEN
            room = instance.shadow_room_tokens
            # Without room a leg would only keep the next job from its place.
            return pb.SHADOW_REASON_NO_ROOM if room is not None and room < instance.facts.block_size else _NONE
        verdict = self._admission(instance)
        return _NONE if verdict is request_harvest.Verdict.ADMIT else _HARVEST_REASON[verdict]

    def _admission(self, instance: Instance) -> request_harvest.Verdict:
        """The request-level rule of a stock engine."""
        legs = len(instance.shadow_legs)
        if self.policy.eager:
            return request_harvest.admit_eager(legs)
        neighbour_busy = any(neighbour.busy for neighbour in self._neighbours(instance))
        if instance.colocated:
            load = request_harvest.ColocatedLoad(instance.waiting_requests, legs, neighbour_busy)
            return request_harvest.admit_colocated(load)
        return request_harvest.admit(
            request_harvest.PrefillLoad(len(instance.prefill_calls), legs, instance.foreign_requests, neighbour_busy)
        )

    def _start(
        self,
        now: float,
        job: ShadowJob,
        kind: pb.LegKind.ValueType,
        instance: Instance,
        gateway: str,
        chunk: Chunk,
    ) -> None:
        seconds = {
            pb.LEG_KIND_PREFILL: self._config.prefill_deadline_seconds,
            pb.LEG_KIND_EXPORT: self._config.export_deadline_seconds,
            pb.LEG_KIND_FETCH: self._config.fetch_deadline_seconds,
        }[kind]
        leg = Leg(f"leg-{next(self._ids)}", kind, instance, gateway, job.revision, chunk, now + seconds)
        if kind == pb.LEG_KIND_FETCH:
            instance.fetch_leg = leg.leg_id
            instance.note_fetch(chunk.tokens)
        else:
            instance.shadow_legs[leg.leg_id] = kind
        instance.note_own_requests()
        job.leg = leg
        self._legs[leg.leg_id] = (job, leg)
        self._emit(
            StartLeg(
                gateway,
                leg.leg_id,
                job.session,
                job.model,
                kind,
                instance,
                leg.revision,
                chunk.end,
                seconds,
                job.probability,
                normal_priority=self.policy.eager,
            )
        )

    def _done(
        self, now: float, job: ShadowJob, leg: Leg, cached_tokens: int, covered_tokens: int | None, detail: str
    ) -> None:
        """The engine answered: book what it holds now, and go on, or back off when that is nothing new."""
        start, upto = leg.chunk
        if covered_tokens is not None:
            upto = min(upto, whole_blocks(covered_tokens, leg.instance.facts.block_size))
        # An export about a rewritten history must not be fetched.
        fetches = leg.kind == pb.LEG_KIND_EXPORT and upto > start and not leg.cancelled
        self._release(now, job, leg, keep_link=fetches)
        if upto < (leg.chunk.end if leg.kind == pb.LEG_KIND_EXPORT else start):
            self._coverage.shrink(job.binding, leg.instance, upto)
        if leg.kind == pb.LEG_KIND_PREFILL:
            # Blocks a cancelled predecessor left behind are found cached, and are shadow work all the same.
            found = start if job.cancelled_prefill else cached_tokens
            job.cancelled_prefill = False
            computed = upto - (found if leg.booked == start else max(found, leg.booked))
            self._coverage.prefill_leg_done(job.binding, leg.instance, upto, max(0, computed))
        elif leg.kind == pb.LEG_KIND_FETCH:
            self._coverage.fetch_leg_done(job.binding, leg.instance, upto)
        if fetches and job.decode is not None:
            # An export alone proves nothing: a fetch that keeps failing must not pin P's blocks every half second.
            job.apply(JobInput.LEG_DONE)
            job.apply(JobInput.START_FETCH)
            self._start(now, job, pb.LEG_KIND_FETCH, job.decode, leg.gateway_id, leg.chunk)
        elif upto > start and leg.kind != pb.LEG_KIND_EXPORT:
            job.failures = 0
            job.apply(JobInput.LEG_DONE)
        elif leg.cancelled:
            job.apply(JobInput.LEG_CANCELLED)
        else:
            what = f"{label(pb.LegKind.DESCRIPTOR, leg.kind)} to {leg.chunk.end} tokens covers {upto}"
            self._back_off(now, job, pb.SHADOW_REASON_NO_PROGRESS, what, detail)

    def _judge_link(self, now: float, job: ShadowJob, *, failed: bool, arrived: bool) -> None:
        """What the end of a fetch says about the link; one that brought nothing, for want of room, says nothing."""
        if job.decode is None:
            return
        if failed:
            self._links.failed(now, job.prefill, job.decode, job)
        elif arrived:
            self._links.succeeded(job.prefill, job.decode)

    def _book(self, job: ShadowJob, leg: Leg) -> None:
        """Book what the instance said it covered of a leg that has not ended well, or that is cut back."""
        new = leg.covered - leg.booked
        if new <= 0:
            return
        leg.booked = leg.covered
        job.failures = 0
        if leg.kind == pb.LEG_KIND_PREFILL:
            self._coverage.prefill_leg_done(job.binding, leg.instance, leg.covered, new)
        else:
            self._coverage.fetch_leg_done(job.binding, leg.instance, leg.covered)

    def _back_off(self, now: float, job: ShadowJob, reason: pb.ShadowReason.ValueType, what: str, detail: str) -> None:
        job.failures += 1
        doublings = min(job.failures - 1, MAX_DOUBLINGS)
        wait = min(self._config.backoff_seconds * 2.0**doublings, self._config.max_backoff_seconds)
        job.retry_at = now + wait
        job.apply(JobInput.LEG_FAILED)
        job.reason = reason
        self._note(job, reason, f"{what}; next try in {wait:g} s. {detail}".strip())

    def _abort(self, now: float, job: ShadowJob, leg: Leg, reason: pb.ShadowReason.ValueType) -> None:
        self._calls.legs[job.model, leg.kind, pb.LEG_OUTCOME_CANCELLED] += 1
        self._emit(CancelLeg(leg.gateway_id, leg.leg_id, reason))
        self._book(job, leg)
        self._release(now, job, leg)
        job.apply(JobInput.LEG_CANCELLED)
        job.reason = reason
        self._settle(job)

    def _release(self, now: float, job: ShadowJob, leg: Leg, *, keep_link: bool = False) -> None:
        del self._legs[leg.leg_id]
        job.leg = None
        if leg.kind == pb.LEG_KIND_FETCH:
            leg.instance.fetch_leg = None
        else:
            del leg.instance.shadow_legs[leg.leg_id]
        if leg.kind in (pb.LEG_KIND_EXPORT, pb.LEG_KIND_FETCH) and not keep_link and job.decode is not None:
            job.decode.settled_gate(now).end_shadow()
            self._links.ended(job.prefill, job.decode, job)

    def _settle(self, job: ShadowJob) -> None:
        """After a leg: a suspension that came in the meantime takes effect."""
        if job.suspended and job.state is JobState.WAITING:
            job.apply(JobInput.SUSPEND)
        self._refresh(job)

    def _refresh(self, job: ShadowJob) -> None:
        """Keep the set of open jobs: those that could take a leg when something gets free."""
        if job.state is JobState.IDLE and not job.suspended and job.target_tokens:
            job.apply(JobInput.TARGET)
        missing = self._missing(job)
        waits = job.state in (JobState.WAITING, JobState.BACKOFF) and not job.suspended
        if waits and missing:
            self._open[job] = None
        else:
            self._open.pop(job, None)
            if waits and not missing:
                job.reason = pb.SHADOW_REASON_WARM

    def _missing(self, job: ShadowJob) -> Chunk | None:
        return job.next_prefill(self._config.chunk_tokens) or job.next_push(self._config.chunk_tokens)

    @staticmethod
    def _touches(job: ShadowJob, leg: Leg, instance: Instance) -> bool:
        return leg.instance is instance or (leg.kind != pb.LEG_KIND_PREFILL and job.decode is instance)


def _has_live_decode(job: ShadowJob) -> bool:
    return job.prefill.colocated or (job.decode is not None and job.decode.alive)


def _fit(push: Chunk, decode: Instance) -> Chunk | None:
    """The part of a push that D has room for, in whole blocks; None when that is not one block."""
    room = decode.shadow_room_tokens
    if room is None:
        return push
    fits = whole_blocks(min(room, push.tokens), decode.facts.block_size)
    return Chunk(push.start, push.start + fits) if fits else None
