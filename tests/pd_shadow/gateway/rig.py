"""A scripted cluster in one process: fake engines over HTTP, a scripted controller over gRPC, a real gateway."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import orjson
from aiohttp import web
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from pd_shadow.api.v1 import common_pb2, placement_pb2
from pd_shadow.api.v1.placement_pb2_grpc import PlacementServiceServicer, add_PlacementServiceServicer_to_server
from pd_shadow.common.config import parse
from pd_shadow.common.tracing import Tracing
from pd_shadow.gateway.app import Gateway
from pd_shadow.gateway.config import GatewayConfig

BLOCK = 4
ROLES = {"p": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE, "c": common_pb2.ROLE_COLOCATED}
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-p",
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_prefill_cached_tokens": 4,
}


def encode(text: str) -> list[int]:
    """The fake engines' tokenizer: one token a character."""
    return [ord(c) for c in text]


def render(messages: list[dict[str, Any]], *, generation: bool = False, open_ended: bool = False) -> str:
    """The fake engines' chat template."""
    text = "".join(f"<{m['role']}>{m.get('content') or ''}</>" for m in messages)
    if open_ended:
        text = text.removesuffix("</>")
    return text + ("<assistant>" if generation else "")


@dataclass
class Seen:
    """One request an engine got."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]


Reply = tuple[int, dict[str, Any]]


class FakeEngine:
    """An OpenAI-compatible engine that answers like vLLM, or as a test scripts it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.seen: list[Seen] = []
        self.arrived = asyncio.Condition()
        # Requests whose connection the gateway closed before the answer was out.
        self.aborted = 0
        self.cached = 4
        # D's own cached tokens; None: whatever was handed off.
        self.decode_cached: int | None = None
        self.words = ["Hel", "lo"]
        # One a word.
        self.token_ids: Sequence[int] = range(100)
        # Cleared: requests (or, with hold_after, streams after so many words) wait.
        self.go = asyncio.Event()
        self.go.set()
        self.hold_after: int | None = None
        self.script: Callable[[Seen], Reply | None] = lambda seen: None
        self.break_after: int | None = None
        self.error_after: int | None = None
        self.drop_params = False
        self.tokenize: Callable[[dict[str, Any]], Awaitable[Reply]] = self._tokenize

    async def serve(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, orjson.loads(await request.read()), request.headers)
        self.seen.append(seen)
        async with self.arrived:
            self.arrived.notify_all()
        try:
            if request.path == "/tokenize":
                status, payload = await self.tokenize(seen.body)
                return web.json_response(payload, status=status)
            if self.hold_after is None:
                await self.go.wait()
            scripted = self.script(seen)
            if scripted is not None:
                return web.json_response(scripted[1], status=scripted[0])
            if seen.body.get("stream"):
                return await self._stream(request, seen.body)
            return web.json_response(self._whole(seen))
        except asyncio.CancelledError:
            self.aborted += 1
            async with self.arrived:
                self.arrived.notify_all()
            raise

    def calls(self, path: str = "") -> list[Seen]:
        """What arrived at a path, or at all generating paths."""
        return [s for s in self.seen if (s.path == path if path else s.path != "/tokenize")]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something about this engine to become true."""
        async with self.arrived:
            await self.arrived.wait_for(condition)

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return encode(render(body["messages"], generation=True))
        prompt = body["prompt"]
        return encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _usage(self, body: dict[str, Any], completion: int) -> dict[str, Any]:
        prompt = len(self._prompt(body))
        cached = self.cached
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            cached = prompt - 1 if self.decode_cached is None else self.decode_cached
            cached = params.get("remote_prefill_cached_tokens", cached)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _whole(self, seen: Seen) -> dict[str, Any]:
        body = seen.body
        chat = "messages" in body
        words = self.words[: body.get("max_tokens") or len(self.words)]
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        payload: dict[str, Any] = {"id": "x", "model": body["model"], "choices": [choice], "extra": {"kept": True}}
        payload["usage"] = self._usage(body, len(words))
        params = body.get("kv_transfer_params") or {}
        payload["kv_transfer_params"] = (
            dict(PARAMS) if params.get("do_remote_decode") and not self.drop_params else None
        )
        if body.get("return_token_ids"):
            (payload if chat else choice)["prompt_token_ids"] = self._prompt(body)
            choice["token_ids"] = list(self.token_ids[: len(words)])
        return payload

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(data: bytes) -> None:
            await response.write(b"data: " + data + b"\n\n")

        for number, word in enumerate(self.words):
            if number == self.hold_after:
                await self.go.wait()
            if number == self.break_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == self.error_after:
                await send(orjson.dumps({"error": {"message": "engine died", "type": "x", "code": 500}}))
                break
            said = {"delta": {"content": word}} if "messages" in body else {"text": word}
            choice = {"index": 0, **said, "token_ids": [self.token_ids[number]]}
            chunk = {"id": "x", "model": body["model"], "choices": [choice], "extra": 1}
            if number == 0 and body.get("return_token_ids"):
                (chunk if "messages" in body else choice)["prompt_token_ids"] = self._prompt(body)
            await send(orjson.dumps(chunk))
        else:
            if (body.get("stream_options") or {}).get("include_usage"):
                await send(orjson.dumps({"id": "x", "choices": [], "usage": self._usage(body, len(self.words))}))
        await send(b"[DONE]")
        return response

    async def _tokenize(self, body: dict[str, Any]) -> Reply:
        if "messages" in body:
            assert body["add_generation_prompt"] is False
            text = render(body["messages"], open_ended=bool(body.get("continue_final_message")))
        else:
            text = body["prompt"]
        return 200, {"tokens": encode(text), "count": len(text), "max_model_len": 8192}


@dataclass
class Refusal:
    """A gRPC error with google.rpc details."""

    code: grpc.StatusCode
    message: str
    details: list[Any] = field(default_factory=list)

    async def abort(self, context: Any) -> None:
        packed = []
        for detail in self.details:
            one = any_pb2.Any()
            one.Pack(detail)
            packed.append(one)
        status = status_pb2.Status(code=self.code.value[0], message=self.message, details=packed)
        await context.abort(self.code, self.message, (("grpc-status-details-bin", status.SerializeToString()),))


def reason(name: str) -> error_details_pb2.ErrorInfo:
    """ErrorInfo with a RejectionReason."""
    return error_details_pb2.ErrorInfo(reason=name, domain="pd-shadow")


class Controller(PlacementServiceServicer):
    """Answers as scripted, remembers everything it was told."""

    def __init__(self) -> None:
        self.view = placement_pb2.WatchClusterResponse()
        self.views: list[asyncio.Queue[placement_pb2.WatchClusterResponse]] = []
        self.work: asyncio.Queue[placement_pb2.WatchShadowWorkResponse | None] = asyncio.Queue()
        self.changed = asyncio.Condition()
        self.begun: list[placement_pb2.BeginCallRequest] = []
        self.ended: list[placement_pb2.EndCallRequest] = []
        self.progress: list[placement_pb2.ReportProgressRequest] = []
        self.rendered: list[placement_pb2.ContextRendered] = []
        self.legs: list[placement_pb2.LegFinished] = []
        self.watchers = 0
        self.targets: list[placement_pb2.ShadowTarget] = []
        self.end_targets: list[placement_pb2.ShadowTarget] = []
        self.refusal: Refusal | None = None
        self.without_prefill = False
        self.colocated = False
        # Cleared: BeginCall waits.
        self.go = asyncio.Event()
        self.go.set()

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something about this controller to become true."""
        async with self.changed:
            await self.changed.wait_for(condition)

    def place(self, model: str, role: int) -> placement_pb2.Placement:
        """The model's one instance in a role."""
        for instance in self.view.instances:
            if instance.model == model and instance.role == role:
                return placement_pb2.Placement(
                    instance=instance.endpoint,
                    reason=common_pb2.PLACEMENT_REASON_FIRST_CALL,
                    role=instance.role,
                )
        raise LookupError(model)

    async def BeginCall(self, request: Any, context: Any) -> placement_pb2.BeginCallResponse:  # noqa: N802
        self.begun.append(request)
        await self._note()
        await self.go.wait()
        if self.refusal is not None:
            await self.refusal.abort(context)
        call_id = f"call-{len(self.begun)}"
        if self.colocated:
            one = self.place(request.model, common_pb2.ROLE_COLOCATED)
            return placement_pb2.BeginCallResponse(call_id=call_id, decode=one, shadow_targets=self.targets)
        return placement_pb2.BeginCallResponse(
            call_id=call_id,
            prefill=None if self.without_prefill else self.place(request.model, common_pb2.ROLE_PREFILL),
            decode=self.place(request.model, common_pb2.ROLE_DECODE),
            shadow_targets=self.targets,
        )

    async def ReportProgress(self, request_iterator: Any, context: Any) -> placement_pb2.ReportProgressResponse:  # noqa: N802
        async for request in request_iterator:
            self.progress.append(request)
            await self._note()
        return placement_pb2.ReportProgressResponse()

    async def EndCall(self, request: Any, context: Any) -> placement_pb2.EndCallResponse:  # noqa: N802
        self.ended.append(request)
        await self._note()
        return placement_pb2.EndCallResponse(shadow_targets=self.end_targets)

    async def GetWarmth(self, request: Any, context: Any) -> placement_pb2.GetWarmthResponse:  # noqa: N802
        return placement_pb2.GetWarmthResponse()

    async def WatchShadowWork(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.watchers += 1
        await self._note()
        while (work := await self.work.get()) is not None:
            yield work

    async def ReportShadowWork(self, request: Any, context: Any) -> placement_pb2.ReportShadowWorkResponse:  # noqa: N802
        if request.HasField("context_rendered"):
            self.rendered.append(request.context_rendered)
        else:
            self.legs.append(request.leg_finished)
        await self._note()
        return placement_pb2.ReportShadowWorkResponse()

    async def WatchCluster(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        queue: asyncio.Queue[placement_pb2.WatchClusterResponse] = asyncio.Queue()
        self.views.append(queue)
        yield self.view
        while True:
            yield await queue.get()


class Rig:
    """Models a and b, each with P and D or with one colocated engine, a controller and a gateway."""

    def __init__(self, *, colocated: bool = False) -> None:
        self.controller = Controller()
        self.controller.colocated = colocated
        self.engines = {f"{m}-{r}": FakeEngine(f"{m}-{r}") for m in "ab" for r in ("c" if colocated else "pd")}
        if colocated:
            self.ac, self.bc = self.engines.values()
        else:
            self.ap, self.ad, self.bp, self.bd = self.engines.values()
        self.gateway: Gateway
        self.http: aiohttp.ClientSession
        self.url = ""
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start_controller(self) -> None:
        """Start the gRPC server, on the same port if it ran before."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add_PlacementServiceServicer_to_server(self.controller, self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop_controller(self) -> None:
        """Stop the gRPC server at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def target(self, model: str) -> placement_pb2.ShadowTarget:
        """A shadow target rendered by the model's P or colocated engine."""
        role = common_pb2.ROLE_COLOCATED if self.controller.colocated else common_pb2.ROLE_PREFILL
        placement = self.controller.place(model, role)
        return placement_pb2.ShadowTarget(model=model, renderer=placement.instance, block_size=BLOCK)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """(status, JSON or text, headers) of a call."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.post(self.url + path, data=data, headers=named) as response:
            raw = await response.read()
            payload = orjson.loads(raw) if response.content_type == "application/json" else raw.decode()
            return response.status, payload, response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        """(status, JSON or text)."""
        async with self.http.get(self.url + path) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if response.content_type == "application/json" else raw.decode()

    async def chat(self, text: str = "hi", model: str = "a", session: str = "s1", **body: Any) -> tuple[int, Any, Any]:
        """A chat call."""
        headers = {"X_Session_ID": session} if session else {}
        messages = body.pop("messages", [{"role": "user", "content": text}])
        return await self.post("/v1/chat/completions", {"model": model, "messages": messages, **body}, **headers)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if it never moved."""
        return self.gateway.metrics.registry.get_sample_value(f"pd_shadow_gateway_{name}", labels) or 0.0


async def start_engine(stack: AsyncExitStack, engine: FakeEngine) -> None:
    """Let a scripted engine listen at its `url` until the stack ends."""
    app = web.Application()
    app.router.add_route("POST", "/{path:.*}", engine.serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"


@asynccontextmanager
async def serving(engines: Iterable[FakeEngine]) -> AsyncIterator[None]:
    """Scripted engines that listen inside the block, each at its `url`."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await start_engine(stack, engine)
        yield


@asynccontextmanager
async def running(
    settings: dict[str, Any] | None = None,
    *,
    with_controller: bool = True,
    colocated: bool = False,
    tracing: Tracing | None = None,
) -> AsyncIterator[Rig]:
    """A rig whose gateway knows the cluster."""
    rig = Rig(colocated=colocated)
    async with AsyncExitStack() as stack:
        for engine in rig.engines.values():
            await start_engine(stack, engine)
            model, role = engine.name.split("-")
            rig.controller.view.instances.add(
                endpoint=common_pb2.InstanceEndpoint(
                    ref=common_pb2.InstanceRef(name=engine.name, incarnation="1"), url=engine.url
                ),
                role=ROLES[role],
                model=model,
                state=common_pb2.INSTANCE_STATE_READY,
                block_size=BLOCK,
                max_context_tokens=8192,
            )
        await rig.start_controller()
        stack.push_async_callback(rig.stop_controller)
        given = {"controller": rig.address, "listen": "127.0.0.1:0", **(settings or {})}
        if not with_controller:
            await rig.stop_controller()
        rig.gateway = Gateway(parse(GatewayConfig, given), tracing)
        known = asyncio.Event()
        update = rig.gateway.cluster.update

        def updated(instances: Iterable[placement_pb2.ClusterInstance]) -> None:
            update(instances)
            known.set()

        rig.gateway.cluster.update = updated  # type: ignore[method-assign]
        rig.url = await rig.gateway.start()
        stack.push_async_callback(rig.gateway.stop)
        rig.http = await stack.enter_async_context(aiohttp.ClientSession())
        if with_controller:
            await rig.controller.until(lambda: rig.controller.watchers > 0)
            await known.wait()
        yield rig
