"""One call: placed by the controller, run on P and then D or on one colocated instance, ended exactly once."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import orjson
from aiohttp import web

from pd_shadow.api.v1 import common_pb2, placement_pb2
from pd_shadow.common.logs import get_logger
from pd_shadow.common.reasons import label
from pd_shadow.common.tracing import NO_SPAN, Span, Value
from pd_shadow.gateway import legs
from pd_shadow.gateway.call_traces import CallTraces
from pd_shadow.gateway.cluster import ClusterView
from pd_shadow.gateway.config import GatewayConfig
from pd_shadow.gateway.contexts import Conversation, Rendering, SessionId
from pd_shadow.gateway.controller_client import ControllerClient, ControllerUnreachableError
from pd_shadow.gateway.digest import TokenRatios, digest
from pd_shadow.gateway.dispatcher import Dispatcher, Targets
from pd_shadow.gateway.engine_client import EngineClient, EngineTimeoutError, EngineUnreachableError, Reply, StreamReply
from pd_shadow.gateway.identity import CallIdentity
from pd_shadow.gateway.metrics import Metrics
from pd_shadow.gateway.openai_errors import (
    CLIENT_MISTAKES,
    ApiError,
    from_controller,
    from_engine,
    no_ready_instance,
    unknown_model,
)
from pd_shadow.gateway.sse import DONE, Output, frame, parse
from pd_shadow.gateway.tokens import Tokens, common_prefix, pack

log = get_logger("gateway.call")

_CALL_NUMBERS = itertools.count(1)
# Mistakes that only D's answer may show; a busy D is the client's to retry.
_PASSED_BY_DECODE = CLIENT_MISTAKES | {429}


@dataclass(frozen=True, slots=True)
class Services:
    """What a call works with; one set per gateway."""

    config: GatewayConfig
    engines: EngineClient
    controller: ControllerClient
    cluster: ClusterView
    dispatcher: Dispatcher
    metrics: Metrics
    ratios: TokenRatios
    traces: CallTraces
    # Tasks that outlive their call, such as the call's end.
    background: set["asyncio.Task[None]"]


class Call:
    """The life of one call. `run` is used once."""

    def __init__(
        self, services: Services, endpoint: legs.Endpoint, body: Mapping[str, Any], identity: CallIdentity
    ) -> None:
        self._services = services
        self._endpoint = endpoint
        self._body = body
        self._identity = identity
        self._model: str = body["model"]
        self._session: SessionId | None = (identity.tenant, identity.session_id) if identity.session_id else None
        self._forward = legs.forwarded(body, identity.cache_salt, self._session)
        self._number = next(_CALL_NUMBERS)
        self._output = Output()
        self._placed = placement_pb2.BeginCallResponse()
        self._digest = digest(body, services.ratios.of(self._model))
        self._ended = False
        self._phase: placement_pb2.CallPhase.ValueType = placement_pb2.CALL_PHASE_UNSPECIFIED
        self._rendering: Rendering | None = None
        self._started = asyncio.get_running_loop().time()
        # What EndCall will say.
        self._outcome: common_pb2.CallOutcome.ValueType = common_pb2.CALL_OUTCOME_DECODE_FAILED
        self._handoff: common_pb2.Handoff.ValueType = common_pb2.HANDOFF_NONE
        self._recompute: common_pb2.RecomputeReason.ValueType = common_pb2.RECOMPUTE_REASON_UNSPECIFIED
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached: int | None = None
        self._common_prefix = 0
        self._transfer: legs.Json | None = None
        # Token ids of the prompt, once the engine that computes it has told them.
        self._prompt: Tokens[int] | None = None
        self._span = NO_SPAN
        # From the D leg's begin to the first token that D streams: what it lacks comes from P.
        self._transfer_span = NO_SPAN

    @property
    def outcome(self) -> common_pb2.CallOutcome.ValueType | None:
        """How the call ended; None if it was never placed."""
        return self._outcome if self._placed.HasField("decode") else None

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Serve the call; raises ApiError for everything that fails before the answer began."""
        with self._services.traces.call(self._session, request.headers) as self._span:
            try:
                return await self._serve(request)
            finally:
                self._tell_span()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        await self._place()
        try:
            await self._prefill()
            if self._body.get("stream"):
                return await self._decode_stream(request)
            return await self._decode_whole()
        except (asyncio.CancelledError, ConnectionResetError):
            # The handler is cancelled when the client leaves, or when the gateway's grace period is over.
            connected = request.transport is not None and not request.transport.is_closing()
            if self._outcome != common_pb2.CALL_OUTCOME_COMPLETED:
                self._outcome = (
                    common_pb2.CALL_OUTCOME_GATEWAY_LOST if connected else common_pb2.CALL_OUTCOME_CLIENT_GONE
                )
            raise
        except ApiError as error:
            if error.status in _PASSED_BY_DECODE:
                self._outcome = common_pb2.CALL_OUTCOME_REJECTED
            raise
        finally:
            self._end()

    # -- placement

    async def _place(self) -> None:
        services = self._services
        request = placement_pb2.BeginCallRequest(
            gateway_id=services.controller.gateway_id,
            session=self._identity.session,
            model=self._model,
            task=self._identity.task,
            prompt_tokens=self._digest.prompt_tokens,
            messages=self._digest.messages,
            routed=self._session is not None,
        )
        if self._session is not None:
            self._rendering = services.dispatcher.contexts.rendering(self._session, self._model)
        with self._span.child("begin_call") as span:
            try:
                self._placed = await services.controller.begin(request, span.headers())
            except ControllerUnreachableError as error:
                self._placed = self._fallback(str(error))
            except grpc.aio.AioRpcError as error:
                refusal = from_controller(error, self._model, services.cluster.models)
                if refusal is not None:
                    raise refusal from error
                self._placed = self._fallback(error.code().name)
            placed = self._placed
            span.set(
                fallback=not placed.call_id,
                is_switch=placed.is_switch,
                expected_warm_tokens=placed.expected_warm_tokens,
                shadow_targets=len(placed.shadow_targets),
            )
        if not self._placed.HasField("decode"):
            self._end()
            raise no_ready_instance(self._model)
        self._follow(begins=True)

    def _fallback(self, why: str) -> placement_pb2.BeginCallResponse:
        services = self._services
        services.metrics.controller_fallbacks.inc()
        key = "\0".join((*(self._session or ("", self._identity.request_id)), self._model))
        placed = services.cluster.place(self._model, key)
        log.info("controller_fallback", why=why, request_id=self._identity.request_id, placed=placed is not None)
        if placed is None:
            known = services.cluster.models
            if known and self._model not in known:
                raise unknown_model(self._model, known)
            raise no_ready_instance(self._model)
        prefill, decode = placed
        return placement_pb2.BeginCallResponse(prefill=prefill, decode=decode)

    # -- P leg

    async def _prefill(self) -> None:
        """Compute the prompt on P. Any failure but the client's own mistake leaves the prompt to D."""
        if self._colocated:
            return
        if not self._placed.HasField("prefill"):
            self._recompute = common_pb2.RECOMPUTE_REASON_NO_PREFILL_INSTANCE
            return
        if not legs.transferable(self._body):
            self._recompute = common_pb2.RECOMPUTE_REASON_NOT_TRANSFERABLE
            return
        instance = self._placed.prefill.instance
        body = legs.prefill_body(self._forward, self._endpoint, return_token_ids=self._session is not None)
        seconds = self._services.config.deadlines.prefill
        self._recompute = common_pb2.RECOMPUTE_REASON_PREFILL_FAILED
        with self._span.child("p_leg") as span:
            await self._prefill_leg(instance, body, seconds, span)
            span.set(**_where(self._placed.prefill), prompt_tokens=self._prompt_tokens, cached_tokens=self._cached)
            if self._recompute:
                span.fail(label(common_pb2.RecomputeReason.DESCRIPTOR, self._recompute))

    async def _prefill_leg(
        self, instance: common_pb2.InstanceEndpoint, body: legs.Json, seconds: float, span: Span
    ) -> None:
        try:
            reply = await self._unless_lost(
                instance.ref,
                self._services.engines.post(
                    instance.url, self._endpoint.value, body, seconds, self._identity.request_id, span.headers()
                ),
            )
        except (EngineUnreachableError, EngineTimeoutError) as error:
            log.warning("prefill_failed", instance=instance.ref.name, why=str(error))
            return
        if reply.status in CLIENT_MISTAKES:
            raise from_engine(reply.status, reply.json, "prefill")
        if reply.status != 200:
            log.warning("prefill_failed", instance=instance.ref.name, status=reply.status)
            return
        self._learn_usage(reply.json)
        self._learn_prompt(legs.prompt_token_ids(reply.json))
        self._transfer = legs.transfer_params(reply.json)
        if self._transfer is None:
            self._recompute = common_pb2.RECOMPUTE_REASON_MISSING_PARAMS
            log.warning("prefill_without_params", instance=instance.ref.name)
            return
        self._recompute = common_pb2.RECOMPUTE_REASON_UNSPECIFIED
        self._report_phase(placement_pb2.CALL_PHASE_TRANSFER)

    async def _unless_lost(self, ref: common_pb2.InstanceRef, leg: Coroutine[Any, Any, Reply]) -> Reply:
        """The leg's answer; raises EngineUnreachableError when the cluster loses the instance, as no answer may come.

        A machine that vanished closes no connection: without this, its calls would wait out their whole deadline.
        """
        answer = asyncio.create_task(leg)
        lost = asyncio.create_task(self._services.cluster.until_lost(ref))
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineUnreachableError("the instance is gone")
            return answer.result()
        finally:
            answer.cancel()
            lost.cancel()

    def _learn_usage(self, payload: Any) -> None:
        """What the engine that computes the prompt says about it."""
        known, self._prompt_tokens = self._prompt_tokens, legs.usage_count(payload, "prompt_tokens")
        self._cached = legs.cached_tokens(payload)
        # A stream may repeat its usage with every chunk.
        if self._prompt_tokens != known:
            self._services.ratios.learn(self._model, self._digest.text_bytes, self._prompt_tokens)

    def _learn_prompt(self, ids: list[int] | None) -> None:
        """The prompt as the engine that computes it holds it from now on, for the session's shadows."""
        if self._session is None or ids is None:
            return
        try:
            self._prompt = pack(ids)
        except OverflowError:
            return
        self._compare_rendering(self._prompt)
        self._services.dispatcher.contexts.set_served(self._session, self._model, self._prompt)

    def _compare_rendering(self, tokens: "Tokens[int]") -> None:
        """How much of the shadow rendering the real prompt had in common with it."""
        rendering = self._rendering
        if rendering is None:
            return
        self._common_prefix = common_prefix(rendering.tokens, tokens)
        computes = self._placed.decode if self._colocated else self._placed.prefill
        block = self._services.cluster.block_size(computes.instance.ref.name)
        if self._common_prefix < len(rendering.tokens) // block * block:
            self._services.metrics.not_append_only.labels(self._model_label()).inc()

    # -- D leg, or the one leg on a colocated instance

    @property
    def _colocated(self) -> bool:
        return self._placed.decode.role == common_pb2.ROLE_COLOCATED

    @property
    def _asks_token_ids(self) -> bool:
        """Whether the gateway has the colocated instance tell token ids that the caller did not ask for."""
        wanted = self._colocated and self._session is not None and legs.tells_token_ids(self._body)
        return wanted and not self._body.get("return_token_ids")

    async def _decode_whole(self) -> web.Response:
        freed = None
        if not self._colocated:
            # The whole answer comes at once, at its end: no first token tells that the link is free again.
            freed = asyncio.get_running_loop().call_later(
                self._services.config.assumed_transfer_seconds, self._report_phase, placement_pb2.CALL_PHASE_DECODE
            )
        try:
            async with self._decode_leg() as leg:
                reply = await leg.read()
        finally:
            if freed is not None:
                freed.cancel()
        if reply.status != 200 or not isinstance(reply.json, dict):
            raise self._decode_refused(reply.status, reply.json)
        if self._colocated:
            # A first token that is told at the end tells nothing.
            self._learn_prompt(legs.prompt_token_ids(reply.json))
        else:
            self._first_token()
        self._output.add_response(reply.json)
        payload = self._account(reply.json)
        if payload.get("kv_transfer_params") is not None:
            # Where blocks lie is between engines.
            payload = {**payload, "kv_transfer_params": None}
        if self._asks_token_ids:
            payload = legs.without_token_ids(payload)
        raw = reply.raw if payload is reply.json else orjson.dumps(payload)
        self._completed()
        headers = {"X-Request-Id": self._identity.request_id}
        return web.Response(body=raw, content_type="application/json", headers=headers)

    async def _decode_stream(self, request: web.Request) -> web.StreamResponse:
        headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Request-Id": self._identity.request_id,
        }
        response = web.StreamResponse(headers=headers)
        try:
            async with self._decode_leg() as leg:
                if leg.status != 200 or not leg.is_event_stream:
                    reply = await leg.read()
                    raise self._decode_refused(reply.status, reply.json)
                await self._relay(request, leg, response)
        except ApiError as error:
            if not response.prepared:
                raise
            # The status is out already: an error event, and no [DONE] that would make the answer look whole.
            log.warning("decode_failed_midway", request_id=self._identity.request_id, status=error.status)
            await response.write(frame(error.body()))
        return response

    async def _relay(self, request: web.Request, leg: StreamReply, response: web.StreamResponse) -> None:
        rendered_tokens = 0
        async for event in leg.events():
            # Headers wait for the first event, so that a failure before it still has a status of its own.
            data = None if event == DONE else self._take(event)
            if not response.prepared:
                elapsed = asyncio.get_running_loop().time() - self._started
                self._services.metrics.ttft.labels(self._model_label()).observe(elapsed)
                self._first_token()
                await response.prepare(request)
            if event == DONE:
                self._completed()
                await response.write(frame(DONE))
                return
            if data is not None:
                await response.write(frame(data))
            if self._output.tokens - rendered_tokens >= self._services.config.shadow.stream_batch_tokens:
                rendered_tokens = self._output.tokens
                self._follow()
        raise ApiError(502, f"The {self._role} instance ended its answer early.", code="engine_failed")

    def _take(self, event: bytes) -> bytes | None:
        """One event of D's stream as the client gets it; None if it is the gateway's own. Raises D's errors."""
        chunk = parse(event)
        if chunk is None:
            return event
        if chunk.get("error") is not None:
            raise self._midway_error(chunk)
        self._output.add_chunk(chunk)
        payload = chunk
        if self._colocated:
            if self._prompt is None:
                self._learn_prompt(legs.prompt_token_ids(chunk))
            if self._asks_token_ids:
                payload = legs.without_token_ids(payload)
        if isinstance(chunk.get("usage"), dict):
            payload = self._account(payload)
            if chunk.get("choices") == [] and not legs.wants_usage(self._body):
                return None
        return event if payload is chunk else orjson.dumps(payload)

    @asynccontextmanager
    async def _decode_leg(self) -> AsyncIterator[StreamReply]:
        """D's answer, its failures turned into what the client sees."""
        instance = self._placed.decode.instance
        if self._colocated:
            body = legs.colocated_body(self._forward, return_token_ids=self._asks_token_ids)
        else:
            body = legs.decode_body(self._forward, self._transfer)
        span = self._span.child("colocated_leg" if self._colocated else "d_leg")
        if self._transfer is not None and self._body.get("stream"):
            self._transfer_span = span.child("transfer")
        try:
            with span:
                try:
                    async with self._services.engines.stream(
                        instance.url, self._endpoint.value, body, self._identity.request_id, span.headers()
                    ) as leg:
                        if leg.status != 200:
                            span.fail(f"status {leg.status}")
                        yield leg
                finally:
                    self._transfer_span.end()
                    span.set(
                        **_where(self._placed.decode),
                        handoff=label(common_pb2.Handoff.DESCRIPTOR, self._handoff) if self._handoff else None,
                        completion_tokens=self._completion_tokens or self._output.tokens,
                    )
        except EngineUnreachableError as error:
            log.warning("decode_failed", instance=instance.ref.name, why=str(error))
            raise ApiError(502, f"The {self._role} instance cannot be reached.", code="engine_unreachable") from error
        except EngineTimeoutError as error:
            log.warning("decode_failed", instance=instance.ref.name, why=str(error))
            raise ApiError(504, f"The {self._role} instance did not answer in time.", code="engine_timeout") from error

    def _first_token(self) -> None:
        """D has begun: its link is free, and what is not known to have arrived is not claimed."""
        self._transfer_span.end()
        self._report_phase(placement_pb2.CALL_PHASE_DECODE)
        if self._handoff == common_pb2.HANDOFF_NONE and not self._colocated:
            self._handoff = common_pb2.HANDOFF_UNSPECIFIED if self._transfer else common_pb2.HANDOFF_RECOMPUTED

    def _account(self, payload: legs.Json) -> legs.Json:
        """Read the usage; the payload the client gets reports what was cached where the prompt was computed."""
        self._completion_tokens = legs.usage_count(payload, "completion_tokens")
        if self._colocated:
            self._learn_usage(payload)
            return payload
        self._prompt_tokens = legs.usage_count(payload, "prompt_tokens") or self._prompt_tokens
        decode_cached = legs.cached_tokens(payload)
        if self._transfer is None:
            self._handoff = common_pb2.HANDOFF_RECOMPUTED
            return payload
        if decode_cached is not None:
            block = self._services.cluster.block_size(self._placed.decode.instance.ref.name)
            self._handoff = legs.handoff(decode_cached, self._prompt_tokens, block)
            if self._handoff == common_pb2.HANDOFF_RECOMPUTED:
                self._recompute = common_pb2.RECOMPUTE_REASON_TRANSFER_FAILED
                return payload
        if self._cached is None or not isinstance(payload.get("usage"), dict):
            return payload
        return legs.with_cached_tokens(payload, self._cached)

    # -- the end, and what others learn

    def _completed(self) -> None:
        """The answer is whole. The controller learns it before the client can begin the session's next call."""
        self._outcome = common_pb2.CALL_OUTCOME_COMPLETED
        output = self._output.token_ids
        if self._colocated and self._session is not None and self._prompt and len(output) == self._completion_tokens:
            # The instance holds the output too, but for the last token, whose KV is never written.
            self._services.dispatcher.contexts.set_served(self._session, self._model, self._prompt + output[:-1])
        self._end()

    def _end(self) -> None:
        """Tell the controller, once, without making anybody wait; a cancelled call still ends."""
        if self._ended:
            return
        self._ended = True
        metrics, model = self._services.metrics, self._model_label()
        if self._handoff in (common_pb2.HANDOFF_HANDED_OFF, common_pb2.HANDOFF_RECOMPUTED):
            metrics.handoffs.labels(model, label(common_pb2.Handoff.DESCRIPTOR, self._handoff)).inc()
        recomputed = self._handoff == common_pb2.HANDOFF_RECOMPUTED
        if recomputed:
            reason = label(common_pb2.RecomputeReason.DESCRIPTOR, self._recompute)
            metrics.recomputed.labels(model, reason).inc()
        request = placement_pb2.EndCallRequest(
            call_id=self._placed.call_id,
            outcome=self._outcome,
            handoff=self._handoff,
            recompute_reason=self._recompute if recomputed else common_pb2.RECOMPUTE_REASON_UNSPECIFIED,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached or 0,
            completion_tokens=self._completion_tokens or self._output.tokens,
            common_prefix_tokens=self._common_prefix,
        )
        completed = self._outcome == common_pb2.CALL_OUTCOME_COMPLETED
        conversation = self._conversation(self._output if completed else None, partial=False)
        task = asyncio.create_task(self._send_end(request, conversation))
        self._services.background.add(task)
        task.add_done_callback(self._services.background.discard)

    def _tell_span(self) -> None:
        """What the call's span says: names, counts and reasons."""
        recomputed = self._handoff == common_pb2.HANDOFF_RECOMPUTED
        outcome = self.outcome
        self._span.set(
            model=self._model_label(),
            request_id=self._identity.request_id,
            call_id=self._placed.call_id or None,
            is_switch=self._placed.is_switch,
            outcome=label(common_pb2.CallOutcome.DESCRIPTOR, outcome) if outcome is not None else None,
            handoff=label(common_pb2.Handoff.DESCRIPTOR, self._handoff) if self._handoff else None,
            recompute_reason=label(common_pb2.RecomputeReason.DESCRIPTOR, self._recompute) if recomputed else None,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            completion_tokens=self._completion_tokens or self._output.tokens,
        )

    async def _send_end(self, request: placement_pb2.EndCallRequest, conversation: Conversation) -> None:
        targets: Targets = ()
        if request.call_id:
            targets = (await self._services.controller.end(request)).shadow_targets
        if self._session is not None:
            self._services.dispatcher.follow(self._session, conversation, targets)

    def _follow(self, *, begins: bool = False) -> None:
        """Have the context so far rendered for the call's shadow targets: the input, later what was said so far."""
        if self._session is None:
            return
        if not begins and (self._output.has_tool_calls or not self._output.text):
            # A tool call that is not complete cannot be rendered; the call's end brings it whole.
            return
        conversation = self._conversation(None if begins else self._output, partial=not begins)
        targets = self._placed.shadow_targets
        self._services.dispatcher.follow(self._session, conversation, targets, begins=begins)

    def _conversation(self, output: Output | None, *, partial: bool) -> Conversation:
        tokens = self._digest.prompt_tokens + self._output.tokens
        return Conversation(self._number, self._body, self._identity.cache_salt, tokens, output, partial)

    def _report_phase(self, phase: placement_pb2.CallPhase.ValueType) -> None:
        if self._placed.call_id and phase != self._phase:
            self._phase = phase
            self._services.controller.progress(
                placement_pb2.ReportProgressRequest(
                    call_id=self._placed.call_id, phase=phase, generated_tokens=self._output.tokens
                )
            )

    def _model_label(self) -> str:
        return self._services.cluster.model_label(self._model)

    @property
    def _role(self) -> str:
        """What the instance that generates is called in messages."""
        return "colocated" if self._colocated else "decode"

    def _decode_refused(self, status: int, payload: Any) -> ApiError:
        error = from_engine(status, payload, self._role)
        return ApiError(429, error.message, code="engine_busy", retry_after=1) if status == 429 else error

    def _midway_error(self, chunk: legs.Json) -> ApiError:
        """The error an engine put into its stream; a mistake of the client's keeps its status."""
        error = chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        return from_engine(code if isinstance(code, int) else 500, chunk, self._role)


def _where(placement: placement_pb2.Placement) -> dict[str, Value]:
    """Span attributes of a leg: the instance, and why this one."""
    return {
        "instance": placement.instance.ref.name,
        "placement_reason": label(common_pb2.PlacementReason.DESCRIPTOR, placement.reason),
    }
