"""HTTP to engines. Leaving any of these calls early closes the connection, and the engine aborts the request."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from pd_shadow.gateway.config import Deadlines
from pd_shadow.gateway.sse import SseSplitter

# Shorter than the keep-alive of vLLM's server (5 s), so that a pooled connection is not used as the engine closes it.
_KEEPALIVE_SECONDS = 2.0
_READ_BYTES = 256 * 1024
NO_TRACE: Mapping[str, str] = {}


class EngineUnreachableError(Exception):
    """The engine could not be reached, or the connection broke."""


class EngineTimeoutError(Exception):
    """The engine did not answer in time."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; `json` is None if the body is no JSON."""

    status: int
    raw: bytes
    json: Any


class StreamReply:
    """An answer whose status is known and whose body is still to come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self._response.content_type == "text/event-stream"

    async def read(self) -> Reply:
        """The whole body."""
        with _translated():
            return _reply(self.status, await self._response.read())

    async def events(self) -> AsyncIterator[bytes]:
        """The data of every event."""
        splitter = SseSplitter()
        chunks = self._response.content.iter_any()
        while True:
            with _translated():
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
            for event in splitter.feed(chunk):
                yield event


class EngineClient:
    """One connection pool to all engines."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def post(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any],
        seconds: float,
        request_id: str = "",
        trace: Mapping[str, str] = NO_TRACE,
    ) -> Reply:
        """POST and read the whole answer within `seconds`; raises EngineUnreachableError or EngineTimeoutError.

        `trace` are the headers of the span that the engine's belong to.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=self._deadlines.connect)
        with _translated():
            async with self._pool().post(
                url.rstrip("/") + path, data=orjson.dumps(body), headers=_headers(request_id, trace), timeout=timeout
            ) as response:
                return _reply(response.status, await response.read())

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any],
        request_id: str = "",
        trace: Mapping[str, str] = NO_TRACE,
    ) -> AsyncIterator[StreamReply]:
        """POST under the D leg's deadlines and hand out the answer as it comes; raises like `post`."""
        deadlines = self._deadlines
        # An answer that does not stream is silent until it is whole.
        silence = deadlines.decode_silence if body.get("stream") else None
        timeout = aiohttp.ClientTimeout(total=deadlines.decode, sock_connect=deadlines.connect, sock_read=silence)
        with _translated():
            response = await self._pool().post(
                url.rstrip("/") + path, data=orjson.dumps(body), headers=_headers(request_id, trace), timeout=timeout
            )
        async with response:
            yield StreamReply(response)

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The caps on calls and shadow legs bound the connections; a second limit here would only deadlock legs.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=_READ_BYTES)
        return self._session


def _headers(request_id: str, trace: Mapping[str, str]) -> dict[str, str]:
    headers = {"Content-Type": "application/json", **trace}
    if request_id:
        headers["X-Request-Id"] = request_id
    return headers


def _reply(status: int, raw: bytes) -> Reply:
    try:
        return Reply(status, raw, orjson.loads(raw))
    except orjson.JSONDecodeError:
        return Reply(status, raw, None)


class _translated:  # noqa: N801  used as a statement, like contextlib.suppress
    """Turns aiohttp's errors into the gateway's two."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A connect timeout is both a client error and a timeout: nobody was reached.
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            raise EngineUnreachableError("connecting timed out") from error
        if isinstance(error, TimeoutError):
            raise EngineTimeoutError("no answer within the deadline") from error
        if isinstance(error, (aiohttp.ClientError, OSError)):
            raise EngineUnreachableError(type(error).__name__) from error
