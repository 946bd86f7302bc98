"""An emulated engine over HTTP: what a vLLM answers, and what happens when a peer goes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from controller.discovery import vllm_metrics
from pd_shadow.demo import received
from pd_shadow.engine.emulated.engine import Engine
from pd_shadow.engine.emulated.tokenizer import Tokenizer
from pd_shadow.engine.settings import Role
from tests.pd_shadow.engine.emulated.rig import config

SAID = [{"role": "user", "content": "word " * 200}]
EXPORT = {"do_remote_decode": True}


class Served:
    """Engines on loopback, fast."""

    def __init__(self, stack: AsyncExitStack, http: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.http = http

    async def start(self, role: Role = Role.COLOCATED, **more: Any) -> Engine:
        engine = Engine(config(role, **{"speed": 50.0, "kv_tokens": 16_384, "served_model_name": "m", **more}))
        await engine.start()
        self.stack.push_async_callback(engine.close)
        return engine

    async def post(self, engine: Engine, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(engine.url + path, data=data) as answer:
            return answer.status, json.loads(await answer.read())

    async def chat(self, engine: Engine, **more: Any) -> Any:
        body = {"model": "m", "messages": SAID, "max_tokens": 6, "return_token_ids": True, **more}
        status, answer = await self.post(engine, "/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    async def stream(self, engine: Engine, **more: Any) -> list[Any]:
        body = {"model": "m", "messages": SAID, "max_tokens": 6, "stream": True, "return_token_ids": True, **more}
        async with self.http.post(engine.url + "/v1/chat/completions", json=body) as answer:
            lines = (await answer.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def metrics(self, engine: Engine) -> str:
        async with self.http.get(engine.url + "/metrics") as answer:
            return await answer.text()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Served(stack, http)


def ids_of(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def cached(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def test_an_answer_is_complete_and_a_second_one_finds_the_prompt_cached(served: Served) -> None:
    engine = await served.start()
    first, second = [await served.chat(engine) for _ in range(2)]
    tokenizer = Tokenizer("m")
    assert first["prompt_token_ids"] == tokenizer.chat(SAID).tolist()
    assert first["choices"][0]["message"]["content"] == tokenizer.decode(ids_of(first))
    assert first["choices"][0]["finish_reason"] == "length"
    usage = first["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokenizer.chat(SAID)), 6)
    assert (cached(first), cached(second)) == (0, 240)
    assert ids_of(first) == ids_of(second)


async def test_a_stream_says_the_same_token_by_token(served: Served) -> None:
    engine = await served.start()
    whole = await served.chat(engine)
    chunks = await served.stream(engine, stream_options={"include_usage": True})
    said = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [ids for choice in said for ids in choice.get("token_ids", [])] == ids_of(whole)
    assert "".join(choice["delta"]["content"] for choice in said) == whole["choices"][0]["message"]["content"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert said[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 6


async def test_completions_take_text_and_token_ids(served: Served) -> None:
    engine = await served.start()
    ids = Tokenizer("m").encode("one two three four").tolist()
    answers = [
        (await served.post(engine, "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 3}))[1]
        for prompt in ("one two three four", ids, [ids])
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


async def test_tokenize_renders_without_generation_prompt_what_a_call_begins_with(served: Served) -> None:
    engine = await served.start()
    _, rendered = await served.post(
        engine, "/tokenize", {"model": "m", "messages": SAID, "add_generation_prompt": False}
    )
    prompt = (await served.chat(engine))["prompt_token_ids"]
    assert prompt[: rendered["count"]] == rendered["tokens"]
    assert rendered["max_model_len"] == engine.config.context_tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", b"{", 400, "JSON"),
        ("/v1/chat/completions", [], 400, "object"),
        ("/v1/chat/completions", {"model": "x", "messages": SAID}, 404, "does not exist"),
        ("/v1/chat/completions", {"model": "m"}, 400, "messages"),
        ("/v1/chat/completions", {"model": "m", "messages": [1]}, 400, "messages"),
        ("/v1/chat/completions", {"model": "m", "messages": SAID, "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/chat/completions", {"model": "m", "messages": SAID, "max_tokens": "5"}, 400, "max_tokens"),
        ("/v1/chat/completions", {"model": "m", "messages": SAID, "n": 2}, 400, "n: "),
        ("/v1/chat/completions", {"model": "m", "messages": SAID, "vllm_xargs": 1}, 400, "vllm_xargs"),
        ("/v1/chat/completions", {"model": "m", "messages": SAID, "max_tokens": 99_999}, 400, "context length"),
        ("/v1/completions", {"model": "m", "prompt": "x" * 100_000}, 400, "context length"),
        ("/v1/completions", {"model": "m", "prompt": []}, 400, "empty"),
        ("/v1/completions", {"model": "m", "prompt": [-1]}, 400, "token ids"),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}, 400, "one text"),
        ("/tokenize", {"model": "m", "prompt": 3}, 400, "prompt"),
        ("/emulated/kv/read", {"request_id": "none", "blocks": [0]}, 404, "held"),
        ("/emulated/kv/read", {"blocks": [0]}, 400, "request_id"),
    ],
)  # fmt: skip
async def test_mistakes_get_vllms_errors(served: Served, path: str, body: Any, status: int, says: str) -> None:
    engine = await served.start()
    answered, payload = await served.post(engine, path, body)
    assert answered == status
    assert says in payload["error"]["message"]
    assert payload["error"]["code"] == status


async def test_kv_is_handed_over_and_counted_as_discovery_and_the_demo_read_it(served: Served) -> None:
    p, d, alone = await served.start(Role.PREFILL), await served.start(Role.DECODE), await served.start()
    first = await served.chat(p, max_tokens=1, kv_transfer_params=EXPORT)
    answer = await served.chat(d, kv_transfer_params=first["kv_transfer_params"])
    assert ids_of(answer) == ids_of(await served.chat(alone))
    assert cached(answer) == answer["usage"]["prompt_tokens"] - 1
    page = await served.metrics(d)
    assert received.parse(page).transfers == 1
    assert received.parse(page).bytes == 16 * 16 * d.config.kv_bytes_per_token
    seen = vllm_metrics.parse(page)
    assert (seen.process_start, seen.block_size, seen.hash_algorithm) == (d.incarnation, 16, "blake2b")
    assert (seen.running, seen.waiting, seen.failed_transfers) == (0, 0, 0)


async def test_a_d_whose_p_died_recomputes_and_answers_the_same(served: Served) -> None:
    p, d, alone = await served.start(Role.PREFILL), await served.start(Role.DECODE), await served.start()
    first = await served.chat(p, max_tokens=1, kv_transfer_params=EXPORT)
    await p.close()
    answer = await served.chat(d, kv_transfer_params=first["kv_transfer_params"])
    assert ids_of(answer) == ids_of(await served.chat(alone))
    assert cached(answer) == 0
    assert vllm_metrics.parse(await served.metrics(d)).failed_transfers == 1


async def test_p_gives_up_what_a_dead_d_was_to_fetch(served: Served) -> None:
    p = await served.start(Role.PREFILL, kv_lease_seconds=20.0)
    # So slow a link that D dies in the middle.
    d = await served.start(Role.DECODE, link_gb_per_second=1e-9)
    first = await served.chat(p, max_tokens=1, kv_transfer_params=EXPORT)
    call = asyncio.create_task(served.chat(d, kv_transfer_params=first["kv_transfer_params"]))
    while not d.instance.snapshot(0.0).link_busy:  # noqa: ASYNC110 - the state of an engine that tells nobody
        await asyncio.sleep(0.005)
    assert p.instance.pool.used
    await d.close()
    with pytest.raises((aiohttp.ClientError, AssertionError)):
        await call
    while p.instance.pool.used:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert vllm_metrics.parse(await served.metrics(p)).expired_exports == 1


async def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    engine = await served.start(speed=1.0)
    call = asyncio.create_task(served.stream(engine, max_tokens=5000))
    while not engine.instance.snapshot(0.0).running:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    call.cancel()
    while engine.instance.pool.used:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert not engine.instance.has_normal_work


async def test_the_version_says_that_the_link_is_a_model(served: Served) -> None:
    engine = await served.start()
    async with served.http.get(engine.url + "/version") as answer:
        said = await answer.json()
    assert said == {"version": "emulated", "kv_transfer": "timed link model", "speed": 50.0}
