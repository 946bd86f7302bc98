"""EngineService: instances that attach by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from controller.core.instance import Facts, LoadReport
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from controller.server import validation
from controller.server.errors import abort
from controller.server.plane import Attachment, Plane
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
        requests = aiter(request_iterator)
        attachment: Attachment | None = None
        reading: asyncio.Task[None] | None = None
        try:
            attachment = self._attach(await anext(requests, None))
            reading = asyncio.create_task(self._read(requests, attachment))
            async for message in attachment.messages():
                yield message
            if reading.done():
                reading.result()
        except RejectedError as error:
            await abort(context, error)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            if attachment is not None:
                self._plane.detach(attachment)

    async def _read(self, requests: AsyncIterator[pb.AttachRequest], attachment: Attachment) -> None:
        try:
            async for request in requests:
                self._take(request, attachment)
        finally:
            attachment.close()

    def _attach(self, request: pb.AttachRequest | None) -> Attachment:
        """Register the instance; raises RejectedError for a bad hello, an old incarnation or an unfit partner."""
        if request is None or not request.HasField("hello"):
            raise validation.invalid("message", "the first message must be a hello")
        hello = request.hello
        if hello.role not in (common.ROLE_PREFILL, common.ROLE_DECODE, common.ROLE_COLOCATED):
            raise validation.invalid("hello.role", "must be ROLE_PREFILL, ROLE_DECODE or ROLE_COLOCATED")
        if urlsplit(hello.url).scheme not in ("http", "https"):
            raise validation.invalid("hello.url", "must be a base URL, such as http://10.0.0.7:8000")
        if hello.block_size == 0:
            raise validation.invalid("hello.block_size", "must be the engine's KV block size in tokens")
        named = Declared(
            validation.name("hello.ref.name", hello.ref.name),
            validation.name("hello.model", hello.model),
            hello.role,
            validation.name("hello.url", hello.url, limit=validation.MAX_URL).rstrip("/"),
            validation.name("hello.hardware", hello.hardware, limit=validation.MAX_HARDWARE, empty=True),
        )
        facts = Facts(
            validation.name("hello.ref.incarnation", hello.ref.incarnation),
            hello.block_size,
            validation.name("hello.hash_algorithm", hello.hash_algorithm, empty=True),
            hello.max_context_tokens,
            validation.name("hello.plugin_version", hello.plugin_version, empty=True),
            validation.name("hello.vllm_version", hello.vllm_version, empty=True),
        )
        return self._plane.attach(named, facts, _resident(hello))

    def _take(self, request: pb.AttachRequest, attachment: Attachment) -> None:
        ref = attachment.ref
        with self._plane.turn() as (cluster, now):
            match request.WhichOneof("message"):
                case "load":
                    load = request.load
                    report = LoadReport(load.running, load.waiting, load.kv_usage, plugin=load)
                    cluster.heartbeat(now, ref, attachment.stream, report)
                case "shadow_progress":
                    progress = request.shadow_progress
                    key = validation.session_key("shadow_progress.session", progress.session)
                    cluster.progressed(now, ref, key, progress.covered_tokens)
                case "event" if request.event.kind == pb.ENGINE_EVENT_KIND_CACHE_RESET:
                    cluster.shrunk(now, ref, None, 0)
                case "event" if request.event.kind == pb.ENGINE_EVENT_KIND_SESSION_EVICTED:
                    key = validation.session_key("event.session", request.event.session)
                    cluster.shrunk(now, ref, key, request.event.tokens)
                case "hello":
                    raise validation.invalid("message", "a second hello is not allowed on one stream")
                case _:
                    # A newer engine may have more to say.
                    pass


def _resident(hello: pb.Hello) -> list[tuple[SessionKey, int]]:
    given = hello.resident_sessions
    if len(given) > validation.MAX_RESIDENT:
        raise validation.invalid(
            "hello.resident_sessions", f"{len(given)} given; at most {validation.MAX_RESIDENT} are allowed"
        )
    return [
        (validation.session_key(f"hello.resident_sessions[{index}].session", resident.session), resident.tokens)
        for index, resident in enumerate(given)
    ]
