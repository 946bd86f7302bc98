"""The API server's protocol: lists in pages, watches as lines of JSON, and Leases with optimistic locking.

Sources: kubernetes.io/docs/reference/using-api/api-concepts (watches, bookmarks, 410 Gone, limit and continue),
and the coordination.k8s.io/v1 reference.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import orjson

from controller.kubernetes.access import Access

# The API server ends a watch after this time; resuming costs one request, and a dead connection is noticed by then.
WATCH_SECONDS = 60
_SILENCE_SECONDS = WATCH_SECONDS + 15.0
_REQUEST_SECONDS = 10.0
_PAGE = 500
# etcd takes objects of 1.5 MiB at most; a longer line is not an API server's.
_LINE_BYTES = 4 * 1024 * 1024

GONE = 410
NOT_FOUND = 404
CONFLICT = 409

Json = dict[str, Any]


class ApiError(Exception):
    """The API server refused, or did not answer (`status` 0)."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered later; else a watch cannot go on where it was."""
        return self.status == 0 or self.status == 429 or self.status >= 500


class MalformedError(ApiError):
    """The answer is not an API server's."""

    def __init__(self, message: str) -> None:
        super().__init__(0, f"{message}; is this an API server?")

    @property
    def passing(self) -> bool:
        return False


class Listing(NamedTuple):
    """Every object of one kind in a namespace, and where a watch goes on from."""

    items: list[Json]
    version: str


class WatchEvent(NamedTuple):
    """ADDED, MODIFIED, DELETED or BOOKMARK, and the object; of a bookmark, only its version."""

    kind: str
    object: Json
    version: str


class Api:
    """A client for one API server; a context manager. Every method raises ApiError."""

    def __init__(self, access: Access) -> None:
        self._access = access
        # Reads the CA: a wrong file is told at the start.
        self._tls = access.tls()

    async def __aenter__(self) -> Api:
        # Every watch keeps a connection, so that a limit would be one on namespaces.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True)
        self._http = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def list_pods(self, namespace: str, selector: str) -> Listing:
        """All pods the selector matches, as of one version."""
        items: list[Json] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        while True:
            page = await self._call("GET", _pods(namespace), query)
            found, meta = page.get("items"), page.get("metadata")
            if not isinstance(found, list) or not isinstance(meta, dict):
                raise MalformedError("the list of pods has no items or no metadata")
            items += found
            if not meta.get("continue"):
                return Listing(items, str(meta.get("resourceVersion", "")))
            query["continue"] = str(meta["continue"])

    @contextlib.asynccontextmanager
    async def watch_pods(self, namespace: str, selector: str, version: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """What happened after `version`; ends when the API server has had enough, or the connection breaks.

        Entered once the API server has agreed. A version too old to go on from is an ApiError of status 410, whether it
        comes as answer or as event.
        """
        query = {
            "labelSelector": selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, connect=_REQUEST_SECONDS, sock_read=_SILENCE_SECONDS)
        try:
            async with self._http.get(
                self._access.url + _pods(namespace),
                params=query,
                headers=self._access.headers(),
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                await _check(response)
                yield _events(response.content)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _unreachable(error) from error

    async def get_lease(self, namespace: str, name: str) -> Json | None:
        """The Lease, or None where there is none yet."""
        try:
            return _lease(await self._call("GET", f"{_leases(namespace)}/{name}"))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def create_lease(self, namespace: str, lease: Json) -> Json:
        """409 when somebody else was first."""
        return _lease(await self._call("POST", _leases(namespace), body=lease))

    async def update_lease(self, namespace: str, lease: Json) -> Json:
        """409 when it is no longer at the version that `lease` carries."""
        return _lease(await self._call("PUT", f"{_leases(namespace)}/{lease['metadata']['name']}", body=lease))

    async def _call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        try:
            async with self._http.request(
                method,
                self._access.url + path,
                params=query,
                data=None if body is None else orjson.dumps(body),
                headers={"Content-Type": "application/json", **self._access.headers()},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                await _check(response)
                return _parsed(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _unreachable(error) from error


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    # The body is a Status object, or a proxy's page.
    try:
        message = str(_parsed(await response.read()).get("message", ""))
    except ApiError:
        message = ""
    hint = {
        401: "; is the token in token_file this cluster's?",
        403: "; grant the verbs of controller/discovery/rbac.py to the service account",
    }.get(response.status, "")
    retry_after = response.headers.get("Retry-After", "")
    raise ApiError(
        response.status,
        f"the API server answers {response.status} {message or response.reason}{hint}",
        float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0,
    )


def _lease(found: Json) -> Json:
    meta = found.get("metadata")
    if not isinstance(meta, dict) or "name" not in meta or not isinstance(found.get("spec", {}), dict):
        raise MalformedError("a Lease without name or spec")
    return found


def _event(line: bytes) -> WatchEvent:
    event = _parsed(line)
    kind, found = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(found, dict):
        raise MalformedError("a watch event has no type or no object")
    if kind == "ERROR":
        code = found.get("code")
        raise ApiError(code if isinstance(code, int) else 0, f"the watch ended: {found.get('message', 'no reason')}")
    meta = found.get("metadata")
    return WatchEvent(kind, found, str(meta.get("resourceVersion", "")) if isinstance(meta, dict) else "")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[WatchEvent]:
    async for line in _lines(content):
        yield _event(line)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines; what a broken connection leaves of one is dropped, since the watch that goes on brings it again."""
    rest = bytearray()
    async for chunk in content.iter_any():
        start = len(rest)
        rest += chunk
        if (end := rest.rfind(b"\n", start)) >= 0:
            whole, rest = rest[:end], rest[end + 1 :]
            for line in whole.split(b"\n"):
                if line:
                    yield bytes(line)
        if len(rest) > _LINE_BYTES:
            raise MalformedError(f"a watch event is longer than {_LINE_BYTES} bytes")


def _parsed(text: bytes) -> Json:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedError(f"expected an object, got {type(value).__name__}")
    return value


def _unreachable(error: Exception) -> ApiError:
    if isinstance(error, asyncio.TimeoutError):
        return ApiError(0, "no answer in time")
    return ApiError(0, f"{type(error).__name__}: {error}")


def _pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def _leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
