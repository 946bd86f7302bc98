"""An engine that answers completions as vLLM does, or as a test scripts it; in the test's process or one of its own.

As a process: `python scripted_engine.py PORT [TRACE_FILE]`. With a trace file it is one with the plugin.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

Body = dict[str, Any]


class ScriptedEngine:
    """`seen` are all request bodies in order; shadow legs are those that do not stream."""

    def __init__(self, *, plugin: bool = False, trace_file: Path | None = None) -> None:
        self.plugin = plugin
        self.trace_file = trace_file
        self.url = ""
        self.seen: list[Body] = []
        self.streaming = 0
        self.most_streaming = 0
        self.aborted_legs = 0
        self.changed = asyncio.Condition()
        # Tokens per chunk of a stream; None: one each.
        self.chunks: list[list[int]] | None = None
        self.refuse: Callable[[Body], int | None] = lambda body: None
        self.break_stream: Body | None = None
        self.cached_tokens = 0
        self.result: Body | None = {"covered_tokens": 4096, "computed_tokens": 4096, "end": "done"}
        # Streams wait for it before their first token, legs before their answer.
        self.go: Callable[[], bool] = lambda: True
        self.leg_go: Callable[[], bool] = lambda: True

    @property
    def normal(self) -> list[Body]:
        return [body for body in self.seen if body.get("stream")]

    @property
    def legs(self) -> list[Body]:
        return [body for body in self.seen if not body.get("stream")]

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        await self.notify()
        status = self.refuse(body)
        if status is not None:
            return web.json_response({"error": {"message": "no"}}, status=status)
        return await (self._stream(request, body) if body.get("stream") else self._leg(body))

    async def _leg(self, body: Body) -> web.Response:
        try:
            await self.until(self.leg_go)
            # An engine computes for a while.
            await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.aborted_legs += 1
            await self.notify()
            raise
        if self.trace_file is not None:
            self._trace(self.trace_file)
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        params = {"pd_shadow": self.result} if self.plugin and self.result is not None else None
        return web.json_response({"choices": [{"text": ""}], "usage": usage, "kv_transfer_params": params})

    async def _stream(self, request: web.Request, body: Body) -> web.StreamResponse:
        self.streaming += 1
        self.most_streaming = max(self.most_streaming, self.streaming)
        await self.notify()
        try:
            await self.until(self.go)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for ids in self.chunks or [[n] for n in range(body["max_tokens"])]:
                await _send(response, {"choices": [{"index": 0, "text": "a", "token_ids": ids}]})
            if self.break_stream is not None:
                await _send(response, self.break_stream)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.streaming -= 1
            await self.notify()
        return response

    def _trace(self, path: Path) -> None:
        now = time.monotonic()
        line = {"at": now, "reason": "idle", "budget": 0.1, "shadow_tokens": 256, "normal_tokens": 0}
        with path.open("a") as trace:
            trace.write(json.dumps({**line, "predicted": 0.1, "real": 0.15, "over": 0.05}) + "\n")


async def _send(response: web.StreamResponse, chunk: Body) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    """The engine behind a loopback port."""
    runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    port, *trace_files = sys.argv[1:]
    file = Path(trace_files[0]) if trace_files else None
    whole = ScriptedEngine(plugin=file is not None, trace_file=file)
    web.run_app(whole.app(), host="127.0.0.1", port=int(port), print=None)
