"""The streaming client against a server that answers as a gateway does, well and badly."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pd_shadow.demo.client import Answer, chat


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    state: dict[str, Any] = {"chunks": [], "status": 200, "seen": None}

    async def handle(request: web.Request) -> web.StreamResponse:
        state["seen"] = await request.json()
        if state["status"] != 200:
            return web.json_response({"error": {"message": "no"}}, status=state["status"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in state["chunks"]:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    yield f"http://{address[0]}:{address[1]}", state
    await runner.cleanup()


async def ask(url: str, max_tokens: int = 2) -> Answer:
    async with aiohttp.ClientSession() as http:
        return await chat(http, url, "m", [{"role": "user", "content": "hi"}], max_tokens, "salt")


async def test_text_ids_and_usage_are_kept(served: tuple[str, dict[str, Any]]) -> None:
    url, state = served
    state["chunks"] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}, "token_ids": [5]}]},
        {"choices": [{"delta": {"content": "b"}, "token_ids": [6]}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}},
    ]
    answer = await ask(url)
    assert (answer.error, answer.text, answer.token_ids) == ("", "ab", (5, 6))
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
    assert answer.ttft > 0
    assert state["seen"]["temperature"] == 0
    assert state["seen"]["cache_salt"] == "salt"


async def test_failures_are_values(served: tuple[str, dict[str, Any]]) -> None:
    url, state = served
    state["status"] = 503
    assert "HTTP 503" in (await ask(url)).error
    state["status"] = 200
    state["chunks"] = [{"choices": [{"delta": {"content": "a"}, "token_ids": [5]}]}]
    assert "after 1 of 2 tokens" in (await ask(url)).error
    state["chunks"] = [{"error": {"message": "engine gone"}}]
    assert "engine gone" in (await ask(url)).error
    assert "ClientConnectorError" in (await ask("http://127.0.0.1:9")).error
