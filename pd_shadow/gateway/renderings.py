"""Keeps every shadow target's rendering up to date: the latest wins, one in flight and one pending per target."""

import asyncio
import time
from dataclasses import dataclass

from pd_shadow.api.v1 import common_pb2, placement_pb2
from pd_shadow.common.logs import get_logger
from pd_shadow.gateway.cluster import ClusterView
from pd_shadow.gateway.contexts import Contexts, Conversation, SessionId
from pd_shadow.gateway.controller_client import ControllerClient
from pd_shadow.gateway.engine_client import EngineClient, EngineTimeoutError, EngineUnreachableError
from pd_shadow.gateway.metrics import Metrics
from pd_shadow.gateway.rendering import NotRenderableError, tokenize_body
from pd_shadow.gateway.tokens import Tokens, pack

log = get_logger("gateway.renderings")


@dataclass(slots=True)
class _Slot:
    """One target's pending rendering (the engine's URL), and the task that renders until nothing is pending."""

    pending: str | None
    task: "asyncio.Task[None] | None" = None


class _RenderFailedError(Exception):
    """The target engine did not render; the message holds no prompt text."""


class Renderings:
    """Renders conversations on target engines and reports them."""

    def __init__(
        self,
        contexts: Contexts,
        engines: EngineClient,
        controller: ControllerClient,
        cluster: ClusterView,
        metrics: Metrics,
        *,
        seconds: float,
        concurrency: int,
    ) -> None:
        self._contexts = contexts
        self._engines = engines
        self._controller = controller
        self._cluster = cluster
        self._metrics = metrics
        self._seconds = seconds
        self._turns = asyncio.Semaphore(concurrency)
        self._slots: dict[tuple[SessionId, str], _Slot] = {}

    def request(self, session: SessionId, model: str, url: str) -> None:
        """Render the session's latest context for `model` on the engine at `url`, as soon as its turn comes."""
        key = (session, model)
        slot = self._slots.get(key)
        if slot is not None:
            slot.pending = url
            return
        slot = self._slots[key] = _Slot(url)
        slot.task = asyncio.create_task(self._run(session, model, slot))
        slot.task.add_done_callback(lambda task: self._ended(key, slot, task))

    def cancel(self, session: SessionId) -> None:
        """Stop rendering for a session."""
        for key in [key for key in self._slots if key[0] == session]:
            slot = self._slots.pop(key)
            if slot.task is not None:
                slot.task.cancel()

    async def close(self) -> None:
        """Stop all rendering."""
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: tuple[SessionId, str], slot: _Slot, task: "asyncio.Task[None]") -> None:
        if self._slots.get(key) is slot:
            del self._slots[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("rendering_crashed", model=key[1], exc_info=error)

    async def _run(self, session: SessionId, model: str, slot: _Slot) -> None:
        while slot.pending is not None:
            async with self._turns:
                # What became pending while waiting for the turn is what gets rendered now.
                url, slot.pending = slot.pending, None
                conversation = self._contexts.conversation(session)
                if conversation is None:
                    return
                try:
                    tokens = await self._render(model, url, conversation)
                except (NotRenderableError, _RenderFailedError) as error:
                    self._report_failure(session, model, str(error))
                else:
                    self._report(session, model, conversation, tokens)

    async def _render(self, model: str, url: str, conversation: Conversation) -> "Tokens[int]":
        body = tokenize_body(model, conversation.body, conversation.output, partial=conversation.partial)
        try:
            reply = await self._engines.post(url, "/tokenize", body, self._seconds)
        except (EngineUnreachableError, EngineTimeoutError) as error:
            raise _RenderFailedError(str(error)) from error
        tokens = reply.json.get("tokens") if isinstance(reply.json, dict) else None
        if reply.status != 200 or not isinstance(tokens, list) or not tokens:
            # The engine's own words could quote the prompt.
            raise _RenderFailedError(f"the engine answered /tokenize with status {reply.status}")
        try:
            return pack(tokens)
        except (TypeError, OverflowError) as error:
            raise _RenderFailedError("the engine's tokens are no token ids") from error

    def _report(self, session: SessionId, model: str, conversation: Conversation, tokens: "Tokens[int]") -> None:
        now_us = time.time_ns() // 1_000
        added = self._contexts.add_rendering(session, model, tokens, conversation.cache_salt, now_us)
        if added is None:
            return
        rendering, kept = added
        self._metrics.renderings.labels(self._cluster.model_label(model), "ok").inc()
        self._send(session, model, revision=rendering.revision, tokens=len(tokens), kept_tokens=kept)

    def _report_failure(self, session: SessionId, model: str, error: str) -> None:
        log.info("rendering_failed", session=session[1], model=model, error=error)
        self._metrics.renderings.labels(self._cluster.model_label(model), "failed").inc()
        self._send(session, model, error=error)

    def _send(
        self,
        session: SessionId,
        model: str,
        *,
        revision: int = 0,
        tokens: int = 0,
        kept_tokens: int = 0,
        error: str = "",
    ) -> None:
        rendered = placement_pb2.ContextRendered(
            session=common_pb2.SessionKey(tenant=session[0], session_id=session[1]),
            model=model,
            revision=revision,
            tokens=tokens,
            kept_tokens=kept_tokens,
            error=error,
        )
        self._controller.report(
            placement_pb2.ReportShadowWorkRequest(gateway_id=self._controller.gateway_id, context_rendered=rendered)
        )
