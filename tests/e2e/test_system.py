"""The whole system on real engines: what clients get, what moves, and what is left after faults."""

from __future__ import annotations

import asyncio
import inspect
import json
import textwrap
from typing import Any

import grpc
import pytest

from pd_shadow.api.v1 import admin_pb2, common_pb2, placement_pb2
from pd_shadow.demo import models
from pd_shadow.engine.settings import Role
from tests.e2e.conftest import System

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

A, B = models.SMALL.name, models.LARGE.name
BLOCK = 128
# Real text of a few thousand tokens.
DOCUMENT = inspect.getsource(textwrap) + inspect.getsource(json.decoder)


def conversation(*turns: str) -> list[dict[str, str]]:
    """User and assistant turns in alternation, after a system prompt."""
    roles = ("user", "assistant")
    return [{"role": "system", "content": "You are a careful engineer."}] + [
        {"role": roles[i % 2], "content": text} for i, text in enumerate(turns)
    ]


def cached(body: dict[str, Any]) -> int:
    return (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def stream(system: System, body: dict[str, Any], session: str) -> list[str]:
    """The data of every event."""
    async with system.http.post(
        f"{system.plane.gateway_url}/v1/chat/completions",
        json={"max_tokens": 4, "temperature": 0, "stream": True, **body},
        headers={"X-Session-ID": session},
    ) as response:
        assert response.status == 200
        text = await response.text()
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def test_models_are_listed_and_both_shapes_answer_alike(system: System) -> None:
    async with system.http.get(f"{system.plane.gateway_url}/v1/models") as response:
        listed = {entry["id"] for entry in (await response.json())["data"]}
    assert listed == {A, B}
    messages = conversation("Explain: " + DOCUMENT[:2000])
    whole = await system.chat(A, messages, "shapes")
    events = await stream(system, {"model": A, "messages": messages}, "shapes")
    assert events[-1] == "[DONE]"
    streamed = "".join(
        choice["delta"].get("content") or "" for event in events[:-1] for choice in json.loads(event)["choices"]
    )
    assert streamed == whole["choices"][0]["message"]["content"]
    ledger = await system.quiet()
    assert (ledger.calls.handed_off, ledger.calls.recomputed) == (2, 0)


async def test_the_answer_is_the_one_a_single_engine_gives(system: System) -> None:
    messages = conversation("Review: " + DOCUMENT[:6000])
    ours = await system.chat(A, messages, max_tokens=12, return_token_ids=True)
    direct_url = system.cluster.engine(A, Role.DECODE).url
    body = {
        "model": A,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        # Not the cache that the first call filled.
        "cache_salt": "alone",
    }
    async with system.http.post(f"{direct_url}/v1/chat/completions", json=body) as response:
        alone = await response.json()
    assert ours["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


async def test_a_switch_finds_its_context_warm_on_p_and_d(system: System) -> None:
    turns = ["Review this: " + DOCUMENT]
    first = await system.chat(A, conversation(*turns), "switch")
    turns.append(first["choices"][0]["message"]["content"])
    await system.quiet()
    job = await system.warm(B, "switch")
    assert job.target_tokens - BLOCK < job.prefill_tokens == job.decode_tokens <= job.target_tokens
    warmth = await system.placement.GetWarmth(
        placement_pb2.GetWarmthRequest(session=common_pb2.SessionKey(session_id="switch"))
    )
    by_model = {m.model: m for m in warmth.models}
    assert by_model[B].warm_fraction > 0.9
    turns.append("And now the tests.")
    before = await received_tokens(system, B)
    second = await system.chat(B, conversation(*turns), "switch")
    prompt = second["usage"]["prompt_tokens"]
    assert cached(second) >= job.prefill_tokens
    assert await received_tokens(system, B) - before <= prompt - job.decode_tokens + BLOCK
    ledger = await system.quiet()
    assert ledger.calls.switches == 1
    assert (ledger.calls.handed_off, ledger.calls.recomputed) == (2, 0)
    assert ledger.shadow.hit_tokens == job.prefill_tokens
    assert ledger.shadow.prefilled_tokens == (
        ledger.shadow.hit_tokens + ledger.shadow.wasted_tokens + ledger.shadow.resident_tokens
    )


async def received_tokens(system: System, model: str) -> float:
    """Tokens D has pulled from P so far, by D's own count."""
    url = system.cluster.engine(model, Role.DECODE).url
    async with system.http.get(f"{url}/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize(
    ("body", "session", "status", "message"),
    [
        ({"model": "nope", "messages": conversation("hi")}, None, 404, "nope"),
        ({"messages": conversation("hi")}, None, 400, "must name a model"),
        ({"model": A, "messages": conversation("word " * 60_000)}, "long", 400, "context length"),
        ({"model": A, "messages": "no list"}, None, 400, "messages"),
        ({"model": A, "messages": conversation("hi")}, "", 400, "session"),
        ({"model": A, "messages": conversation("hi")}, "x" * 5000, 400, "session"),
        ({"model": A, "messages": conversation("hi"), "session_id": "a\x00b"}, None, 400, "session"),
    ],
)
async def test_bad_input_is_named_and_leaves_nothing(
    system: System,
    body: dict[str, Any],
    session: str | None,
    status: int,
    message: str,
) -> None:
    answered, error = await system.raw_chat(body, session)
    assert answered == status, error
    assert message in error["error"]["message"].lower()
    await system.quiet()
    assert (await system.chat(A, conversation("hi")))["choices"]


async def test_malformed_json_is_refused(system: System) -> None:
    async with system.http.post(
        f"{system.plane.gateway_url}/v1/chat/completions",
        data=b'{"model": ',
        headers={"Content-Type": "application/json"},
    ) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def leave_mid_stream(system: System, generates: Role) -> None:
    """A client leaves in the middle of an answer of A's engine of that role; nothing of its call must be left."""
    body = {"model": A, "messages": conversation(DOCUMENT[:4000]), "max_tokens": 2000, "stream": True}
    async with system.http.post(
        f"{system.plane.gateway_url}/v1/chat/completions",
        json={**body, "ignore_eos": True},
        headers={"X-Session-ID": "leaver"},
    ) as response:
        await response.content.readline()
        assert (await system.ledger()).in_flight.calls == 1
    await system.quiet()

    async def engine_idle() -> bool:
        found = await system.admin.GetInstance(admin_pb2.GetInstanceRequest(name=f"{A}-{generates}"))
        return found.instance.reported_running == 0

    # The abort reached the engine: it would have had 2,000 tokens to generate.
    await system.until(engine_idle)
    assert (await system.chat(A, conversation("hi"), "leaver"))["choices"]


async def test_a_client_that_leaves_mid_stream_leaves_nothing_behind(system: System) -> None:
    await leave_mid_stream(system, Role.DECODE)


async def test_a_killed_prefill_instance_costs_a_recomputation_and_comes_back(system: System) -> None:
    name = f"{B}-{Role.PREFILL}"
    life = await system.ready(name)
    answer = asyncio.create_task(system.raw_chat({"model": B, "messages": conversation(DOCUMENT)}, "p-killed"))

    async def on_prefill() -> bool:
        return (await system.ledger()).in_flight.pending_prefill_tokens > 0

    await system.until(on_prefill)
    async with system.killed(name):
        status, body = await answer
        assert status == 200, body
        ledger = await system.quiet()
        assert ledger.calls.recomputed == 1
    await system.ready(name, not_incarnation=life)
    await system.chat(B, conversation(DOCUMENT[:3000]), "p-back")
    ledger = await system.quiet()
    assert (ledger.calls.handed_off, ledger.calls.recomputed) == (1, 1)


async def test_a_decode_instance_killed_under_a_shadow_leg_gives_everything_back(system: System) -> None:
    name = f"{B}-{Role.DECODE}"
    life = await system.ready(name)
    await system.chat(A, conversation(DOCUMENT), "d-killed")

    async def chunk_moving() -> bool:
        ledger = await system.ledger()
        return ledger.in_flight.shadow_chunks > 0 or ledger.shadow.pushed_tokens > 0

    await system.until(chunk_moving)
    async with system.killed(name):
        status, error = await system.raw_chat({"model": B, "messages": conversation("hi")}, "d-killed")
        assert status in (502, 503), error
        assert error["error"]["message"]
        await system.quiet()
    await system.ready(name, not_incarnation=life)
    await system.chat(B, conversation(DOCUMENT[:3000]), "d-killed")
    await system.quiet()


async def test_calls_are_served_while_the_controller_is_away_and_placed_again_when_it_is_back(system: System) -> None:
    await system.chat(A, conversation("hi"), "away")
    await system.plane.controller.kill()
    assert (await system.chat(A, conversation("hi", "hello", "again"), "away"))["choices"]
    await system.plane.controller.start()

    async def placed_again() -> bool:
        await system.chat(A, conversation("hi"), "back")
        try:
            return (await system.ledger()).calls.handed_off > 0
        except grpc.aio.AioRpcError:
            return False

    await system.until(placed_again)
    assert (await system.quiet()).calls.recomputed == 0
