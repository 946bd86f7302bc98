"""AdminService: what operators read, and the policies they change."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from google.protobuf import json_format, struct_pb2

from controller.core.effects import Event
from controller.core.instance import Instance, InstanceRef
from controller.core.rejection import RejectedError
from controller.core.session import Session
from controller.core.shadow_job import ShadowJob
from controller.server import convert, validation
from controller.server.errors import abort
from controller.server.plane import Plane
from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import admin_pb2_grpc
from pd_shadow.api.v1 import common_pb2 as common

T = TypeVar("T")


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Reads the core; policies are all it changes."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        registry = self._plane.cluster.registry
        models = []
        for name in registry.models():
            ready = {role: registry.ready(name, role) for role in common.Role.values()}
            context_tokens = [i.facts.max_context_tokens for instances in ready.values() for i in instances]
            models.append(
                pb.Model(
                    name=name,
                    prefill_ready=len(ready[common.ROLE_PREFILL]),
                    decode_ready=len(ready[common.ROLE_DECODE]),
                    colocated_ready=len(ready[common.ROLE_COLOCATED]),
                    max_context_tokens=min(context_tokens, default=0),
                )
            )
        return pb.ListModelsResponse(models=models)

    async def ListInstances(  # noqa: N802
        self, request: pb.ListInstancesRequest, context: Any
    ) -> pb.ListInstancesResponse:
        found = sorted(
            (i for i in self._plane.cluster.registry if request.model in ("", i.model)), key=lambda i: i.name
        )
        page, token = await self._page(found, request.page_size, request.page_token, context)
        return pb.ListInstancesResponse(instances=[self._instance(i) for i in page], next_page_token=token)

    async def GetInstance(self, request: pb.GetInstanceRequest, context: Any) -> pb.GetInstanceResponse:  # noqa: N802
        instance = self._plane.cluster.registry.named(request.name)
        if instance is None:
            await abort(
                context,
                RejectedError(
                    common.REJECTION_REASON_UNKNOWN_INSTANCE, f"no instance {request.name!r} was seen", field="name"
                ),
            )
        return pb.GetInstanceResponse(instance=self._instance(instance))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:  # noqa: N802
        found = [
            session
            for session in self._plane.cluster.sessions
            if not request.HasField("tenant") or session.key.tenant == request.tenant
        ]
        page, token = await self._page(found, request.page_size, request.page_token, context)
        return pb.ListSessionsResponse(sessions=[self._session(s) for s in page], next_page_token=token)

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:  # noqa: N802
        try:
            key = validation.session_key("session", request.session)
            session = self._plane.cluster.sessions.get(key)
            if session is None:
                raise RejectedError(
                    common.REJECTION_REASON_UNKNOWN_SESSION,
                    f"no session {key.session_id!r}",
                    field="session.session_id",
                )
        except RejectedError as error:
            await abort(context, error)
        return pb.GetSessionResponse(session=self._session(session))

    async def ListShadowJobs(  # noqa: N802
        self, request: pb.ListShadowJobsRequest, context: Any
    ) -> pb.ListShadowJobsResponse:
        found = [job for job in self._plane.cluster.jobs if request.model in ("", job.model)]
        page, token = await self._page(found, request.page_size, request.page_token, context)
        return pb.ListShadowJobsResponse(jobs=[_job(job) for job in page], next_page_token=token)

    async def ListLinks(self, request: pb.ListLinksRequest, context: Any) -> pb.ListLinksResponse:  # noqa: N802
        now = self._plane.now()
        failing: dict[InstanceRef, list[pb.FailingPair]] = {}
        for known in self._plane.cluster.links:
            failing.setdefault(known.key.decode, []).append(
                pb.FailingPair(
                    prefill=convert.ref(known.key.prefill),
                    state=known.state,
                    failures=known.failures,
                    until=self._time(known.until) if known.quarantined else None,
                )
            )
        links = []
        for instance in sorted(self._plane.cluster.registry, key=lambda i: i.name):
            if instance.role != common.ROLE_DECODE:
                continue
            instance.link.settle(now)
            links.append(
                pb.Link(
                    decode=convert.ref(instance.ref),
                    model=instance.model,
                    gate=common.GateReason.Value(f"GATE_REASON_{instance.gate.state.name}"),
                    normal_transfers=instance.gate.normal_transfers,
                    shadow_chunks=instance.gate.shadow_chunks,
                    normal_seconds=instance.link.normal_seconds,
                    shadow_seconds=instance.link.shadow_seconds,
                    idle_seconds=instance.link.idle_seconds,
                    failing=sorted(failing.get(instance.ref, ()), key=lambda pair: pair.prefill.name),
                )
            )
        return pb.ListLinksResponse(links=links)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> pb.ListEventsResponse:  # noqa: N802
        try:
            _, size = validation.page(request.page_size, "")
        except RejectedError as error:
            await abort(context, error)
        events = self._plane.cluster.events(request.after_sequence)
        return pb.ListEventsResponse(events=[self._event(event) for event in events[:size]])

    async def WatchEvents(  # noqa: N802
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        cluster = self._plane.cluster
        seen = max((event.sequence for event in cluster.events()), default=0)
        await context.send_initial_metadata(())
        while not self._plane.closing:
            fresh = cluster.events(seen)
            if not fresh:
                await self._plane.changes()
            for event in fresh:
                seen = event.sequence
                yield pb.WatchEventsResponse(event=self._event(event))

    async def GetLedger(self, request: pb.GetLedgerRequest, context: Any) -> pb.GetLedgerResponse:  # noqa: N802
        cluster = self._plane.cluster
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

    async def GetEffectiveConfig(  # noqa: N802
        self, request: pb.GetEffectiveConfigRequest, context: Any
    ) -> pb.GetEffectiveConfigResponse:
        config = struct_pb2.Struct()
        json_format.ParseDict(self._plane.cluster.effective_config.model_dump(mode="json"), config)
        return pb.GetEffectiveConfigResponse(config=config)

    async def SetShadowPolicy(  # noqa: N802
        self, request: pb.SetShadowPolicyRequest, context: Any
    ) -> pb.SetShadowPolicyResponse:
        given = {field.name: value for field, value in request.ListFields()}
        try:
            with self._plane.turn() as (cluster, now):
                cluster.set_shadow_policy(now, cluster.shadow_policy.changed(**given))
        except RejectedError as error:
            await abort(context, error)
        return pb.SetShadowPolicyResponse(policy=convert.shadow_policy(self._plane.cluster.shadow_policy))

    async def _page(self, items: Iterable[T], size: int, token: str, context: Any) -> tuple[list[T], str]:
        try:
            offset, length = validation.page(size, token)
        except RejectedError as error:
            await abort(context, error)
        window = list(itertools.islice(items, offset, offset + length + 1))
        return window[:length], str(offset + length) if len(window) > length else ""

    def _instance(self, instance: Instance) -> pb.Instance:
        return pb.Instance(
            endpoint=convert.endpoint(instance),
            role=instance.role,
            model=instance.model,
            state=instance.state,
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
