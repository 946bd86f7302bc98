"""Asks the controller how warm each model is for a session: GetWarmth, for routers that block and for asyncio ones.

A router asks before every step, so nothing here may fail or hold it up: whatever goes wrong, the answer is UNKNOWN, and
for a session the controller has not met it is NEW.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from pd_shadow.api.v1 import common_pb2
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.api.v1.placement_pb2_grpc import PlacementServiceStub
from pd_shadow.common.controller_access import AccessFields, ControllerAccess
from pd_shadow.common.credential_files import CredentialError
from pd_shadow.common.logs import get_logger
from pd_shadow.common.tls import ClientTls, ClientTlsFields
from pd_shadow.router.warmth import NEW, UNKNOWN, ModelWarmth, SessionWarmth

if TYPE_CHECKING:
    from pd_shadow.api.v1.placement_pb2_grpc import PlacementServiceAsyncStub

DEADLINE_SECONDS = 0.1
"""Longest wait for an answer. One takes about a millisecond; a router that waits longer costs more than it saves."""
AWAY_SECONDS = 1.0
"""After a question without an answer, further ones are not sent for this long."""

log = get_logger("router.client")

# The clients' own parameters.
_FIELDS = AccessFields(ClientTlsFields.of("tls"), "token_file")
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class _Asker:
    """What both clients share: the request, what an error means, and when to ask at all."""

    def __init__(
        self,
        controller: str,
        tls: ClientTls | None,
        token_file: Path | None,
        deadline_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds: {deadline_seconds} must be greater than 0")
        self.access = ControllerAccess(controller, tls, token_file, fields=_FIELDS, on_stale=_stale)
        self.deadline_seconds = deadline_seconds
        self.closed = False
        self._clock = clock
        self._away_until = 0.0
        self._told: set[grpc.StatusCode] = set()

    def request(self, session_id: str, tenant: str) -> pb.GetWarmthRequest | None:
        """None when there is nobody to ask about, or nobody to ask."""
        if not session_id or self.closed or self._clock() < self._away_until:
            return None
        try:
            return pb.GetWarmthRequest(session=common_pb2.SessionKey(tenant=tenant, session_id=session_id))
        except (TypeError, ValueError):
            # Not text, or text that is not Unicode: no gateway knows such a session.
            return None

    def failed(self, error: grpc.RpcError) -> SessionWarmth:
        """Takes note of an error; logs each kind once until an answer comes."""
        code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
        if code is grpc.StatusCode.NOT_FOUND:
            return NEW
        if code in _NO_ANSWER:
            self._away_until = self._clock() + AWAY_SECONDS
        if not self.closed and code not in self._told:
            self._told.add(code)
            log.warning("warmth_unknown", controller=self.access.address, code=code.name)
        return UNKNOWN

    def answered(self, response: pb.GetWarmthResponse) -> SessionWarmth:
        self._told.clear()
        return SessionWarmth(
            response.current_model,
            {
                model.model: ModelWarmth(
                    model.prefill_tokens,
                    model.warm_fraction,
                    model.decode_tokens,
                    model.context_tokens,
                    model.estimated_prefill_seconds,
                    model.switch_probability,
                )
                for model in response.models
            },
        )


class _Link(NamedTuple):
    """A channel made with one set of certificates. Whoever asks holds it, so that a newer one does not end the RPC."""

    credentials: grpc.ChannelCredentials | None
    channel: grpc.Channel
    stub: PlacementServiceStub


class _AsyncLink(NamedTuple):
    credentials: grpc.ChannelCredentials | None
    channel: grpc.aio.Channel
    stub: PlacementServiceAsyncStub


class WarmthClient:
    """A controller's GetWarmth for routers that block; safe to share between threads. A context manager.

    Raises CredentialError for TLS or token files that cannot be used, ValueError for a deadline of 0 or less.
    """

    def __init__(
        self,
        controller: str,
        *,
        tls: ClientTls | None = None,
        token_file: Path | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker = _Asker(controller, tls, token_file, deadline_seconds, clock)
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def get(self, session_id: str, tenant: str = "") -> SessionWarmth:
        """The session's warmth within the deadline, NEW or UNKNOWN; never raises. `tenant` is its gateway's."""
        request = self._asker.request(session_id, tenant)
        if request is None:
            return UNKNOWN
        try:
            link = self._current()
            response = link.stub.GetWarmth(
                request, timeout=self._asker.deadline_seconds, metadata=self._asker.access.metadata()
            )
        except grpc.RpcError as error:
            return self._asker.failed(error)
        except ValueError:
            # What gRPC raises when another thread closed the channel meanwhile.
            return UNKNOWN
        return self._asker.answered(response)

    def close(self) -> None:
        """End the connection; questions after this are answered UNKNOWN."""
        self._asker.closed = True
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.channel.close()

    def __enter__(self) -> WarmthClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _current(self) -> _Link:
        credentials = self._asker.access.credentials()
        with self._lock:
            if self._asker.closed:
                raise ValueError("closed")
            if self._link is None or self._link.credentials is not credentials:
                channel = self._asker.access.channel()
                self._link = _Link(credentials, channel, PlacementServiceStub(channel))
            return self._link


class AsyncWarmthClient:
    """A controller's GetWarmth for asyncio; the async twin of WarmthClient. Use it in one event loop."""

    def __init__(
        self,
        controller: str,
        *,
        tls: ClientTls | None = None,
        token_file: Path | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker = _Asker(controller, tls, token_file, deadline_seconds, clock)
        self._link: _AsyncLink | None = None

    async def get(self, session_id: str, tenant: str = "") -> SessionWarmth:
        """The session's warmth within the deadline, NEW or UNKNOWN; raises nothing but its caller's cancellation."""
        request = self._asker.request(session_id, tenant)
        if request is None:
            return UNKNOWN
        link = self._current()
        try:
            response = await link.stub.GetWarmth(
                request, timeout=self._asker.deadline_seconds, metadata=self._asker.access.metadata()
            )
        except grpc.aio.AioRpcError as error:
            return self._asker.failed(error)
        except asyncio.CancelledError:
            # What gRPC raises too when the channel is closed under a question.
            task = asyncio.current_task()
            if not self._asker.closed or task is None or task.cancelling():
                raise
            return UNKNOWN
        return self._asker.answered(response)

    async def close(self) -> None:
        """End the connection; questions after this are answered UNKNOWN."""
        self._asker.closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.channel.close(None)

    async def __aenter__(self) -> AsyncWarmthClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    def _current(self) -> _AsyncLink:
        credentials = self._asker.access.credentials()
        if self._link is None or self._link.credentials is not credentials:
            channel = self._asker.access.aio_channel(credentials)
            self._link = _AsyncLink(credentials, channel, PlacementServiceStub(channel))
        return self._link


def _stale(error: CredentialError) -> None:
    log.warning("credentials_stale", reason=str(error))
