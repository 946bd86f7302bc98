"""PlacementService: the data plane's RPCs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from controller.core.cluster import CallEnd
from controller.core.rejection import RejectedError
from controller.server import convert, validation
from controller.server.errors import abort
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.api.v1 import placement_pb2_grpc
from pd_shadow.common.reasons import label
from pd_shadow.common.tracing import Span, Tracing


class PlacementServicer(placement_pb2_grpc.PlacementServiceServicer):
    """Translates between messages and the core; refusals become statuses with details."""

    def __init__(self, plane: Plane, tracing: Tracing) -> None:
        self._plane = plane
        self._tracing = tracing

    async def BeginCall(self, request: pb.BeginCallRequest, context: Any) -> pb.BeginCallResponse:  # noqa: N802
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        with self._tracing.serve("place_call", headers) as span:
            return await self._begin_call(request, context, span)

    async def _begin_call(self, request: pb.BeginCallRequest, context: Any, span: Span) -> pb.BeginCallResponse:
        try:
            gateway_id = validation.name("gateway_id", request.gateway_id)
            key = validation.session_key("session", request.session) if request.HasField("session") else None
            model = validation.name("model", request.model)
            task = validation.name("task", request.task, limit=validation.MAX_TASK, empty=True)
            digests = validation.digests(request)
            with self._plane.turn() as (cluster, now):
                begun = cluster.begin_call(
                    now,
                    gateway_id,
                    key,
                    model,
                    task=task,
                    prompt_tokens=request.prompt_tokens,
                    digests=digests,
                )
        except RejectedError as error:
            span.set(refused=label(common.RejectionReason.DESCRIPTOR, error.reason))
            await abort(context, error)
        call = begun.call
        span.set(
            model=call.model,
            call_id=call.call_id,
            is_switch=call.is_switch,
            prompt_tokens=request.prompt_tokens,
            expected_warm_tokens=call.expected_warm_tokens,
            prefill_instance=call.prefill.instance.name if call.prefill else None,
            prefill_reason=label(common.PlacementReason.DESCRIPTOR, call.prefill.reason) if call.prefill else None,
            decode_instance=call.decode.instance.name,
            decode_reason=label(common.PlacementReason.DESCRIPTOR, call.decode.reason),
        )
        return pb.BeginCallResponse(
            call_id=call.call_id,
            prefill=None if call.colocated else convert.placement(call.prefill),
            decode=convert.placement(call.decode),
            expected_warm_tokens=call.expected_warm_tokens,
            is_switch=call.is_switch,
            shadow_targets=[convert.shadow_target(target) for target in begun.shadow_targets],
        )

    async def ReportProgress(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ReportProgressRequest], context: Any
    ) -> pb.ReportProgressResponse:
        async for request in request_iterator:
            try:
                with self._plane.turn() as (cluster, now):
                    cluster.progress(now, request.call_id, request.phase)
            except RejectedError:
                # Progress of a call that ended meanwhile says nothing new, and must not end the gateway's stream.
                continue
        return pb.ReportProgressResponse()

    async def EndCall(self, request: pb.EndCallRequest, context: Any) -> pb.EndCallResponse:  # noqa: N802
        end = CallEnd(
            outcome=request.outcome,
            handoff=request.handoff,
            recompute_reason=request.recompute_reason,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=min(request.cached_tokens, request.prompt_tokens),
            completion_tokens=request.completion_tokens,
        )
        try:
            with self._plane.turn() as (cluster, now):
                targets = cluster.end_call(now, request.call_id, end)
        except RejectedError as error:
            await abort(context, error)
        return pb.EndCallResponse(shadow_targets=[convert.shadow_target(target) for target in targets])

    async def GetWarmth(self, request: pb.GetWarmthRequest, context: Any) -> pb.GetWarmthResponse:  # noqa: N802
        try:
            key = validation.session_key("session", request.session)
            with self._plane.turn() as (cluster, _):
                current, models = cluster.warmth(key)
        except RejectedError as error:
            await abort(context, error)
        return pb.GetWarmthResponse(
            current_model=current, models=[pb.ModelWarmth(**warmth._asdict()) for warmth in models]
        )

    async def WatchShadowWork(  # noqa: N802
        self, request: pb.WatchShadowWorkRequest, context: Any
    ) -> AsyncIterator[pb.WatchShadowWorkResponse]:
        try:
            subscription = self._plane.subscribe(validation.name("gateway_id", request.gateway_id))
        except RejectedError as error:
            await abort(context, error)
        try:
            # Headers tell the dispatcher that it is subscribed, before there is any work.
            await context.send_initial_metadata(())
            async for message in subscription.messages():
                yield message
        finally:
            self._plane.unsubscribe(subscription)

    async def ReportShadowWork(  # noqa: N802
        self, request: pb.ReportShadowWorkRequest, context: Any
    ) -> pb.ReportShadowWorkResponse:
        try:
            gateway_id = validation.name("gateway_id", request.gateway_id)
            if request.HasField("context_rendered"):
                rendered = request.context_rendered
                key = validation.session_key("context_rendered.session", rendered.session)
                with self._plane.turn() as (cluster, now):
                    cluster.rendered(
                        now,
                        gateway_id,
                        key,
                        rendered.model,
                        revision=rendered.revision,
                        tokens=rendered.tokens,
                        kept_tokens=rendered.kept_tokens,
                        error=rendered.error[: validation.MAX_NAME],
                    )
            elif request.HasField("leg_finished"):
                leg = request.leg_finished
                with self._plane.turn() as (cluster, now):
                    cluster.leg_finished(
                        now,
                        gateway_id,
                        leg.leg_id,
                        leg.outcome,
                        leg.cached_tokens,
                        _why(leg),
                        leg.covered_tokens if leg.HasField("covered_tokens") else None,
                        transfer_failed=leg.end == common.LEG_END_TRANSFER_FAILED,
                    )
            else:
                raise validation.invalid("report", "must be context_rendered or leg_finished")
        except RejectedError as error:
            await abort(context, error)
        return pb.ReportShadowWorkResponse()

    async def WatchCluster(  # noqa: N802
        self, request: pb.WatchClusterRequest, context: Any
    ) -> AsyncIterator[pb.WatchClusterResponse]:
        seen = -1
        while self._plane.active:
            cluster = self._plane.cluster
            if cluster.generation != seen:
                seen = cluster.generation
                yield pb.WatchClusterResponse(
                    instances=[convert.cluster_instance(instance) for instance in cluster.registry]
                )
            else:
                await self._plane.changes()


def _why(leg: pb.LegFinished) -> str:
    """What is said about the end of a leg: the engine's reason, and what went wrong."""
    reason = label(common.LegEnd.DESCRIPTOR, leg.end) if leg.end else ""
    return " ".join(part for part in (reason, leg.detail[: validation.MAX_NAME]) if part)
