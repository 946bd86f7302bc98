"""Colocated engines with the plugin: what clients get, what a switch finds, and what is left after faults.

The cluster is this module's own, so that it is gone before the disaggregated one of the other modules starts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pd_shadow.api.v1 import admin_pb2, common_pb2, placement_pb2
from pd_shadow.demo import models, report
from pd_shadow.demo.cluster import Cluster, Mode
from pd_shadow.demo.replay import Replay
from pd_shadow.engine.settings import Role
from pd_shadow.policy.approach import DEFAULT, Approach
from tests.e2e.conftest import System, running_cluster
from tests.e2e.test_demo import SEED, shortest_session
from tests.e2e.test_system import BLOCK, DOCUMENT, cached, conversation, leave_mid_stream, stream

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

A, B = models.SMALL.name, models.LARGE.name
# Shares no beginning with the document, and is no longer in tokens.
BACKWARDS = "\n".join(reversed(DOCUMENT.splitlines()))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path_factory.mktemp("colocated"), Mode.COLOCATED, stock=False) as running:
        yield running


def nothing_moved(ledger: admin_pb2.GetLedgerResponse) -> bool:
    return (ledger.calls.handed_off, ledger.calls.recomputed, ledger.shadow.pushed_tokens) == (0, 0, 0)


async def test_models_are_listed_and_both_shapes_answer_alike(system: System) -> None:
    async with system.http.get(f"{system.plane.gateway_url}/v1/models") as response:
        listed = {entry["id"] for entry in (await response.json())["data"]}
    assert listed == {A, B}
    messages = conversation("Explain: " + DOCUMENT[:2000])
    whole = await system.chat(A, messages, "shapes")
    assert whole["prompt_token_ids"] is None
    assert whole["choices"][0]["token_ids"] is None
    events = await stream(system, {"model": A, "messages": messages}, "shapes")
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not any(chunk.get("prompt_token_ids") or chunk.get("usage") for chunk in chunks)
    streamed = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert streamed == whole["choices"][0]["message"]["content"]
    ledger = await system.quiet()
    assert ledger.calls.calls == 2
    assert nothing_moved(ledger)


async def test_the_answer_is_the_one_the_engine_gives_alone(system: System) -> None:
    body = {
        "model": A,
        "messages": conversation("Review: " + DOCUMENT[:6000]),
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
    }
    _, ours = await system.raw_chat(body, "alone")
    url = system.cluster.engine(A, Role.COLOCATED).url
    # Not the cache that the first call filled.
    async with system.http.post(f"{url}/v1/chat/completions", json={**body, "cache_salt": "alone"}) as response:
        alone = await response.json()
    assert ours["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert ours["prompt_token_ids"] == alone["prompt_token_ids"]
    assert ours["usage"] == alone["usage"]


async def test_a_switch_finds_its_context_warm_and_so_does_the_way_back(system: System) -> None:
    turns = ["Review this: " + DOCUMENT]
    first = await system.chat(A, conversation(*turns), "switch")
    turns.append(first["choices"][0]["message"]["content"])
    await system.quiet()
    job = await system.warm(B, "switch")
    assert job.target_tokens - BLOCK < job.prefill_tokens <= job.target_tokens
    warmth = await system.placement.GetWarmth(
        placement_pb2.GetWarmthRequest(session=common_pb2.SessionKey(session_id="switch"))
    )
    assert {m.model: m.warm_fraction for m in warmth.models}[B] > 0.9
    turns.append("And now the tests.")
    second = await system.chat(B, conversation(*turns), "switch")
    assert cached(second) == job.prefill_tokens
    ledger = await system.quiet()
    assert ledger.shadow.hit_tokens == ledger.shadow.prefilled_tokens == job.prefill_tokens
    turns += [second["choices"][0]["message"]["content"], "Thank you. " + DOCUMENT[:4000]]
    await system.warm(A, "switch")
    third = await system.chat(A, conversation(*turns), "switch")
    # What the first call left there, and the second call's turn, which its shadow added.
    assert cached(third) > first["usage"]["prompt_tokens"] - BLOCK
    ledger = await system.quiet()
    assert ledger.calls.switches == 2
    assert nothing_moved(ledger)
    assert ledger.shadow.prefilled_tokens == (
        ledger.shadow.hit_tokens + ledger.shadow.wasted_tokens + ledger.shadow.resident_tokens
    )


async def test_a_shadow_is_prefilled_beside_decodes_of_its_own_engine(system: System) -> None:
    body = {"model": B, "messages": conversation("Go on."), "max_tokens": 12_000, "stream": True, "ignore_eos": True}
    async with system.http.post(f"{system.plane.gateway_url}/v1/chat/completions", json=body) as response:
        await response.content.readline()
        await system.chat(A, conversation(DOCUMENT[:6000]), "beside")
        await system.warm(B, "beside")
        assert (await system.ledger()).in_flight.calls == 1
    await system.quiet()


async def test_shadow_work_stops_and_goes_on_by_the_policy_that_is_set(system: System) -> None:
    answer = await system.admin.SetShadowPolicy(admin_pb2.SetShadowPolicyRequest(approach=Approach.NO_SHADOW))
    assert not answer.policy.enabled
    await system.chat(A, conversation(DOCUMENT[:6000]), "policy")
    ledger = await system.quiet()
    assert ledger.shadow == admin_pb2.ShadowLedger()
    assert not (await system.admin.ListShadowJobs(admin_pb2.ListShadowJobsRequest())).jobs
    await system.admin.SetShadowPolicy(admin_pb2.SetShadowPolicyRequest(approach=DEFAULT))
    await system.chat(A, conversation(DOCUMENT[:6000], "fine", "And?"), "policy")
    assert (await system.warm(B, "policy")).prefill_tokens > 0


async def test_a_prompt_that_is_too_long_is_the_callers_mistake(system: System) -> None:
    status, error = await system.raw_chat({"model": A, "messages": conversation("word " * 60_000)}, "long")
    assert status == 400, error
    assert "context length" in error["error"]["message"]
    await system.quiet()


async def test_a_client_that_leaves_mid_stream_leaves_nothing_behind(system: System) -> None:
    await leave_mid_stream(system, Role.COLOCATED)


async def test_a_killed_engine_fails_its_call_and_is_warmed_again_in_its_next_life(system: System) -> None:
    name = f"{B}-{Role.COLOCATED}"
    life = await system.ready(name)
    first = await system.chat(A, conversation(DOCUMENT), "killed")
    await system.quiet()
    await system.warm(B, "killed")
    # Not all that is warm was shadow work: other sessions may have left a part of the same text there.
    before = (await system.ledger()).shadow
    # Of no session, and so without shadow work of its own.
    answer: asyncio.Task[tuple[int, Any]] = asyncio.create_task(
        system.raw_chat({"model": B, "messages": conversation(BACKWARDS)})
    )

    async def on_engine() -> bool:
        return (await system.ledger()).in_flight.pending_prefill_tokens > 0

    await system.until(on_engine)
    async with system.killed(name):
        status, error = await answer
        assert status in (502, 503), error
        assert error["error"]["message"]
        await system.quiet()
    await system.ready(name, not_incarnation=life)
    assert (await system.quiet()).shadow.wasted_tokens == before.wasted_tokens + before.resident_tokens
    again = await system.warm(B, "killed")
    turns = [DOCUMENT, first["choices"][0]["message"]["content"], "And now?"]
    assert cached(await system.chat(B, conversation(*turns), "killed")) == again.prefill_tokens > 0


async def test_calls_are_served_while_the_controller_is_away_and_placed_again_when_it_is_back(system: System) -> None:
    await system.chat(A, conversation("hi"), "away")
    await system.plane.controller.kill()
    assert (await system.chat(A, conversation("hi", "hello", "again"), "away"))["choices"]
    await system.plane.controller.start()

    async def placed_again() -> bool:
        await system.chat(A, conversation("hi"), "back")
        try:
            return (await system.ledger()).calls.calls > 0
        except grpc.aio.AioRpcError:
            return False

    await system.until(placed_again)
    assert nothing_moved(await system.quiet())


async def test_cold_and_shadow_runs_say_the_same_and_the_figures_leave_out_what_has_no_meaning(
    cluster: Cluster,
) -> None:
    session = shortest_session(cluster)
    runs = []
    for approach in (Approach.NO_SHADOW, DEFAULT):
        name = f"replay-{approach}"
        async with cluster.control_plane(approach, name) as plane:
            runs.append(await Replay.over(cluster, plane, name).run([session], SEED))
    cold, warm = runs
    assert cold.errors == warm.errors == []
    figures = report.build(cold, warm, seed=SEED, specs=cluster.specs, config={}, mode=cluster.mode)
    assert figures["tokens_identical"] is True
    assert figures["tokens_compared"] > 0
    assert (figures["calls"], figures["switches"]) == (2 * len(session.steps), session.switches)
    assert figures["hit_rate"]["switch"]["shadow"] > figures["hit_rate"]["switch"]["cold"]
    ledger = figures["ledger"]
    assert ledger["prefilled"] == ledger["hit"] + ledger["wasted"] + ledger["resident"] > 0
    assert "pushed" not in ledger
    assert not {"handed_off", "recomputed", "d_received_tokens_at_switch"} & figures.keys()
    gone = {"handed_off", "recomputed", "d_received_tokens_at_switch", "ledger.pushed", "kv_transfer"}
    assert figures["left_out"].keys() == gone
