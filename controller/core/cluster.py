"""The controller as one object: decisions enter here with the time, and leave as return values or effects."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from controller.config import ControllerConfig
from controller.core.call import Call
from controller.core.coverage import Coverage
from controller.core.effects import DropResident, DropSession, Effect, Event, LimitEngine, Limits, PauseEngine
from controller.core.instance import Facts, Instance, InstanceRef, LoadReport
from controller.core.journal import Journal
from controller.core.ledger import CallLedger, ShadowLedger
from controller.core.links import Link, Links
from controller.core.operators import Consequences, Operators
from controller.core.placement import place_decode, place_prefill
from controller.core.registry import Changes, Declared, Registry, describe_conflict
from controller.core.rejection import RejectedError
from controller.core.session import Binding, Digest, Session, SessionKey, Sessions
from controller.core.shadow_job import ShadowJob
from controller.core.shadow_jobs import ShadowJobs
from controller.core.shadow_policy import ROLES, ShadowPolicy
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.common.reasons import label
from pd_shadow.policy import switch_prior


class ShadowTarget(NamedTuple):
    """A model the session should be warm on, and the engine that renders for it."""

    model: str
    probability: float
    renderer: Instance


class Begun(NamedTuple):
    call: Call
    shadow_targets: list[ShadowTarget]


class CallEnd(NamedTuple):
    """What a gateway says about a call that ended."""

    outcome: common.CallOutcome.ValueType
    handoff: common.Handoff.ValueType = common.HANDOFF_NONE
    recompute_reason: common.RecomputeReason.ValueType = common.RECOMPUTE_REASON_UNSPECIFIED
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Warmth(NamedTuple):
    """How warm one model is for one session; tokens, 0 to 1, seconds."""

    model: str
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    warm_fraction: float
    estimated_prefill_seconds: float
    switch_probability: float


class Cluster:
    """Sessions, instances, calls, shadow jobs and their ledgers.

    Ids are counted, and carry `epoch`, a value that differs between controller lives, so that a call id of an earlier
    life is unknown and never somebody else's.
    """

    def __init__(self, config: ControllerConfig, epoch: str) -> None:
        self.config = config
        policy = ShadowPolicy.configured(config.shadow)
        self.journal = Journal(config.limits.events_kept)
        self.registry = Registry(config.discovery)
        self.sessions = Sessions(config.limits.max_sessions, config.limits.session_idle_seconds)
        self.shadow_ledger = ShadowLedger()
        self.call_ledger = CallLedger()
        self.prior = switch_prior.SwitchPrior()
        self.coverage = Coverage(self.registry, self.shadow_ledger)
        self.links = Links(config.links, self._note_link)
        self.jobs = ShadowJobs(
            config.shadow,
            policy,
            self.coverage,
            self.links,
            self.call_ledger,
            self.journal.emit,
            self._note_job,
            self.registry.neighbours,
        )
        self.calls: dict[str, Call] = {}
        self.operators = Operators(
            self.registry,
            self.sessions,
            self.calls,
            self.coverage,
            self.jobs,
            self.journal,
            Consequences(self._follow_drain, self.limit_engines, self._rehome, self._forget, self._schedule),
        )
        # Dispatchers: connected ones, and when the others left.
        self._connected: set[str] = set()
        self._left: dict[str, float] = {}
        # What engines with the plugin were told, for those that attach later.
        self._engine_limits: dict[common.Role.ValueType, Limits] = {role: policy.limits(role) for role in ROLES}
        self._call_ids = itertools.count(1)
        self._epoch = epoch
        # Grows whenever an instance changes, so that watchers know.
        self.generation = 0

    @property
    def shadow_policy(self) -> ShadowPolicy:
        """The policy in force."""
        return self.jobs.policy

    @property
    def effective_config(self) -> ControllerConfig:
        """The configuration with everything that was changed at run time."""
        shadow = self.config.shadow.model_copy(update=asdict(self.shadow_policy))
        return self.config.model_copy(update={"shadow": shadow})

    # Effects and events.

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; each effect is handed out once."""
        return self.journal.take_effects()

    def events(self, after: int = 0) -> list[Event]:
        """Events with a larger sequence number, oldest first; costs no more than what it returns."""
        return self.journal.events(after)

    # Instances.

    def declare(self, declared: Declared) -> None:
        """Make an instance known; it takes calls once it was observed healthy."""
        self.registry.declare(declared)
        self.generation += 1

    def withdraw(self, now: float, name: str) -> None:
        """Discovery names an instance no longer; one that is attached stays until its stream ends."""
        self.journal.now = now
        self._apply(self.registry.withdraw(name))
        self.generation += 1

    def turn_away(self, now: float, name: str, error: RejectedError) -> None:
        """Tell operators why discovery does not take an instance, and what to change."""
        self.journal.now = now
        reason = label(common.RejectionReason.DESCRIPTOR, error.reason)
        self.journal.note(admin.EVENT_KIND_INSTANCE_STATE, name, reason, error.message)

    def mark_leaving(self, now: float, name: str, *, leaving: bool) -> None:
        """Discovery says that this life ends soon, or after all does not: it drains, whatever operators say."""
        self.journal.now = now
        instance = self.registry.named(name)
        if instance is not None and instance.leaving != leaving:
            drained, instance.leaving = instance.draining, leaving
            self._follow_drain(now, instance, drained)

    def observe(self, now: float, name: str, facts: Facts, load: LoadReport) -> Changes:
        """A healthy look at an instance; raises RejectedError for an unknown name or a replaced incarnation."""
        self.journal.now = now
        changes = self.registry.observe(now, name, facts, load)
        self._apply(changes)
        return changes

    def miss(self, now: float, name: str, *, refused: bool) -> Changes:
        """A look at an instance that failed."""
        self.journal.now = now
        changes = self.registry.miss(now, name, refused=refused)
        self._apply(changes)
        return changes

    # Engines with the plugin, each on a stream of its own.

    def attach(self, now: float, named: Declared, facts: Facts, resident: Sequence[tuple[SessionKey, int]] = ()) -> int:
        """An engine opened a stream, and holds so many tokens of these sessions; returns the stream's number.

        Raises RejectedError for a replaced incarnation, another model or role than known, and a partner it cannot
        exchange KV with.
        """
        self.journal.now = now
        changes, stream = self.registry.attach(now, named, facts)
        self._apply(changes)
        if changes.refused is not None:
            new, reason, partner = changes.refused
            raise RejectedError(reason, describe_conflict(new, reason, partner), field="hello")
        ref = InstanceRef(named.name, facts.incarnation)
        instance = self.registry.attached(ref, stream)
        self.generation += 1
        for key, tokens in resident:
            # Discovery saw this life first, and a leg began: what the engine holds is that leg's, which will say so.
            if self.jobs.has_leg_on(key, instance):
                continue
            session = self.sessions.admit(now, key)
            if session is not None:
                self.coverage.restore(session.binding(instance.model), instance, tokens)
        limits = self._engine_limits.get(instance.role)
        if limits is not None:
            self.journal.emit(LimitEngine(ref, limits))
        # Always: an earlier life of this controller may have said otherwise.
        self.journal.emit(PauseEngine(ref, instance.paused))
        self._schedule(now)
        return stream

    def heartbeat(self, now: float, ref: InstanceRef, stream: int, load: LoadReport) -> None:
        """An attached engine's load; raises RejectedError when its stream no longer counts."""
        self.journal.now = now
        self._apply(self.registry.heartbeat(now, ref, stream, load))

    def detach(self, now: float, ref: InstanceRef, stream: int) -> None:
        """A stream ended."""
        self.journal.now = now
        self._apply(self.registry.detach(ref, stream))

    def limit_engines(self, now: float, role: common.Role.ValueType, limits: Limits) -> None:
        """Tell every attached engine of a role, now and later, to run with other settings."""
        self.journal.now = now
        self._engine_limits[role] = self._engine_limits.get(role, Limits()).overlaid(limits)
        for instance in self.registry:
            if instance.stream and instance.role == role:
                self.journal.emit(LimitEngine(instance.ref, limits))

    def progressed(self, now: float, ref: InstanceRef, key: SessionKey, tokens: int) -> None:
        """An attached engine says how far a session's shadow leg on it has come."""
        self.journal.now = now
        instance = self.registry.live(ref)
        job = self.jobs.get(key, instance.model) if instance is not None else None
        if instance is not None and job is not None:
            self.jobs.progressed(job, instance, tokens)

    def shrunk(self, now: float, ref: InstanceRef, key: SessionKey | None, tokens: int) -> None:
        """An instance evicted part of a session's context, or of every session's (`key` None)."""
        self.journal.now = now
        instance = self.registry.live(ref)
        if instance is None:
            return
        session = self.sessions.get(key) if key is not None else None
        for touched in self.sessions if key is None else [session] if session else []:
            binding = touched.bindings.get(instance.model)
            if binding is not None:
                self.coverage.shrink(binding, instance, tokens)
            job = self.jobs.get(touched.key, instance.model)
            if job is not None:
                self.jobs.shrunk(job, instance, tokens)
        self._schedule(now)

    # Calls.

    def begin_call(
        self,
        now: float,
        gateway_id: str,
        session_key: SessionKey | None,
        model: str,
        *,
        task: str = "",
        prompt_tokens: int = 0,
        digests: tuple[Digest, ...] = (),
    ) -> Begun:
        """Place a call and reserve its load; raises RejectedError."""
        self.journal.now = now
        if len(self.calls) >= self.config.limits.max_calls_in_flight:
            raise RejectedError(
                common.REJECTION_REASON_TOO_MANY_CALLS,
                f"{len(self.calls)} calls are in flight, the most limits.max_calls_in_flight allows",
            )
        models = self.registry.models()
        if model not in models:
            known = ", ".join(models) or "none"
            raise RejectedError(
                common.REJECTION_REASON_UNKNOWN_MODEL, f"unknown model {model!r}; known models: {known}", field="model"
            )
        # A request's own copies would live on in its session.
        model, gateway_id, task = models[models.index(model)], sys.intern(gateway_id), sys.intern(task)
        known_session = self.sessions.get(session_key) if session_key is not None else None
        binding = known_session.bindings.get(model) if known_session else None
        if session_key is not None and binding is None:
            binding = Binding()
        pairs = self.links.of_prefill(now, self.registry.ready(model, common.ROLE_DECODE)) if self.links else None
        prefill = place_prefill(self.registry, model, binding, prompt_tokens, digests, pairs)
        on_prefill = prefill.placed.instance if prefill.placed else None
        colocated = on_prefill is not None and on_prefill.colocated
        decode = (
            prefill.placed
            if colocated
            else place_decode(self.registry, model, binding, self.links.of_decode(now, on_prefill))
        )
        if decode is None:
            raise self._nowhere(model)
        session = self._touch(now, session_key, gateway_id, task) if session_key is not None else None
        is_switch = session is not None and bool(session.current_model) and session.current_model != model
        call = Call(
            f"{self._epoch}-{next(self._call_ids)}",
            gateway_id,
            session_key,
            model,
            prefill.placed,
            decode,
            prompt_tokens,
            prefill.uncached_tokens,
            prefill.expected_warm_tokens,
            is_switch,
            digests,
            begun=now,
        )
        self.calls[call.call_id] = call
        call.reserve()
        if on_prefill is not None and not colocated:
            self.links.begin(now, on_prefill, decode.instance, call)
        for placed in {prefill.placed, decode}:
            if placed is not None:
                self.call_ledger.placements[model, placed.instance.role, placed.reason] += 1
        targets: list[ShadowTarget] = []
        if session is not None:
            self._keep_wishes(session.binding(model), call)
            self._leave_draining(session)
            if session.current_model:
                self.prior.observe(session.task, session.current_model, model)
            session.calls += 1
            session.switches += is_switch
            session.calls_in_flight += 1
            session.current_model = model
            job = self.jobs.get(session.key, model)
            if job is not None:
                self.jobs.suspend(job, common.SHADOW_REASON_MODEL_IN_USE)
            # On hardware the call itself uses, no leg could start before its end, which brings a longer context anyway.
            shared = "" if self.shadow_policy.eager else decode.instance.hardware
            targets = [t for t in self._shadow_targets(now, session) if not shared or t.renderer.hardware != shared]
        self.jobs.preempt(prefill.placed.instance if prefill.placed else decode.instance)
        self._schedule(now)
        return Begun(call, targets)

    def progress(self, now: float, call_id: str, phase: pb.CallPhase.ValueType) -> None:
        """A call moved on; raises RejectedError for an unknown call."""
        self.journal.now = now
        call = self._call(call_id)
        call.advance(now, phase)
        session = self.sessions.get(call.session) if call.session else None
        if session is not None:
            # The engine took the leg: only now is the session bound to it.
            if phase >= pb.CALL_PHASE_TRANSFER and call.prefill is not None and call.prefill.instance.alive:
                self._bind_prefill(session, call)
            if phase >= pb.CALL_PHASE_DECODE and call.decode.instance.alive and not call.colocated:
                self.coverage.bind_decode(session.binding(call.model), call.decode.instance)
        self._schedule(now)

    def end_call(self, now: float, call_id: str, end: CallEnd) -> list[ShadowTarget]:
        """End a call; returns the models to render its context for. Raises RejectedError for an unknown call."""
        self.journal.now = now
        call = self._call(call_id)
        self._judge_link(now, call, end)
        self._close(now, call, end.outcome)
        self._book(call, end)
        session = self.sessions.get(call.session) if call.session else None
        targets: list[ShadowTarget] = []
        if session is not None and end.prompt_tokens:
            self._settle_coverage(session, call, end)
            if end.outcome == common.CALL_OUTCOME_COMPLETED:
                targets = self._shadow_targets(now, session)
        if call.prefill is not None and call.prefilled_at is not None:
            call.prefill.instance.observe_prefill(end.prompt_tokens - end.cached_tokens, call.prefilled_at - call.begun)
        self._schedule(now)
        return targets

    # Shadow work.

    def rendered(
        self,
        now: float,
        gateway_id: str,
        key: SessionKey,
        model: str,
        *,
        revision: int,
        tokens: int = 0,
        kept_tokens: int = 0,
        error: str = "",
    ) -> None:
        """A dispatcher rendered a session's context for a model, or could not."""
        self.journal.now = now
        session = self.sessions.get(key)
        job = self.jobs.get(key, model)
        if session is None or job is None or session.gateway_id != gateway_id:
            return
        if error:
            self._note_job(job, common.SHADOW_REASON_RENDERING, f"rendering failed: {error}")
            return
        self.jobs.rendered(job, revision, tokens, kept_tokens, in_use=session.current_model == model)
        self._schedule(now)

    def leg_finished(
        self,
        now: float,
        gateway_id: str,
        leg_id: str,
        outcome: common.LegOutcome.ValueType,
        cached_tokens: int = 0,
        detail: str = "",
        covered_tokens: int | None = None,
        *,
        transfer_failed: bool = False,
    ) -> None:
        """A dispatcher's word on how a leg ended; if the engine says so, `covered_tokens` is what it holds now, and
        `transfer_failed` that no KV arrived.
        """
        self.journal.now = now
        self.jobs.finished(
            now,
            leg_id,
            gateway_id,
            outcome,
            cached_tokens,
            covered_tokens,
            detail,
            transfer_failed=transfer_failed,
        )
        self._schedule(now)

    def dispatcher_connected(self, now: float, gateway_id: str) -> None:
        """A gateway's shadow stream opened; legs of an earlier stream are lost."""
        self.journal.now = now
        self.jobs.abort_of(now, gateway_id, common.SHADOW_REASON_NO_DISPATCHER)
        self._connected.add(gateway_id)
        self._left.pop(gateway_id, None)
        self.journal.note(admin.EVENT_KIND_GATEWAY, gateway_id, "connected", "shadow stream open")
        self._schedule(now)

    def dispatcher_left(self, now: float, gateway_id: str) -> None:
        """A gateway's shadow stream ended: its legs are lost now, its calls if it does not come back in time."""
        self.journal.now = now
        self._connected.discard(gateway_id)
        self._left[gateway_id] = now
        self.jobs.abort_of(now, gateway_id, common.SHADOW_REASON_NO_DISPATCHER)
        self.journal.note(admin.EVENT_KIND_GATEWAY, gateway_id, "left", "shadow stream ended")
        self._schedule(now)

    # Reads.

    def warmth(self, key: SessionKey) -> tuple[str, list[Warmth]]:
        """The session's current model, and every model's warmth, likeliest next model first.

        Raises RejectedError for an unknown session.
        """
        session = self.sessions.known(key)
        models = self.registry.models()
        found = [self._warmth(session, model, len(models)) for model in models]
        return session.current_model, sorted(found, key=lambda warmth: (-warmth.switch_probability, warmth.model))

    # Time.

    def tick(self, now: float) -> None:
        """Whatever is due: silent legs, lost gateways, overdue calls, idle sessions, retries."""
        self.journal.now = now
        self.jobs.tick(now)
        self._apply(self.registry.tick(now))
        limits = self.config.limits
        for gateway_id, since in list(self._left.items()):
            if now - since >= limits.gateway_grace_seconds:
                del self._left[gateway_id]
                self._give_up([c for c in self.calls.values() if c.gateway_id == gateway_id], now)
        self._give_up([c for c in self.calls.values() if now - c.begun >= limits.max_call_seconds], now)
        for session in self.sessions.expired(now):
            self._forget(now, session)
        self._schedule(now)

    def give_up_calls(self, now: float) -> None:
        """Another controller leads: the calls in flight will not end here."""
        self.journal.now = now
        self._give_up(list(self.calls.values()), now)

    # Internals.

    def _follow_drain(self, now: float, instance: Instance, before: bool) -> None:
        """An instance drains now, or no longer does; nothing happens where that is as before."""
        if instance.draining == before:
            return
        if instance.draining:
            self.jobs.abort_on(now, instance, common.SHADOW_REASON_INSTANCE_DRAINING)
        self.generation += 1
        if instance.alive:
            self.journal.note_state(instance)
        self._schedule(now)

    def _note_job(self, job: ShadowJob, reason: common.ShadowReason.ValueType, message: str) -> None:
        subject = f"{job.session.session_id}/{job.model}"
        self.journal.note(admin.EVENT_KIND_SHADOW_JOB, subject, label(common.ShadowReason.DESCRIPTOR, reason), message)

    def _note_link(self, link: Link, state: common.LinkState.ValueType, message: str) -> None:
        if state == common.LINK_STATE_QUARANTINED:
            self.call_ledger.quarantines[link.model] += 1
        subject = f"{link.key.prefill.name}/{link.key.decode.name}"
        self.journal.note(admin.EVENT_KIND_LINK, subject, label(common.LinkState.DESCRIPTOR, state), message)

    def _call(self, call_id: str) -> Call:
        call = self.calls.get(call_id)
        if call is None:
            raise RejectedError(
                common.REJECTION_REASON_UNKNOWN_CALL, f"call {call_id!r} ended or never began here", field="call_id"
            )
        return call

    def _apply(self, changes: Changes) -> None:
        if changes.refused is not None:
            new, refusal, partner = changes.refused
            self.journal.note(
                admin.EVENT_KIND_INSTANCE_STATE,
                new.name,
                label(common.RejectionReason.DESCRIPTOR, refusal),
                describe_conflict(new, refusal, partner),
            )
        for instance in changes.state_changed:
            self.generation += 1
            self.journal.note_state(instance)
        for instance, reason in changes.lost:
            self.jobs.abort_on(self.journal.now, instance, common.SHADOW_REASON_INSTANCE_LOST)
            self.links.forget(instance)
            for session in self.sessions:
                for model, binding in session.bindings.items():
                    if model == instance.model and self.coverage.leave(binding, instance, reason):
                        self.journal.note_left(session, instance, reason)
        for model in dict.fromkeys(instance.model for instance in changes.state_changed):
            for job in self.jobs.homeless(model):
                owner = self.sessions.get(job.session)
                if owner is not None:
                    self._rehome(job, owner)
        if changes.state_changed:
            self._schedule(self.journal.now)

    def _rehome(self, job: ShadowJob, session: Session) -> None:
        """Give a job without a leg the P and D its session's binding says, if there are any."""
        sides = self._shadow_sides(session, job.model)
        if sides is not None:
            self.jobs.rehome(job, *sides)

    def _nowhere(self, model: str) -> RejectedError:
        """Why a call for this model cannot be placed."""
        generating = (common.ROLE_DECODE, common.ROLE_COLOCATED)
        draining = [
            i.name
            for i in self.registry
            if i.model == model and i.role in generating and i.shown_state == common.INSTANCE_STATE_DRAINING
        ]
        if draining:
            return RejectedError(
                common.REJECTION_REASON_ALL_DRAINING,
                f"every decode or colocated instance of {model!r} that is up drains: {', '.join(sorted(draining))}",
                field="model",
            )
        return RejectedError(
            common.REJECTION_REASON_NO_READY_INSTANCE,
            f"no decode or colocated instance of {model!r} is ready",
            field="model",
        )

    def _leave_draining(self, session: Session) -> None:
        """Unbind the session's sides on instances that drain, where others can take their place."""
        reason = common.PLACEMENT_REASON_INSTANCE_DRAINING
        for model, binding in session.bindings.items():
            for ref in (binding.prefill, binding.decode):
                instance = self.registry.live(ref)
                if instance is None or not instance.draining or not self.registry.ready(model, instance.role):
                    continue
                self.coverage.leave(binding, instance, reason, common.SHADOW_REASON_INSTANCE_DRAINING)
                self.journal.note_left(session, instance, reason)

    @staticmethod
    def _keep_wishes(binding: Binding, call: Call) -> None:
        """A call that could not follow an operator's wish ends it, so that it binds the session where it goes."""
        if call.prefill is None or call.prefill.instance.ref != binding.prefill:
            binding.prefill_wished = False
        if call.decode.instance.ref != binding.decode:
            binding.decode_wished = False

    def _touch(self, now: float, key: SessionKey, gateway_id: str, task: str) -> Session:
        session, evicted = self.sessions.touch(now, key)
        for other in evicted:
            self._forget(now, other)
        session.gateway_id = gateway_id
        session.task = task or session.task
        return session

    def _forget(self, now: float, session: Session) -> None:
        reason = common.SHADOW_REASON_FORGOTTEN
        self.jobs.drop(now, session.key, list(session.bindings), reason)
        for binding in session.bindings.values():
            for ref in dict.fromkeys((binding.prefill, binding.decode)):
                instance = self.registry.live(ref)
                if instance is not None and instance.stream:
                    self.journal.emit(DropResident(instance.ref, session.key))
        self.coverage.forget(session)
        self.sessions.remove(session.key)
        self.journal.emit(DropSession(session.gateway_id, session.key, reason))
        self.journal.note(
            admin.EVENT_KIND_SESSION_FORGOTTEN,
            session.key.session_id,
            label(common.ShadowReason.DESCRIPTOR, reason),
            f"after {session.calls} calls",
        )

    def _shadow_targets(self, now: float, session: Session) -> list[ShadowTarget]:
        """Make or update the session's jobs on the models it is not on; the ones worth rendering for."""
        shadow = self.shadow_policy
        if not shadow.enabled:
            return []
        # A model that no P can take is no candidate: it would use up one of the top k for nothing.
        sides_of = {}
        for model in self.registry.models():
            sides = self._shadow_sides(session, model) if model != session.current_model else None
            if sides is not None:
                sides_of[model] = sides
        ranked = self.prior.rank(
            session.task,
            session.current_model,
            self.registry.models(),
            shadowable=sides_of,
            gate=shadow.gate_probability,
            top_k=shadow.top_k,
        )
        targets = []
        for model, probability, verdict in ranked:
            sides = sides_of[model]
            job = self.jobs.want(now, session, model, *sides, probability)
            if verdict is switch_prior.Verdict.SHADOW:
                # Nothing could come of a rendering yet; the session's next call asks for a new one.
                if sides[0].paused or sides[0].draining:
                    continue
                targets.append(ShadowTarget(model, probability, sides[0]))
            else:
                self.jobs.suspend(job, common.ShadowReason.Value(f"SHADOW_REASON_{verdict.name}"))
        return targets

    def _shadow_sides(self, session: Session, model: str) -> tuple[Instance, Instance | None] | None:
        """The P and D a shadow of the session runs on, sticky where bound; None when no P can take it.

        A colocated instance is its own D: nothing is pushed.
        """
        binding = session.binding(model)
        prefill = self.registry.live(binding.prefill)
        if prefill is None:
            placement = place_prefill(self.registry, model, Binding(), 0, ())
            if placement.placed is None:
                return None
            prefill = placement.placed.instance
        if prefill.colocated:
            return prefill, None
        decode = self.registry.live(binding.decode)
        if decode is None:
            placed = place_decode(self.registry, model, Binding(), self.links.of_decode(self.journal.now, prefill))
            decode = placed.instance if placed else None
        return prefill, decode

    def _bind_prefill(self, session: Session, call: Call) -> None:
        if call.prefill is not None:
            self.coverage.bind_prefill(session.binding(call.model), call.prefill.instance)

    def _settle_coverage(self, session: Session, call: Call, end: CallEnd) -> None:
        binding = session.binding(call.model)
        if call.colocated:
            if call.decode.instance.alive and end.outcome == common.CALL_OUTCOME_COMPLETED:
                # Only a whole answer tells what was cached. Its output lies beside the prompt; the last token's KV is
                # never written.
                context = end.prompt_tokens + end.completion_tokens - 1
                self.coverage.call_prefilled(binding, call.decode.instance, context, end.cached_tokens, call.digests)
            return
        prefilled = end.handoff == common.HANDOFF_HANDED_OFF or (
            end.recompute_reason == common.RECOMPUTE_REASON_TRANSFER_FAILED
        )
        if call.prefill is not None and call.prefill.instance.alive and prefilled:
            self.coverage.call_prefilled(
                binding, call.prefill.instance, end.prompt_tokens, end.cached_tokens, call.digests
            )
        if call.decode.instance.alive and end.handoff != common.HANDOFF_NONE and end.completion_tokens:
            self.coverage.call_decoded(binding, call.decode.instance, end.prompt_tokens + end.completion_tokens)

    def _book(self, call: Call, end: CallEnd) -> None:
        ledger = self.call_ledger
        ledger.calls += 1
        ledger.switches += call.is_switch
        ledger.prompt_tokens += end.prompt_tokens
        ledger.cached_tokens += end.cached_tokens
        if call.is_switch:
            ledger.switch_prompt_tokens += end.prompt_tokens
            ledger.switch_cached_tokens += end.cached_tokens
        if end.handoff == common.HANDOFF_HANDED_OFF:
            ledger.handed_off += 1
            ledger.handed_off_by_model[call.model] += 1
        elif end.handoff == common.HANDOFF_RECOMPUTED:
            ledger.recomputed += 1
            ledger.recompute_reasons[call.model, end.recompute_reason] += 1
            self.journal.note(
                admin.EVENT_KIND_HANDOFF_RECOMPUTED,
                call.decode.instance.name,
                label(common.RecomputeReason.DESCRIPTOR, end.recompute_reason),
                f"{call.model}: {end.prompt_tokens} tokens",
            )

    def _judge_link(self, now: float, call: Call, end: CallEnd) -> None:
        """What the end of a call says about the link between its P and D."""
        if call.prefill is None or call.colocated:
            return
        prefill, decode = call.prefill.instance, call.decode.instance
        if end.handoff == common.HANDOFF_HANDED_OFF:
            self.links.succeeded(prefill, decode)
        elif (
            end.handoff == common.HANDOFF_RECOMPUTED and end.recompute_reason == common.RECOMPUTE_REASON_TRANSFER_FAILED
        ):
            self.links.failed(now, prefill, decode, call)

    def _close(self, now: float, call: Call, outcome: common.CallOutcome.ValueType) -> None:
        del self.calls[call.call_id]
        call.release(now)
        if call.prefill is not None:
            self.links.ended(call.prefill.instance, call.decode.instance, call)
        self.call_ledger.outcomes[call.model, outcome] += 1
        session = self.sessions.get(call.session) if call.session else None
        if session is not None:
            session.calls_in_flight -= 1

    def _give_up(self, calls: list[Call], now: float) -> None:
        for call in calls:
            self._close(now, call, common.CALL_OUTCOME_GATEWAY_LOST)

    def _warmth(self, session: Session, model: str, models: int) -> Warmth:
        binding = session.bindings.get(model) or Binding()
        job = self.jobs.get(session.key, model)
        drains = {ref for ref in (binding.prefill, binding.decode) if self._draining(ref)}
        # A side that lost its instance tells nothing any more, the other one still does.
        context = max(job.target_tokens if job else 0, binding.prefill_tokens) or binding.decode_tokens
        if not context and session.current_model:
            used = session.binding(session.current_model)
            context = used.prefill_tokens or used.decode_tokens
        # A call placed now would leave an instance that drains.
        held = 0 if binding.prefill in drains else min(binding.prefill_tokens, context)
        seconds = self._prefill_seconds(model, binding, context)
        probability = self.prior.probability(session.task, session.current_model, model, models)
        return Warmth(
            model,
            held,
            0 if binding.decode in drains else min(binding.decode_tokens, context),
            context,
            held / context if context else 0.0,
            seconds,
            probability,
        )

    def _prefill_seconds(self, model: str, binding: Binding, context: int) -> float:
        """Estimated seconds until a call's prompt would be computed; infinite when no instance takes calls."""
        prefill = place_prefill(self.registry, model, binding, context, ())
        if prefill.placed is not None and prefill.placed.instance.colocated:
            return prefill.completion_seconds
        decode = place_decode(self.registry, model, binding)
        if decode is None:
            return math.inf
        if prefill.placed is not None:
            return prefill.completion_seconds
        # Without P, D computes what it does not hold.
        held = binding.decode_tokens if decode.instance.ref == binding.decode else 0
        return max(0, context - held) / decode.instance.prefill_tokens_per_second

    def _draining(self, ref: InstanceRef | None) -> bool:
        instance = self.registry.live(ref)
        return instance is not None and instance.draining

    def _schedule(self, now: float) -> None:
        self.jobs.schedule(now, self._connected.__contains__, self._gateway_of)

    def _gateway_of(self, key: SessionKey) -> str:
        session = self.sessions.get(key)
        return session.gateway_id if session else ""
