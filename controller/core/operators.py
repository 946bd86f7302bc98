"""What operators do: drain, pause, rebind, forget, and change the shadow policy.

The registry's switches hold what was switched; here is what follows from it for instances, jobs and sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from controller.core.call import Call
from controller.core.coverage import Coverage
from controller.core.effects import Limits, PauseEngine
from controller.core.instance import Instance
from controller.core.journal import Journal
from controller.core.registry import Registry
from controller.core.rejection import RejectedError, invalid_field
from controller.core.session import Session, SessionKey, Sessions
from controller.core.shadow_job import ShadowJob
from controller.core.shadow_jobs import ShadowJobs
from controller.core.shadow_policy import ROLES, ShadowPolicy
from controller.core.switches import switch
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.common.reasons import label


class Consequences(NamedTuple):
    """What operators are not alone in setting off: the cluster's own ways."""

    follow_drain: Callable[[float, Instance, bool], None]
    """At a time, for an instance, and whether it drained before."""
    limit_engines: Callable[[float, common.Role.ValueType, Limits], None]
    rehome: Callable[[ShadowJob, Session], None]
    forget: Callable[[float, Session], None]
    schedule: Callable[[float], None]


class Operators:
    """Each method raises RejectedError for a name that is not known, and changes nothing then."""

    def __init__(
        self,
        registry: Registry,
        sessions: Sessions,
        calls: Mapping[str, Call],
        coverage: Coverage,
        jobs: ShadowJobs,
        journal: Journal,
        consequences: Consequences,
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._calls = calls
        self._coverage = coverage
        self._jobs = jobs
        self._journal = journal
        self._then = consequences

    def drain(self, now: float, name: str) -> None:
        """Place nothing new on instances of this name; shadow legs there are cancelled, calls end normally."""
        self._set_draining(now, name, draining=True)

    def undrain(self, now: float, name: str) -> None:
        """Take a drain back."""
        self._set_draining(now, name, draining=False)

    def pause_cluster(self, now: float, *, paused: bool) -> None:
        """Pause all shadow work, or take that back; so for a model or an instance below."""
        self._journal.now = now
        switches = self._registry.switches
        before, switches.cluster_paused = switches.cluster_paused, paused
        self._follow_pauses(now, "cluster", changed=before != paused, paused=paused)

    def pause_model(self, now: float, model: str, *, paused: bool) -> None:
        self._journal.now = now
        self._registry.check_model(model, field="model")
        changed = switch(self._registry.switches.paused_models, model, on=paused)
        self._follow_pauses(now, model, changed=changed, paused=paused)

    def pause_instance(self, now: float, name: str, *, paused: bool) -> None:
        self._journal.now = now
        self._registry.check_known(name, field="instance")
        changed = switch(self._registry.switches.paused_instances, name, on=paused)
        self._follow_pauses(now, name, changed=changed, paused=paused)

    def set_shadow_policy(self, now: float, policy: ShadowPolicy) -> None:
        """Put another policy in force: pausing takes effect at once, gate and top-k with each session's next call."""
        self._journal.now = now
        self._jobs.follow(policy)
        for role in ROLES:
            self._then.limit_engines(now, role, policy.limits(role))
        state = "enabled" if policy.enabled else "paused"
        self._journal.note(admin.EVENT_KIND_SHADOW_POLICY, policy.approach, state, str(policy))
        self._then.schedule(now)

    def rebind(self, now: float, key: SessionKey, model: str, *, prefill: str | None, decode: str | None) -> Session:
        """Bind sides of a session for its next call; None leaves a side, an empty name unbinds it.

        Raises RejectedError also for an instance of another model or role, and for one that takes no calls.
        """
        self._journal.now = now
        session = self._sessions.known(key)
        self._registry.check_model(model, field="model")
        on_prefill = self._target(model, "prefill", prefill, common.ROLE_PREFILL, common.ROLE_COLOCATED)
        on_decode = self._target(model, "decode", decode, common.ROLE_DECODE)
        binding = session.binding(model)
        job = self._jobs.get(key, model)
        if job is not None:
            self._jobs.abort_leg(now, job, common.SHADOW_REASON_REBOUND)
        sides = []
        if prefill is not None:
            self._coverage.rebind_prefill(binding, on_prefill)
            sides.append(f"prefill {prefill or 'unbound'}")
        if decode is not None:
            self._coverage.rebind_decode(binding, on_decode)
            sides.append(f"decode {decode or 'unbound'}")
        if job is not None:
            self._then.rehome(job, session)
        reason = label(common.PlacementReason.DESCRIPTOR, common.PLACEMENT_REASON_REBOUND)
        self._journal.note(admin.EVENT_KIND_SESSION_REBOUND, key.session_id, reason, f"{model}: {', '.join(sides)}")
        self._then.schedule(now)
        return session

    def forget(self, now: float, key: SessionKey) -> None:
        """Forget a session; its calls in flight go on, as calls of no session."""
        self._journal.now = now
        session = self._sessions.known(key)
        for call in self._calls.values():
            if call.session == key:
                call.session = None
        self._then.forget(now, session)
        self._then.schedule(now)

    def _set_draining(self, now: float, name: str, *, draining: bool) -> None:
        self._journal.now = now
        self._registry.check_known(name, field="name")
        switch(self._registry.switches.drained, name, on=draining)
        instance = self._registry.named(name)
        if instance is not None:
            before, instance.drained = instance.draining, draining
            self._then.follow_drain(now, instance, before)

    def _follow_pauses(self, now: float, subject: str, *, changed: bool, paused: bool) -> None:
        """Let every instance do what the switches say, and tell engines with the plugin."""
        if not changed:
            return
        for instance in self._registry:
            pauses = self._registry.switches.pauses(instance.name, instance.model)
            if pauses == instance.paused:
                continue
            instance.pause(now, paused=pauses)
            if pauses:
                self._jobs.pause_on(instance)
            if instance.stream:
                self._journal.emit(PauseEngine(instance.ref, pauses))
        state = "paused" if paused else "resumed"
        self._journal.note(admin.EVENT_KIND_SHADOW_PAUSE, subject, state, f"shadow work {state} by an operator")
        self._then.schedule(now)

    def _target(self, model: str, field: str, name: str | None, *roles: common.Role.ValueType) -> Instance | None:
        """The instance that a side is to be bound to; raises RejectedError unless it can be."""
        if not name:
            return None
        self._registry.check_known(name, field=field)
        instance = self._registry.named(name)
        if instance is None or not instance.ready:
            state = label(common.InstanceState.DESCRIPTOR, instance.shown_state) if instance else "not seen yet"
            raise RejectedError(common.REJECTION_REASON_INSTANCE_NOT_READY, f"{field}: {name} is {state}", field=field)
        if instance.model != model or instance.role not in roles:
            role = label(common.Role.DESCRIPTOR, instance.role)
            raise invalid_field(field, f"{name} is a {role} instance of {instance.model!r}")
        return instance
