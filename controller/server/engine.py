"""EngineService: instances that attach by themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from controller.core.instance import Facts, InstanceRef, LoadReport
from controller.core.registry import Declared, describe_conflict
from controller.core.rejection import RejectedError
from controller.server import validation
from controller.server.errors import abort
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import engine_pb2 as pb
from pd_shadow.api.v1 import engine_pb2_grpc


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """One Attach stream is one instance's life as the controller sees it."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        ref: InstanceRef | None = None
        try:
            async for request in request_iterator:
                if ref is None:
                    ref, facts = self._hello(request)
                    interval = self._plane.cluster.config.discovery.poll_interval_seconds
                    yield pb.AttachResponse(welcome=pb.Welcome(load_interval_seconds=interval))
                else:
                    self._report(ref, facts, request)
        except RejectedError as error:
            await abort(context, error)
        finally:
            if ref is not None and self._plane.cluster.registry.live(ref) is not None:
                with self._plane.turn() as (cluster, now):
                    cluster.miss(now, ref.name, refused=True)

    def _hello(self, request: pb.AttachRequest) -> tuple[InstanceRef, Facts]:
        """Register the instance; raises RejectedError for a bad hello, an old incarnation or an unfit partner."""
        if not request.HasField("hello"):
            raise validation.invalid("message", "the first message must be a hello")
        hello = request.hello
        name = validation.name("hello.ref.name", hello.ref.name)
        incarnation = validation.name("hello.ref.incarnation", hello.ref.incarnation)
        model = validation.name("hello.model", hello.model)
        if hello.role not in (common.ROLE_PREFILL, common.ROLE_DECODE, common.ROLE_COLOCATED):
            raise validation.invalid("hello.role", "must be ROLE_PREFILL, ROLE_DECODE or ROLE_COLOCATED")
        if urlsplit(hello.url).scheme not in ("http", "https"):
            raise validation.invalid("hello.url", "must be a base URL, such as http://10.0.0.7:8000")
        if hello.block_size == 0:
            raise validation.invalid("hello.block_size", "must be the engine's KV block size in tokens")
        facts = Facts(incarnation, hello.block_size, hello.hash_algorithm, hello.max_context_tokens)
        with self._plane.turn() as (cluster, now):
            cluster.declare(Declared(name, model, hello.role, hello.url.rstrip("/"), request_level=False))
            changes = cluster.observe(now, name, facts, LoadReport())
        if changes.refused is not None:
            new, reason, partner = changes.refused
            raise RejectedError(reason, describe_conflict(new, reason, partner), field="hello")
        return InstanceRef(name, incarnation), facts

    def _report(self, ref: InstanceRef, facts: Facts, request: pb.AttachRequest) -> None:
        with self._plane.turn() as (cluster, now):
            if request.HasField("load"):
                load = request.load
                cluster.observe(now, ref.name, facts, LoadReport(load.running, load.waiting, load.kv_usage))
            elif request.HasField("shadow_progress"):
                progress = request.shadow_progress
                key = validation.session_key("shadow_progress.session", progress.session)
                cluster.shrunk(now, ref, key, progress.covered_tokens)
            elif request.HasField("event"):
                event = request.event
                if event.kind == pb.ENGINE_EVENT_KIND_CACHE_RESET:
                    cluster.shrunk(now, ref, None, 0)
                elif event.kind == pb.ENGINE_EVENT_KIND_SESSION_EVICTED:
                    key = validation.session_key("event.session", event.session)
                    cluster.shrunk(now, ref, key, event.tokens)
            else:
                raise validation.invalid("message", "a second hello is not allowed on one stream")
