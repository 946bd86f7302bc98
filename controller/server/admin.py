"""AdminService: what operators read, steer and change."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from google.protobuf import json_format, struct_pb2

from controller.core.cluster import Cluster
from controller.core.effects import Event
from controller.core.instance import Instance
from controller.core.rejection import RejectedError, unknown
from controller.core.session import Session
from controller.core.shadow_job import ShadowJob
from controller.server import convert, paging, validation
from controller.server.errors import abort
from controller.server.plane import Plane
from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import admin_pb2_grpc
from pd_shadow.api.v1 import common_pb2 as common

S = TypeVar("S", bound="AdminServicer")
Request = TypeVar("Request")
Response = TypeVar("Response")

DEFAULT_INTERVAL_SECONDS = 1.0
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.1, 3600.0


def _answered(
    handle: Callable[[S, Request], Response],
) -> Callable[[S, Request, Any], Awaitable[Response]]:
    """An RPC out of a method that answers at once; its refusals become statuses with details."""

    @functools.wraps(handle)
    async def rpc(self: S, request: Request, context: Any) -> Response:
        try:
            return handle(self, request)
        except RejectedError as error:
            await abort(context, error)

    return rpc


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Translates between messages and the core."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    # Reads.

    @_answered
    def ListModels(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:  # noqa: N802
        return self._models(request)

    @_answered
    def GetModel(self, request: pb.GetModelRequest) -> pb.GetModelResponse:  # noqa: N802
        name = validation.name("name", request.name)
        self._cluster.registry.check_model(name, field="name")
        return pb.GetModelResponse(model=self._model(name))

    @_answered
    def ListInstances(self, request: pb.ListInstancesRequest) -> pb.ListInstancesResponse:  # noqa: N802
        return self._instances(request)

    @_answered
    def GetInstance(self, request: pb.GetInstanceRequest) -> pb.GetInstanceResponse:  # noqa: N802
        return pb.GetInstanceResponse(instance=self._instance(self._seen("name", request.name)))

    @_answered
    def ListSessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:  # noqa: N802
        return self._sessions(request)

    @_answered
    def GetSession(self, request: pb.GetSessionRequest) -> pb.GetSessionResponse:  # noqa: N802
        key = validation.session_key("session", request.session)
        return pb.GetSessionResponse(session=self._session(self._cluster.sessions.known(key)))

    @_answered
    def ListShadowJobs(self, request: pb.ListShadowJobsRequest) -> pb.ListShadowJobsResponse:  # noqa: N802
        return self._jobs(request)

    @_answered
    def GetShadowJob(self, request: pb.GetShadowJobRequest) -> pb.GetShadowJobResponse:  # noqa: N802
        key = validation.session_key("session", request.session)
        model = validation.name("model", request.model)
        job = self._cluster.jobs.get(key, model)
        if job is None:
            self._cluster.sessions.known(key)
            self._cluster.registry.check_model(model, field="model")
            raise RejectedError(
                common.REJECTION_REASON_UNKNOWN_SHADOW_JOB,
                f"no shadow job of session {key.session_id!r} on {model!r}",
                field="model",
            )
        return pb.GetShadowJobResponse(job=_job(job))

    @_answered
    def ListLinks(self, request: pb.ListLinksRequest) -> pb.ListLinksResponse:  # noqa: N802
        return self._links(request)

    @_answered
    def GetLink(self, request: pb.GetLinkRequest) -> pb.GetLinkResponse:  # noqa: N802
        name = validation.name("decode", request.decode)
        links = {i.name: i for i in self._cluster.registry if i.role == common.ROLE_DECODE}
        if name not in links:
            raise unknown(common.REJECTION_REASON_UNKNOWN_INSTANCE, "decode instance", name, links, field="decode")
        return pb.GetLinkResponse(link=self._link(links[name]))

    @_answered
    def ListEvents(self, request: pb.ListEventsRequest) -> pb.ListEventsResponse:  # noqa: N802
        page = paging.wanted("events", 0, request.page_size, "")
        wanted = _event_filter(request.kinds, request.subject)
        events = filter(wanted, self._cluster.events(request.after_sequence))
        return pb.ListEventsResponse(events=[self._event(event) for event in itertools.islice(events, page.size)])

    async def WatchEvents(  # noqa: N802
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        try:
            wanted = _event_filter(request.kinds, request.subject)
            with self._plane.watching():
                seen = max((event.sequence for event in self._cluster.events()), default=0)
                if request.HasField("after_sequence"):
                    # Of an earlier controller's life, a number may be larger than any here.
                    seen = min(seen, request.after_sequence)
                await context.send_initial_metadata(())
                while not self._plane.closing:
                    fresh = self._cluster.events(seen)
                    if not fresh:
                        await self._plane.changes()
                    for event in fresh:
                        seen = event.sequence
                        if wanted(event):
                            yield pb.WatchEventsResponse(event=self._event(event))
        except RejectedError as error:
            await abort(context, error)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        last: pb.WatchResponse | None = None
        try:
            interval = _interval(request.interval_seconds)
            with self._plane.watching():
                while not self._plane.closing:
                    current = self._watched(request)
                    if current != last:
                        last = current
                        yield current
                    await self._plane.pause(interval)
        except RejectedError as error:
            await abort(context, error)

    @_answered
    def GetLedger(self, request: pb.GetLedgerRequest) -> pb.GetLedgerResponse:  # noqa: N802
        return self._ledger()

    @_answered
    def GetStatistics(self, request: pb.GetStatisticsRequest) -> pb.GetStatisticsResponse:  # noqa: N802
        calls, shadow = self._cluster.call_ledger, self._cluster.shadow_ledger
        jobs = Counter(job.reason for job in self._cluster.jobs)
        return pb.GetStatisticsResponse(
            outcomes=[
                pb.OutcomeCount(model=model, outcome=outcome, count=count)
                for (model, outcome), count in sorted(calls.outcomes.items())
            ],
            placements=[
                pb.PlacementCount(model=model, role=role, reason=reason, count=count)
                for (model, role, reason), count in sorted(calls.placements.items())
            ],
            recomputed=[
                pb.RecomputeCount(model=model, reason=why, count=count)
                for (model, why), count in sorted(calls.recompute_reasons.items())
            ],
            legs=[
                pb.LegCount(model=model, kind=kind, outcome=leg_outcome, count=count)
                for (model, kind, leg_outcome), count in sorted(calls.legs.items())
            ],
            wasted_tokens=[
                pb.ShadowReasonCount(reason=why_wasted, count=count)
                for why_wasted, count in sorted(shadow.by_waste_reason.items())
            ],
            shadow_jobs=[
                pb.ShadowReasonCount(reason=job_reason, count=count) for job_reason, count in sorted(jobs.items())
            ],
            sessions=len(self._cluster.sessions),
            uptime_seconds=self._plane.now() - self._plane.started,
        )

    @_answered
    def GetEffectiveConfig(self, request: pb.GetEffectiveConfigRequest) -> pb.GetEffectiveConfigResponse:  # noqa: N802
        config = struct_pb2.Struct()
        json_format.ParseDict(self._cluster.effective_config.model_dump(mode="json"), config)
        return pb.GetEffectiveConfigResponse(
            config=config,
            policy=convert.shadow_policy(self._cluster.shadow_policy),
            pauses=self._pauses(),
            drained_instances=sorted(self._cluster.registry.switches.drained),
        )

    # Changes.

    @_answered
    def SetShadowPolicy(self, request: pb.SetShadowPolicyRequest) -> pb.SetShadowPolicyResponse:  # noqa: N802
        given = {field.name: value for field, value in request.ListFields()}
        with self._plane.turn() as (cluster, now):
            cluster.operators.set_shadow_policy(now, cluster.shadow_policy.changed(**given))
        return pb.SetShadowPolicyResponse(policy=convert.shadow_policy(self._cluster.shadow_policy))

    @_answered
    def PauseShadow(self, request: pb.PauseShadowRequest) -> pb.PauseShadowResponse:  # noqa: N802
        self._pause(request, paused=True)
        return pb.PauseShadowResponse(pauses=self._pauses())

    @_answered
    def ResumeShadow(self, request: pb.ResumeShadowRequest) -> pb.ResumeShadowResponse:  # noqa: N802
        self._pause(request, paused=False)
        return pb.ResumeShadowResponse(pauses=self._pauses())

    @_answered
    def DrainInstance(self, request: pb.DrainInstanceRequest) -> pb.DrainInstanceResponse:  # noqa: N802
        name = validation.name("name", request.name)
        with self._plane.turn() as (cluster, now):
            cluster.operators.drain(now, name)
        instance = self._cluster.registry.named(name)
        if instance is None:
            return pb.DrainInstanceResponse()
        others = self._cluster.registry.ready(instance.model, instance.role)
        return pb.DrainInstanceResponse(instance=self._instance(instance), others_ready=len(others))

    @_answered
    def UndrainInstance(self, request: pb.UndrainInstanceRequest) -> pb.UndrainInstanceResponse:  # noqa: N802
        name = validation.name("name", request.name)
        with self._plane.turn() as (cluster, now):
            cluster.operators.undrain(now, name)
        instance = self._cluster.registry.named(name)
        return pb.UndrainInstanceResponse(instance=self._instance(instance) if instance else None)

    @_answered
    def RebindSession(self, request: pb.RebindSessionRequest) -> pb.RebindSessionResponse:  # noqa: N802
        key = validation.session_key("session", request.session)
        model = validation.name("model", request.model)
        sides = {
            side: validation.name(side, getattr(request, side), empty=True) if request.HasField(side) else None
            for side in ("prefill", "decode")
        }
        if sides == {"prefill": None, "decode": None}:
            raise validation.invalid("prefill", "set prefill, decode or both; an empty name unbinds the side")
        with self._plane.turn() as (cluster, now):
            session = cluster.operators.rebind(now, key, model, prefill=sides["prefill"], decode=sides["decode"])
        return pb.RebindSessionResponse(session=self._session(session))

    @_answered
    def ForgetSession(self, request: pb.ForgetSessionRequest) -> pb.ForgetSessionResponse:  # noqa: N802
        key = validation.session_key("session", request.session)
        with self._plane.turn() as (cluster, now):
            cluster.operators.forget(now, key)
        return pb.ForgetSessionResponse()

    # Internals.

    @property
    def _cluster(self) -> Cluster:
        return self._plane.cluster

    def _watched(self, request: pb.WatchRequest) -> pb.WatchResponse:
        match request.WhichOneof("what"):
            case "models":
                return pb.WatchResponse(models=self._models(request.models))
            case "instances":
                return pb.WatchResponse(instances=self._instances(request.instances))
            case "sessions":
                return pb.WatchResponse(sessions=self._sessions(request.sessions))
            case "shadow_jobs":
                return pb.WatchResponse(shadow_jobs=self._jobs(request.shadow_jobs))
            case "links":
                return pb.WatchResponse(links=self._links(request.links))
            case "ledger":
                return pb.WatchResponse(ledger=self._ledger())
            case _:
                raise validation.invalid("what", "set one of models, instances, sessions, shadow_jobs, links, ledger")

    def _pause(self, request: pb.PauseShadowRequest | pb.ResumeShadowRequest, *, paused: bool) -> None:
        scope = request.WhichOneof("scope")
        if scope is None or (scope == "cluster" and not request.cluster):
            raise validation.invalid("scope", "set cluster to true, or name a model or an instance")
        with self._plane.turn() as (cluster, now):
            match scope:
                case "cluster":
                    cluster.operators.pause_cluster(now, paused=paused)
                case "model":
                    cluster.operators.pause_model(now, validation.name("model", request.model), paused=paused)
                case "instance":
                    cluster.operators.pause_instance(now, validation.name("instance", request.instance), paused=paused)

    def _pauses(self) -> pb.ShadowPauses:
        switches = self._cluster.registry.switches
        return pb.ShadowPauses(
            cluster=switches.cluster_paused,
            models=sorted(switches.paused_models),
            instances=sorted(switches.paused_instances),
        )

    def _seen(self, field: str, name: str) -> Instance:
        """An instance with a life, now or once; raises RejectedError."""
        registry = self._cluster.registry
        registry.check_known(validation.name(field, name), field=field)
        instance = registry.named(name)
        if instance is None:
            raise RejectedError(
                common.REJECTION_REASON_UNKNOWN_INSTANCE, f"{name} is declared, but was not seen yet", field=field
            )
        return instance

    def _models(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        page = paging.wanted("models", 1, request.page_size, request.page_token)
        names, token = paging.cut(page, self._cluster.registry.models(), lambda name: (name,))
        return pb.ListModelsResponse(models=[self._model(name) for name in names], next_page_token=token)

    def _model(self, name: str) -> pb.Model:
        registry = self._cluster.registry
        ready = {role: registry.ready(name, role) for role in common.Role.values()}
        context_tokens = [i.facts.max_context_tokens for instances in ready.values() for i in instances]
        return pb.Model(
            name=name,
            prefill_ready=len(ready[common.ROLE_PREFILL]),
            decode_ready=len(ready[common.ROLE_DECODE]),
            colocated_ready=len(ready[common.ROLE_COLOCATED]),
            max_context_tokens=min(context_tokens, default=0),
            shadow_paused=registry.switches.pauses_model(name),
        )

    def _instances(self, request: pb.ListInstancesRequest) -> pb.ListInstancesResponse:
        page = paging.wanted("instances", 1, request.page_size, request.page_token)
        role = validation.enum_value("role", common.Role.DESCRIPTOR, request.role)
        state = validation.enum_value("state", common.InstanceState.DESCRIPTOR, request.state)
        found = (
            i
            for i in self._cluster.registry
            if request.model in ("", i.model) and role in (0, i.role) and state in (0, i.shown_state)
        )
        instances, token = paging.cut(page, found, lambda i: (i.name,))
        return pb.ListInstancesResponse(instances=[self._instance(i) for i in instances], next_page_token=token)

    def _sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        page = paging.wanted("sessions", 2, request.page_size, request.page_token)
        tenant = request.tenant if request.HasField("tenant") else None
        found = (
            session
            for session in self._cluster.sessions
            if tenant in (None, session.key.tenant)
            and request.model in ("", session.current_model)
            and (not request.instance or _bound_to(session, request.instance))
        )
        sessions, token = paging.cut(page, found, lambda session: tuple(session.key))
        return pb.ListSessionsResponse(sessions=[self._session(s) for s in sessions], next_page_token=token)

    def _jobs(self, request: pb.ListShadowJobsRequest) -> pb.ListShadowJobsResponse:
        page = paging.wanted("shadow_jobs", 3, request.page_size, request.page_token)
        reason = validation.enum_value("reason", common.ShadowReason.DESCRIPTOR, request.reason)
        found = (job for job in self._cluster.jobs if request.model in ("", job.model) and reason in (0, job.reason))
        jobs, token = paging.cut(page, found, lambda job: (*job.session, job.model))
        return pb.ListShadowJobsResponse(jobs=[_job(job) for job in jobs], next_page_token=token)

    def _links(self, request: pb.ListLinksRequest) -> pb.ListLinksResponse:
        page = paging.wanted("links", 1, request.page_size, request.page_token)
        found = (i for i in self._cluster.registry if i.role == common.ROLE_DECODE and request.model in ("", i.model))
        instances, token = paging.cut(page, found, lambda i: (i.name,))
        return pb.ListLinksResponse(links=[self._link(i) for i in instances], next_page_token=token)

    def _link(self, instance: Instance) -> pb.Link:
        instance.link.settle(self._plane.now())
        return pb.Link(
            decode=convert.ref(instance.ref),
            model=instance.model,
            gate=common.GateReason.Value(f"GATE_REASON_{instance.gate.state.name}"),
            normal_transfers=instance.gate.normal_transfers,
            shadow_chunks=instance.gate.shadow_chunks,
            normal_seconds=instance.link.normal_seconds,
            shadow_seconds=instance.link.shadow_seconds,
            idle_seconds=instance.link.idle_seconds,
            failing=[
                pb.FailingPair(
                    prefill=convert.ref(known.key.prefill),
                    state=known.state,
                    failures=known.failures,
                    until=self._time(known.until) if known.quarantined else None,
                )
                for known in self._cluster.links.into(instance)
            ],
        )

    def _ledger(self) -> pb.GetLedgerResponse:
        cluster = self._cluster
        shadow, calls, instances = cluster.shadow_ledger, cluster.call_ledger, list(cluster.registry)
        return pb.GetLedgerResponse(
            shadow=pb.ShadowLedger(
                prefilled_tokens=shadow.prefilled,
                pushed_tokens=shadow.pushed,
                hit_tokens=shadow.hit,
                wasted_tokens=shadow.wasted,
                resident_tokens=shadow.resident,
            ),
            calls=pb.CallLedger(
                calls=calls.calls,
                switches=calls.switches,
                handed_off=calls.handed_off,
                recomputed=calls.recomputed,
                prompt_tokens=calls.prompt_tokens,
                cached_tokens=calls.cached_tokens,
                switch_prompt_tokens=calls.switch_prompt_tokens,
                switch_cached_tokens=calls.switch_cached_tokens,
            ),
            in_flight=pb.InFlight(
                calls=len(cluster.calls),
                pending_prefill_tokens=sum(i.pending_prefill_tokens for i in instances),
                normal_transfers=sum(i.gate.normal_transfers for i in instances),
                shadow_legs=cluster.jobs.legs_in_flight,
                shadow_chunks=sum(i.gate.shadow_chunks for i in instances),
            ),
        )

    def _instance(self, instance: Instance) -> pb.Instance:
        return pb.Instance(
            endpoint=convert.endpoint(instance),
            role=instance.role,
            model=instance.model,
            state=instance.shown_state,
            request_level=instance.request_level,
            calls_in_flight=instance.calls,
            pending_prefill_tokens=instance.pending_prefill_tokens,
            shadow_legs=len(instance.shadow_legs) + int(instance.fetch_leg is not None),
            reported_running=instance.load.running,
            reported_waiting=instance.load.waiting,
            kv_usage=instance.load.kv_usage,
            block_size=instance.facts.block_size,
            prefill_tokens_per_second=instance.prefill_tokens_per_second,
            failed_transfers=instance.load.failed_transfers,
            expired_exports=instance.load.expired_exports,
            hardware=instance.hardware,
            plugin=convert.plugin(instance),
            last_seen=self._time(instance.last_seen),
            draining=instance.draining,
            shadow_paused=instance.paused,
            sessions=instance.sessions,
        )

    def _session(self, session: Session) -> pb.Session:
        return pb.Session(
            key=convert.session_key(session.key),
            task=session.task,
            current_model=session.current_model,
            calls=session.calls,
            switches=session.switches,
            calls_in_flight=session.calls_in_flight,
            bindings=[
                pb.SessionBinding(
                    model=model,
                    prefill=convert.ref(binding.prefill),
                    decode=convert.ref(binding.decode),
                    prefill_tokens=binding.prefill_tokens,
                    decode_tokens=binding.decode_tokens,
                )
                for model, binding in sorted(session.bindings.items())
            ],
            last_call=self._time(session.last_call),
        )

    def _event(self, event: Event) -> pb.Event:
        return pb.Event(
            sequence=event.sequence,
            time=self._time(event.time),
            kind=pb.EventKind.ValueType(event.kind),
            subject=event.subject,
            reason=event.reason,
            message=event.message,
        )

    @property
    def _time(self) -> Callable[[float], Any]:
        return lambda core_time: convert.timestamp(self._plane.wall(core_time))


def _job(job: ShadowJob) -> pb.ShadowJob:
    return pb.ShadowJob(
        session=convert.session_key(job.session),
        model=job.model,
        reason=job.reason,
        leg=job.leg.kind if job.leg else common.LEG_KIND_UNSPECIFIED,
        target_tokens=job.target_tokens,
        prefill_tokens=job.binding.prefill_tokens,
        decode_tokens=job.binding.decode_tokens,
        switch_probability=job.probability,
    )


def _bound_to(session: Session, name: str) -> bool:
    return any(
        ref is not None and ref.name == name
        for binding in session.bindings.values()
        for ref in (binding.prefill, binding.decode)
    )


def _event_filter(kinds: Sequence[int], subject: str) -> Callable[[Event], bool]:
    """Which events are wanted; raises RejectedError for a kind that is none."""
    wanted = {validation.enum_value("kinds", pb.EventKind.DESCRIPTOR, kind) for kind in kinds}
    return lambda event: (not wanted or event.kind in wanted) and subject in ("", event.subject)


def _interval(seconds: float) -> float:
    if seconds == 0:
        return DEFAULT_INTERVAL_SECONDS
    if not math.isfinite(seconds) or not MIN_INTERVAL_SECONDS <= seconds <= MAX_INTERVAL_SECONDS:
        raise validation.invalid(
            "interval_seconds",
            f"is {seconds:g}; {MIN_INTERVAL_SECONDS:g} to {MAX_INTERVAL_SECONDS:g}, or 0, is expected",
        )
    return seconds
