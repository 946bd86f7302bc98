"""Runs shadow legs as the controller directs, each exactly once, and reports how they ended.

An export that is never fetched keeps its blocks pinned on P until P's lease on them ends (kv_lease_duration): only a
D that reads them could free them earlier.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from pd_shadow.api.v1 import common_pb2, placement_pb2
from pd_shadow.common.logs import get_logger
from pd_shadow.common.reasons import label
from pd_shadow.common.tracing import Span
from pd_shadow.gateway import legs
from pd_shadow.gateway.call_traces import CallTraces
from pd_shadow.gateway.config import Shadow
from pd_shadow.gateway.contexts import Contexts, Export, SessionId
from pd_shadow.gateway.controller_client import ControllerClient
from pd_shadow.gateway.engine_client import EngineClient, EngineTimeoutError, EngineUnreachableError, Reply
from pd_shadow.gateway.metrics import Metrics

log = get_logger("gateway.shadow_legs")

_SEEN_LEGS = 65_536
_MAX_LEG_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Ended:
    outcome: common_pb2.LegOutcome.ValueType
    cached_tokens: int = 0
    detail: str = ""
    covered_tokens: int | None = None
    end: common_pb2.LegEnd.ValueType = common_pb2.LEG_END_UNSPECIFIED


class ShadowLegs:
    """The legs that run now."""

    def __init__(
        self,
        contexts: Contexts,
        engines: EngineClient,
        controller: ControllerClient,
        metrics: Metrics,
        traces: CallTraces,
        config: Shadow,
    ) -> None:
        self._contexts = contexts
        self._engines = engines
        self._controller = controller
        self._metrics = metrics
        self._traces = traces
        self._config = config
        self._running: dict[str, tuple[SessionId, asyncio.Task[_Ended]]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()

    def start(self, leg: placement_pb2.LegStart) -> None:
        """Run a leg, unless it ran before."""
        if leg.leg_id in self._seen:
            return
        self._seen[leg.leg_id] = None
        if len(self._seen) > _SEEN_LEGS:
            self._seen.popitem(last=False)
        session = (leg.session.tenant, leg.session.session_id)
        started = asyncio.get_running_loop().time()
        span = self._traces.shadow_leg(session)
        task = asyncio.create_task(self._attempt(leg, session, span))
        self._running[leg.leg_id] = (session, task)
        # A callback, because a task that is cancelled before its first step never gets to report anything itself.
        task.add_done_callback(lambda done: self._finished(leg, started, span, done))

    def cancel(self, leg_id: str) -> None:
        """Stop a leg if it still runs; it reports itself as cancelled."""
        running = self._running.get(leg_id)
        if running is not None:
            running[1].cancel()

    def cancel_session(self, session: SessionId) -> None:
        """Stop the legs of a session."""
        for of_session, task in list(self._running.values()):
            if of_session == session:
                task.cancel()

    def cancel_all(self) -> None:
        """Stop every leg and forget exports: the controller takes them as lost."""
        for _, task in list(self._running.values()):
            task.cancel()
        self._contexts.forget_exports()

    async def close(self) -> None:
        """Stop every leg and wait until its connection is closed."""
        tasks = [task for _, task in self._running.values()]
        self.cancel_all()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, leg: placement_pb2.LegStart, started: float, span: Span, task: "asyncio.Task[_Ended]") -> None:
        self._running.pop(leg.leg_id, None)
        ended = _ended(task)
        kind, outcome = (
            label(common_pb2.LegKind.DESCRIPTOR, leg.kind),
            label(common_pb2.LegOutcome.DESCRIPTOR, ended.outcome),
        )
        self._metrics.shadow_legs.labels(kind, outcome).inc()
        span.set(
            leg_id=leg.leg_id,
            kind=kind,
            model=leg.model,
            instance=leg.instance.ref.name,
            upto_tokens=leg.upto_tokens,
            cached_tokens=ended.cached_tokens,
            covered_tokens=ended.covered_tokens,
            switch_probability=leg.switch_probability,
            outcome=outcome,
            end=label(common_pb2.LegEnd.DESCRIPTOR, ended.end) if ended.end else None,
        )
        if ended.outcome in (common_pb2.LEG_OUTCOME_FAILED, common_pb2.LEG_OUTCOME_TIMED_OUT):
            span.fail(outcome)
        span.end()
        finished = placement_pb2.LegFinished(
            leg_id=leg.leg_id,
            outcome=ended.outcome,
            cached_tokens=ended.cached_tokens,
            seconds=task.get_loop().time() - started,
            detail=ended.detail,
            covered_tokens=ended.covered_tokens,
            end=ended.end,
        )
        self._controller.report(
            placement_pb2.ReportShadowWorkRequest(gateway_id=self._controller.gateway_id, leg_finished=finished)
        )

    async def _attempt(self, leg: placement_pb2.LegStart, session: SessionId, span: Span) -> _Ended:
        now = asyncio.get_running_loop().time()
        rendering = self._contexts.rendering(session, leg.model)
        if rendering is None or rendering.revision != leg.revision:
            return _Ended(common_pb2.LEG_OUTCOME_STALE, detail="another rendering is held")
        if not 0 < leg.upto_tokens <= len(rendering.tokens):
            return _Ended(common_pb2.LEG_OUTCOME_STALE, detail="the rendering is shorter")
        transfer = None
        if leg.kind == common_pb2.LEG_KIND_EXPORT:
            transfer = legs.export_params()
        elif leg.kind == common_pb2.LEG_KIND_FETCH:
            export = self._contexts.take_export(session, leg.model, rendering, leg.upto_tokens, now)
            if export is None:
                return _Ended(common_pb2.LEG_OUTCOME_STALE, detail="no export of this prefix is held")
            transfer = legs.handed_over(export.params)
        priority = 0 if leg.normal_priority else self._config.priority
        xargs = legs.shadow_xargs(leg.kind, session, leg.switch_probability)
        body = legs.shadow_body(
            leg.model, rendering.tokens[: leg.upto_tokens], priority, rendering.cache_salt, xargs, transfer
        )
        seconds = min(leg.deadline_seconds or _MAX_LEG_SECONDS, _MAX_LEG_SECONDS)
        reply = await self._engines.post(
            leg.instance.url,
            legs.Endpoint.COMPLETIONS.value,
            body,
            seconds,
            request_id=f"shadow-{leg.leg_id}",
            trace=span.headers(),
        )
        if reply.status != 200:
            return _Ended(common_pb2.LEG_OUTCOME_FAILED, detail=f"the engine answered with status {reply.status}")
        result = legs.shadow_result(reply.json)
        if result is None:
            covered, end, cached = None, common_pb2.LEG_END_UNSPECIFIED, _cached(reply)
        else:
            covered, end = result.covered_tokens, result.end
            # An engine that ends a leg before it admits it says nothing of cached tokens.
            cached = max(0, result.covered_tokens - result.computed_tokens)
        if leg.kind == common_pb2.LEG_KIND_EXPORT:
            params = legs.transfer_params(reply.json)
            if params is None:
                why = "the engine returned no transfer parameters"
                return _Ended(common_pb2.LEG_OUTCOME_FAILED, cached, why, covered, end)
            expires_at = asyncio.get_running_loop().time() + self._config.export_hold_seconds
            export = Export(rendering.tokens, leg.upto_tokens, params, expires_at)
            self._contexts.hold_export(session, leg.model, export)
        return _Ended(common_pb2.LEG_OUTCOME_DONE, cached, "", covered, end)


def _ended(task: "asyncio.Task[_Ended]") -> _Ended:
    if task.cancelled():
        return _Ended(common_pb2.LEG_OUTCOME_CANCELLED)
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, EngineTimeoutError):
        return _Ended(common_pb2.LEG_OUTCOME_TIMED_OUT, detail=str(error))
    if isinstance(error, EngineUnreachableError):
        return _Ended(common_pb2.LEG_OUTCOME_FAILED, detail=str(error))
    log.error("shadow_leg_crashed", exc_info=error)
    # What an unforeseen error says could quote the prompt, and the controller logs it.
    return _Ended(common_pb2.LEG_OUTCOME_FAILED, detail=type(error).__name__)


def _cached(reply: Reply) -> int:
    return legs.cached_tokens(reply.json) or 0
