"""The spans of calls, and of the shadow legs that calls give rise to.

A shadow leg is a trace of its own: it serves no call. It is linked to the session's latest call, which is why it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from pd_shadow.common.tracing import NO_SPAN, Span, Tracing
from pd_shadow.gateway.contexts import SessionId


class CallTraces:
    """Begins spans; remembers the latest call's of at most `sessions` sessions."""

    def __init__(self, tracing: Tracing, sessions: int) -> None:
        self._tracing = tracing
        self._most = sessions
        self._latest: OrderedDict[SessionId, Span] = OrderedDict()

    def call(self, session: SessionId | None, headers: Mapping[str, str]) -> Span:
        """A client's call; within the client's own trace if it names one."""
        span = self._tracing.serve("call", headers)
        if session is not None and span is not NO_SPAN:
            span.set(tenant=session[0], session=session[1])
            self._latest[session] = span
            self._latest.move_to_end(session)
            if len(self._latest) > self._most:
                self._latest.popitem(last=False)
        return span

    def shadow_leg(self, session: SessionId) -> Span:
        """A leg for a session's next model."""
        span = self._tracing.apart("shadow_leg", self._latest.get(session))
        span.set(tenant=session[0], session=session[1])
        return span
