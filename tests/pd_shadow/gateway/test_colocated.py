"""One call on one colocated engine, and its shadow leg, as clients, engines and the controller see them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_shadow.api.v1 import common_pb2, placement_pb2

from .rig import BLOCK, Rig, encode, render, running
from .test_call import ended, events

USER = {"role": "user", "content": "hello there, keep me warm"}
SESSION = common_pb2.SessionKey(session_id="s1")

ROUTED = {"pd_shadow_routed": 1, "pd_shadow_session": "/s1"}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(colocated=True) as one:
        yield one


async def test_a_whole_answer_is_one_leg_and_its_usage_passes_unchanged(rig: Rig) -> None:
    status, payload, headers = await rig.chat(task="fix", foo={"any": 1}, priority=-1, cache_salt="mine")
    assert status == 200
    assert payload["choices"][0]["message"]["content"] == "Hello"
    (sent,) = rig.ac.calls()
    assert sent.path == "/v1/chat/completions"
    assert sent.body.pop("return_token_ids") is True
    assert sent.body == {
        "model": "a",
        "messages": [{"role": "user", "content": "hi"}],
        "foo": {"any": 1},
        "cache_salt": "mine",
        "vllm_xargs": ROUTED,
    }
    assert sent.headers["X-Request-Id"] == headers["X-Request-Id"]
    assert payload["usage"] == rig.ac._usage(sent.body, 2)
    assert rig.bc.seen == []
    begin = rig.controller.begun[0]
    assert (begin.session.session_id, begin.task, begin.routed) == ("s1", "fix", True)
    end = await ended(rig)
    assert end.outcome == common_pb2.CALL_OUTCOME_COMPLETED
    assert (end.handoff, end.recompute_reason) == (common_pb2.HANDOFF_NONE, 0)
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (
        payload["usage"]["prompt_tokens"],
        rig.ac.cached,
        2,
    )
    # Nothing was handed off, and nothing recomputed; a whole answer shows no phase.
    for result in ("handed_off", "recomputed"):
        assert rig.metric("handoffs_total", model="a", result=result) == 0
    assert rig.controller.progress == []
    assert rig.metric("requests_total", model="a", endpoint="chat", outcome="completed") == 1


@pytest.mark.parametrize("asked", [False, True])
async def test_a_stream_passes_through_and_usage_only_if_asked_for(rig: Rig, asked: bool) -> None:
    status, text, _ = await rig.chat(stream=True, **({"stream_options": {"include_usage": True}} if asked else {}))
    assert status == 200
    got = events(text)
    assert got[-1] == "[DONE]"
    said = [e for e in got[:-1] if e["choices"]]
    assert [e["choices"][0]["delta"]["content"] for e in said] == ["Hel", "lo"]
    assert said[0]["extra"] == 1
    usages = [e["usage"] for e in got[:-1] if "usage" in e]
    (sent,) = rig.ac.calls()
    assert usages == ([rig.ac._usage(sent.body, 2)] if asked else [])
    end = await ended(rig)
    assert (end.handoff, end.completion_tokens, end.cached_tokens) == (common_pb2.HANDOFF_NONE, 2, rig.ac.cached)
    await rig.controller.until(lambda: bool(rig.controller.progress))
    assert [p.phase for p in rig.controller.progress] == [placement_pb2.CALL_PHASE_DECODE]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("asked", [False, True])
async def test_token_ids_reach_only_callers_who_asked(rig: Rig, stream: bool, path: str, asked: bool) -> None:
    body: dict[str, Any] = {"model": "a", "stream": stream}
    body |= {"messages": [USER]} if "chat" in path else {"prompt": "hello there"}
    if asked:
        body["return_token_ids"] = True
    _, answer, _ = await rig.post(path, body, X_Session_ID="s1")
    payloads = [e for e in events(answer) if e != "[DONE]"] if stream else [answer]
    found = [
        ids
        for payload in payloads
        for holder in (payload, *payload["choices"])
        for ids in (holder.get("prompt_token_ids"), holder.get("token_ids"))
        if ids is not None
    ]
    assert bool(found) is asked


@pytest.mark.parametrize("change", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}])
async def test_unusual_requests_go_to_the_engine_as_they_came(rig: Rig, change: dict[str, Any]) -> None:
    body = {"model": "a", "prompt": "hello", **change}
    assert (await rig.post("/v1/completions", body, X_Session_ID="s1"))[0] == 200
    assert rig.ac.calls()[0].body == {**body, "vllm_xargs": ROUTED}
    assert (await ended(rig)).outcome == common_pb2.CALL_OUTCOME_COMPLETED


async def test_without_a_session_no_token_ids_are_asked_for(rig: Rig) -> None:
    assert (await rig.chat(session=""))[0] == 200
    assert "return_token_ids" not in rig.ac.calls()[0].body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "status", "code", "outcome"),
    [
        (400, 400, "400", common_pb2.CALL_OUTCOME_REJECTED),
        (429, 429, "engine_busy", common_pb2.CALL_OUTCOME_REJECTED),
        (500, 502, "engine_failed", common_pb2.CALL_OUTCOME_DECODE_FAILED),
    ],
)
async def test_refusals_and_failures(
    rig: Rig, stream: bool, answer: int, status: int, code: str, outcome: common_pb2.CallOutcome.ValueType
) -> None:
    rig.ac.script = lambda seen: (answer, {"error": {"message": "boom", "param": "messages", "code": answer}})
    got, payload, headers = await rig.chat(stream=stream)
    assert (got, payload["error"]["code"]) == (status, code)
    assert "boom" in payload["error"]["message"]
    assert headers.get("Retry-After") == ("1" if status == 429 else None)
    end = await ended(rig)
    assert (end.outcome, end.handoff) == (outcome, common_pb2.HANDOFF_NONE)


async def test_an_engine_that_is_down_is_named_by_its_role(rig: Rig) -> None:
    rig.controller.view.instances[0].endpoint.url = "http://127.0.0.1:9"
    status, payload, _ = await rig.chat()
    assert (status, payload["error"]["code"]) == (502, "engine_unreachable")
    assert payload["error"]["message"] == "The colocated instance cannot be reached."


@pytest.mark.parametrize("kind", ["error_after", "break_after"])
async def test_failing_midway_ends_the_stream_with_an_error_event(rig: Rig, kind: str) -> None:
    setattr(rig.ac, kind, 1)
    _, text, _ = await rig.chat(stream=True)
    got = events(text)
    assert got[0]["choices"][0]["delta"]["content"] == "Hel"
    assert got[-1]["error"]["type"] == "server_error"
    assert (await ended(rig)).outcome == common_pb2.CALL_OUTCOME_DECODE_FAILED


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_on_the_engine(rig: Rig, stream: bool) -> None:
    rig.ac.go.clear()
    rig.ac.hold_after = 1 if stream else None
    call = asyncio.create_task(rig.chat(stream=stream))
    await rig.ac.until(lambda: bool(rig.ac.calls()))
    if stream:
        await rig.controller.until(lambda: len(rig.controller.progress) == 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await rig.ac.until(lambda: rig.ac.aborted == 1)
    end = await ended(rig)
    assert (end.outcome, end.handoff) == (common_pb2.CALL_OUTCOME_CLIENT_GONE, common_pb2.HANDOFF_NONE)


async def test_calls_are_served_while_the_controller_is_away(rig: Rig) -> None:
    await rig.stop_controller()
    status, payload, _ = await rig.chat()
    assert (status, payload["choices"][0]["message"]["content"]) == (200, "Hello")
    (sent,) = rig.ac.calls()
    assert "kv_transfer_params" not in sent.body
    assert rig.metric("controller_fallbacks_total") == 1
    for result in ("handed_off", "recomputed"):
        assert rig.metric("handoffs_total", model="a", result=result) == 0


def leg(rig: Rig, revision: int, upto: int, *, normal_priority: bool = False) -> placement_pb2.WatchShadowWorkResponse:
    start = placement_pb2.LegStart(
        leg_id="leg-1",
        session=SESSION,
        model="b",
        kind=common_pb2.LEG_KIND_PREFILL,
        instance=rig.controller.place("b", common_pb2.ROLE_COLOCATED).instance,
        revision=revision,
        upto_tokens=upto,
        deadline_seconds=30,
        normal_priority=normal_priority,
    )
    return placement_pb2.WatchShadowWorkResponse(leg_start=start)


@pytest.mark.parametrize("eager", [False, True])
async def test_the_shadow_is_one_prefill_leg_behind_all_normal_work_unless_eager(rig: Rig, eager: bool) -> None:
    rig.controller.targets = [rig.target("b")]
    await rig.chat(messages=[USER])
    await rig.controller.until(lambda: bool(rig.controller.rendered))
    rendered = rig.controller.rendered[-1]
    upto = rendered.tokens // BLOCK * BLOCK
    await rig.controller.work.put(leg(rig, rendered.revision, upto, normal_priority=eager))
    await rig.controller.until(lambda: bool(rig.controller.legs))
    done = rig.controller.legs[0]
    assert (done.outcome, done.cached_tokens) == (common_pb2.LEG_OUTCOME_DONE, rig.bc.cached)
    (sent,) = rig.bc.calls()
    assert sent.body["prompt"] == encode(render([USER]))[:upto]
    assert sent.body["max_tokens"] == 1
    assert sent.body.get("priority") == (None if eager else 1_000_000)
    assert "kv_transfer_params" not in sent.body


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_holds_of_a_call_is_kept_when_the_session_comes_back(rig: Rig, stream: bool) -> None:
    rig.ac.token_ids = encode("He")
    await rig.chat(messages=[USER], stream=stream)
    await ended(rig)
    rig.controller.targets = [rig.target("a")]
    history = [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "more"}]
    await rig.chat(model="b", messages=history)
    await rig.controller.until(lambda: bool(rig.controller.rendered))
    # The last token that was generated is never written to the cache.
    assert rig.controller.rendered[-1].kept_tokens == len(render([USER], generation=True) + "H")


async def test_the_switch_call_reports_what_the_rendering_was_worth(rig: Rig) -> None:
    rig.controller.targets = [rig.target("b")]
    await rig.chat(messages=[USER])
    await rig.controller.until(lambda: bool(rig.controller.rendered))
    rig.controller.targets = []
    await rig.chat(model="b", messages=[{**USER, "content": "hello THERE, keep me warm"}])
    await rig.controller.until(lambda: len(rig.controller.ended) == 2)
    assert rig.controller.ended[1].common_prefix_tokens == len("<user>hello ")
    assert rig.metric("not_append_only_total", model="b") == 1
