"""The HTTP side of an emulated engine: vLLM's OpenAI endpoints, /health, /metrics, and what D reads of P."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from pd_shadow.engine.emulated import metrics
from pd_shadow.engine.emulated.mover import READ_PATH
from pd_shadow.engine.emulated.openai_body import (
    Ask,
    BadRequestError,
    Json,
    ask,
    chat_prompt,
    check_model,
    text_prompt,
)
from pd_shadow.engine.emulated.request import End, EngineRequest

if TYPE_CHECKING:
    from pd_shadow.engine.emulated.engine import Engine

MAX_BODY_BYTES = 256 * 1024 * 1024
VERSION = "emulated"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(engine: Engine) -> web.Application:
    """The routes of one engine."""
    server = _Server(engine)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/health", server.health)
    app.router.add_get("/version", server.version)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/tokenize", _with_errors(server.tokenize))
    app.router.add_post("/v1/chat/completions", _with_errors(server.chat))
    app.router.add_post("/v1/completions", _with_errors(server.completions))
    app.router.add_post(READ_PATH, _with_errors(server.read))
    return app


def _with_errors(handler: Handler) -> Handler:
    @functools.wraps(handler)
    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequestError as error:
            return _json(error.body(), error.status)

    return answered


def _json(payload: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")


async def _body(request: web.Request) -> Any:
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"JSON decode error: {error}") from error


class _Server:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._config = engine.config

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION, "kv_transfer": self._engine.mover.name, "speed": self._config.speed})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=metrics.page(self._engine), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, _: web.Request) -> web.Response:
        config = self._config
        entry = {
            "id": config.served_name,
            "object": "model",
            "created": int(self._engine.started_at),
            "owned_by": "pd-shadow",
            "root": config.model,
            "max_model_len": config.context_tokens,
        }
        return _json({"object": "list", "data": [entry]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = check_model(await _body(request), self._config)
        tokenizer = self._engine.instance.tokenizer
        if "messages" in body:
            tokens = chat_prompt(body, tokenizer, generation_prompt=bool(body.get("add_generation_prompt", True)))
        else:
            tokens = text_prompt(body, tokenizer)
        return _json({"count": len(tokens), "max_model_len": self._config.context_tokens, "tokens": tokens.tolist()})

    async def read(self, request: web.Request) -> web.Response:
        """D reads blocks of an export, and is done with it."""
        body = await _body(request)
        request_id = body.get("request_id") if isinstance(body, dict) else None
        blocks = body.get("blocks") if isinstance(body, dict) else None
        if not isinstance(request_id, str) or not isinstance(blocks, list):
            raise BadRequestError("expected {request_id, blocks}")
        if not all(type(block) is int for block in blocks):
            raise BadRequestError("blocks: expected block numbers", param="blocks")
        contents = self._engine.read(request_id, blocks)
        if contents is None:
            raise BadRequestError("no such blocks are held for this request", status=404)
        return _json({"contents": [content.hex() for content in contents]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = check_model(await _body(request), self._config)
        generation_prompt = bool(body.get("add_generation_prompt", not body.get("continue_final_message")))
        prompt = chat_prompt(body, self._engine.instance.tokenizer, generation_prompt=generation_prompt)
        return await self._answer(request, ask(body, prompt, self._config, chat=True), chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = check_model(await _body(request), self._config)
        prompt = text_prompt(body, self._engine.instance.tokenizer)
        return await self._answer(request, ask(body, prompt, self._config, chat=False), chat=False)

    async def _answer(self, request: web.Request, asked: Ask, *, chat: bool) -> web.StreamResponse:
        generation = _Generation(self._engine, asked, chat=chat)
        try:
            if asked.stream:
                return await generation.stream(request)
            return _json(await generation.whole())
        finally:
            # The handler is cancelled when the client leaves.
            generation.close()


class _Generation:
    """One request in the engine, and its answer."""

    def __init__(self, engine: Engine, asked: Ask, *, chat: bool) -> None:
        self._engine = engine
        self._asked = asked
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._events: asyncio.Queue[int | End] = asyncio.Queue()
        self._ended = False
        self._request = EngineRequest(
            self._id,
            asked.prompt,
            max_tokens=asked.max_tokens,
            finish_reason=asked.finish_reason,
            salt=asked.salt,
            priority=asked.priority,
            xargs=asked.xargs,
            exports=asked.exports,
            remote=asked.remote,
            on_token=self._events.put_nowait,
            on_end=self._events.put_nowait,
        )
        engine.submit(self._request)

    def close(self) -> None:
        """Abort what has not ended."""
        if not self._ended:
            self._engine.abort(self._request)

    async def whole(self) -> Json:
        ids: list[int] = []
        async for event in self._read():
            if isinstance(event, End):
                return self._payload(ids, event)
            ids.append(event)
        raise AssertionError("a generation ends with an End")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self._chat:
            first = self._chunk({"role": "assistant", "content": ""}, None, None)
            if self._asked.return_token_ids:
                first["prompt_token_ids"] = self._asked.prompt.tolist()
            await _send(response, first)
        count = 0
        async for event in self._read():
            if isinstance(event, End):
                break
            count += 1
            reason = self._asked.finish_reason if count == self._asked.max_tokens else None
            await _send(response, self._token_chunk(event, count == 1, reason))
        if self._asked.include_usage:
            await _send(response, {**self._head("chunk"), "choices": [], "usage": self._usage(count)})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _token_chunk(self, token: int, first: bool, finish_reason: str | None) -> Json:
        text = self._engine.instance.tokenizer.decode([token])
        chunk = self._chunk({"content": text} if self._chat else text, [token], finish_reason)
        if first and not self._chat and self._asked.return_token_ids:
            chunk["choices"][0]["prompt_token_ids"] = self._asked.prompt.tolist()
        return chunk

    async def _read(self) -> AsyncIterator[int | End]:
        while True:
            event = await self._events.get()
            self._ended = isinstance(event, End)
            yield event
            if self._ended:
                return

    def _payload(self, ids: list[int], end: End) -> Json:
        text = self._engine.instance.tokenizer.decode(ids)
        choice: Json = {"index": 0, "finish_reason": end.finish_reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        payload = {**self._head(""), "choices": [choice], "usage": self._usage(len(ids))}
        payload["kv_transfer_params"] = end.kv_transfer_params
        if self._asked.return_token_ids:
            choice["token_ids"] = ids
            (payload if self._chat else choice)["prompt_token_ids"] = self._asked.prompt.tolist()
        return payload

    def _chunk(self, said: Json | str, ids: list[int] | None, finish_reason: str | None) -> Json:
        choice: Json = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        choice |= {"delta": said} if self._chat else {"text": said}
        if self._asked.return_token_ids and ids is not None:
            choice["token_ids"] = ids
        return {**self._head("chunk"), "choices": [choice]}

    def _head(self, kind: str) -> Json:
        name = "chat.completion" if self._chat else "text_completion"
        if kind and self._chat:
            name = f"{name}.{kind}"
        return {"id": self._id, "object": name, "created": self._created, "model": self._engine.config.served_name}

    def _usage(self, completion_tokens: int) -> Json:
        prompt = len(self._asked.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._request.cached},
        }


async def _send(response: web.StreamResponse, chunk: Json) -> None:
    await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
