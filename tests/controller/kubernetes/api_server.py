"""An API server for tests: pods to list and watch, and Leases, with the parts of the protocol that go wrong.

What it does is what kubernetes.io/docs/reference/using-api/api-concepts says of an API server: one counter of versions
for everything, lists in pages, watches that begin at a version or fail with 410, bookmarks, and writes that must carry
the current version. `emit` sends an event whatever the truth is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Json = dict[str, Any]

# Ends a watch's connection; the bytes go out first.
END = object()


class ApiServer:
    """Listens on loopback between `start` and `stop`, always on one port."""

    def __init__(self) -> None:
        self.version = 100
        # Watches from before this version are answered with 410.
        self.oldest = 0
        self.pods: dict[tuple[str, str], Json] = {}
        self.leases: dict[tuple[str, str], Json] = {}
        self.history: list[tuple[int, str, Json]] = []
        # What was asked of it: API group, resource, verb.
        self.calls: list[tuple[str, str, str]] = []
        self.page_limit = 1_000
        self.token: str | None = None
        # The next answers to requests for pods, or Leases, in place of the true ones.
        self.failures: dict[str, list[web.Response]] = {"pods": [], "leases": []}
        # While cleared, requests for Leases hang.
        self.lease_gate = asyncio.Event()
        self.lease_gate.set()
        self._watches: dict[asyncio.Queue[Any], str] = {}
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._happened = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def watches(self) -> int:
        return len(self._watches)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._get_pods)
        leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        app.router.add_post(leases, self._create_lease)
        app.router.add_get(leases + "/{name}", self._get_lease)
        app.router.add_put(leases + "/{name}", self._update_lease)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Nobody listens any more, and every connection breaks."""
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a request or a change made it true."""
        while not true():
            await self._happened.wait()

    def count(self, resource: str, verb: str) -> int:
        return sum(call[1:] == (resource, verb) for call in self.calls)

    def put_pod(self, pod: Json) -> Json:
        """Create or change a pod; watches hear of it."""
        meta = pod["metadata"]
        key = (meta["namespace"], meta["name"])
        kind = "MODIFIED" if key in self.pods else "ADDED"
        stored = self._stored(pod)
        self.pods[key] = stored
        self._tell(kind, stored)
        return stored

    def delete_pod(self, name: str, namespace: str = "ns") -> Json:
        stored = self._stored(self.pods.pop((namespace, name)))
        self._tell("DELETED", stored)
        return stored

    def put_lease(self, name: str, spec: Json, namespace: str = "ns") -> None:
        """As if another client had written it."""
        self.leases[namespace, name] = self._stored(
            {"metadata": {"namespace": namespace, "name": name}, "spec": spec, "kind": "Lease"}
        )

    def emit(self, kind: str, found: Json, namespace: str = "ns") -> None:
        """Send one event to the watches of the namespace, true or not."""
        self.emit_bytes(json.dumps({"type": kind, "object": found}).encode() + b"\n", namespace)

    def emit_bytes(self, data: object, namespace: str = "ns") -> None:
        for queue, watched in self._watches.items():
            if watched == namespace:
                queue.put_nowait(data)

    def bookmark(self) -> None:
        self.emit("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}})

    def expire_watches(self) -> None:
        """What an API server says in a watch that has become too old."""
        self.oldest = self.version
        self.emit("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"})
        self.end_watches()

    def end_watches(self) -> None:
        for queue in self._watches:
            queue.put_nowait(END)

    def _stored(self, found: Json) -> Json:
        self.version += 1
        return {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}}

    def _tell(self, kind: str, pod: Json) -> None:
        self.history.append((self.version, kind, pod))
        self.emit(kind, pod, pod["metadata"]["namespace"])
        self._notice()

    def _notice(self) -> None:
        self._happened.set()
        self._happened = asyncio.Event()

    def _refused(self, request: web.Request, group: str, resource: str, verb: str) -> web.Response | None:
        self.calls.append((group, resource, verb))
        self._notice()
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        return self.failures[resource].pop(0) if self.failures[resource] else None

    async def _get_pods(self, request: web.Request) -> web.StreamResponse:
        namespace, query = request.match_info["namespace"], request.query
        refused = self._refused(request, "", "pods", "watch" if "watch" in query else "list")
        if refused is not None:
            return refused
        if "watch" in query:
            return await self._watch(request, namespace, int(query["resourceVersion"]))
        assert query["labelSelector"] == "pdshadow.dev/role"
        found = [
            pod
            for (where, _), pod in sorted(self.pods.items())
            if where == namespace and query["labelSelector"] in pod["metadata"].get("labels", {})
        ]
        first = int(query.get("continue", 0))
        last = first + min(int(query["limit"]), self.page_limit)
        meta = {"resourceVersion": str(self.version)}
        if last < len(found):
            meta["continue"] = str(last)
        return web.json_response({"kind": "PodList", "metadata": meta, "items": found[first:last]})

    async def _watch(self, request: web.Request, namespace: str, version: int) -> web.StreamResponse:
        if version < self.oldest:
            return _status(410, "too old resource version")
        assert request.query["allowWatchBookmarks"] == "1" or request.query["allowWatchBookmarks"] == "true"
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for happened, kind, pod in self.history:
            if happened > version and pod["metadata"]["namespace"] == namespace:
                queue.put_nowait(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
        self._watches[queue] = namespace
        self._notice()
        try:
            while (data := await queue.get()) is not END:
                await response.write(data)
        finally:
            del self._watches[queue]
            self._notice()
        if request.transport is not None:
            # No last chunk: a connection that breaks.
            request.transport.close()
        return response

    async def _get_lease(self, request: web.Request) -> web.StreamResponse:
        refused = self._refused(request, "coordination.k8s.io", "leases", "get")
        await self.lease_gate.wait()
        key = (request.match_info["namespace"], request.match_info["name"])
        if refused is not None:
            return refused
        return web.json_response(self.leases[key]) if key in self.leases else _status(404, "not found")

    async def _create_lease(self, request: web.Request) -> web.StreamResponse:
        refused = self._refused(request, "coordination.k8s.io", "leases", "create")
        await self.lease_gate.wait()
        lease = await request.json()
        key = (request.match_info["namespace"], lease["metadata"]["name"])
        if refused is not None:
            return refused
        if key in self.leases:
            return _status(409, "already exists")
        self.leases[key] = self._stored(lease)
        self._notice()
        return web.json_response(self.leases[key], status=201)

    async def _update_lease(self, request: web.Request) -> web.StreamResponse:
        refused = self._refused(request, "coordination.k8s.io", "leases", "update")
        await self.lease_gate.wait()
        lease = await request.json()
        key = (request.match_info["namespace"], request.match_info["name"])
        if refused is not None:
            return refused
        if key not in self.leases:
            return _status(404, "not found")
        if lease["metadata"].get("resourceVersion") != self.leases[key]["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        assert lease["spec"]["leaseDurationSeconds"] > 0
        self.leases[key] = self._stored(lease)
        self._notice()
        return web.json_response(self.leases[key])


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def pod(
    name: str,
    *,
    uid: str = "",
    role: str | None = "prefill",
    model: str | None = "m",
    ip: str = "127.0.0.1",
    ready: bool = True,
    terminating: bool = False,
    restarts: int = 0,
    port: object = None,
    namespace: str = "ns",
    created: str = "2026-01-01T00:00:00Z",
    version: int | str | None = None,
    annotations: dict[str, str] | None = None,
    phase: str = "Running",
    host_network: bool = False,
) -> Json:
    """A pod as the API shows it; without a uid, `name`-1."""
    labels = {"pdshadow.dev/role": role, "pdshadow.dev/model": model}
    given = {**({} if port is None else {"pdshadow.dev/port": str(port)}), **(annotations or {})}
    meta: Json = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"{name}-1",
        "creationTimestamp": created,
        "labels": {key: value for key, value in labels.items() if value is not None},
        "annotations": given,
    }
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    if version is not None:
        meta["resourceVersion"] = str(version)
    status: Json = {
        "phase": phase,
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}],
        "containerStatuses": [{"name": "engine", "restartCount": restarts}],
    }
    if ip:
        status["podIP"] = ip
    return {"metadata": meta, "spec": {"hostNetwork": True} if host_network else {}, "status": status}
