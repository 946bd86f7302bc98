"""One call through both legs, as clients, engines and the controller see it."""

import asyncio
from typing import Any

import orjson
import pytest

from pd_shadow.api.v1 import common_pb2, placement_pb2

from .rig import Rig, running


def events(text: str) -> list[Any]:
    """The events of a stream; [DONE] stays a string."""
    datas = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [data if data == "[DONE]" else orjson.loads(data) for data in datas]


async def ended(rig: Rig) -> placement_pb2.EndCallRequest:
    await rig.controller.until(lambda: bool(rig.controller.ended))
    assert len(rig.controller.ended) == 1
    return rig.controller.ended[0]


async def test_whole_answer_goes_through_p_and_d(rig: Rig) -> None:
    status, payload, headers = await rig.chat(task="fix", foo={"any": 1})
    assert status == 200
    assert payload["choices"][0]["message"]["content"] == "Hello"
    assert payload["extra"] == {"kept": True}
    assert payload["usage"]["prompt_tokens_details"]["cached_tokens"] == rig.ap.cached
    (p,), (d,) = rig.ap.calls(), rig.ad.calls()
    assert p.body["max_tokens"] == 1
    assert p.body["return_token_ids"] is True
    assert p.body["kv_transfer_params"]["do_remote_decode"] is True
    assert "task" not in p.body
    assert "task" not in d.body
    assert d.body["foo"] == {"any": 1}
    assert d.body["kv_transfer_params"]["remote_engine_id"] == "engine-p"
    assert "remote_prefill_cached_tokens" not in d.body["kv_transfer_params"]
    assert p.headers["X-Request-Id"] == d.headers["X-Request-Id"] == headers["X-Request-Id"]
    begin = rig.controller.begun[0]
    assert (begin.session.session_id, begin.task, begin.routed) == ("s1", "fix", True)
    end = await ended(rig)
    assert end.outcome == common_pb2.CALL_OUTCOME_COMPLETED
    assert end.handoff == common_pb2.HANDOFF_HANDED_OFF
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (
        payload["usage"]["prompt_tokens"],
        rig.ap.cached,
        2,
    )
    await rig.controller.until(lambda: len(rig.controller.progress) == 2)
    assert [p.phase for p in rig.controller.progress] == [
        placement_pb2.CALL_PHASE_TRANSFER,
        placement_pb2.CALL_PHASE_DECODE,
    ]
    assert rig.metric("handoffs_total", model="a", result="handed_off") == 1
    assert rig.metric("requests_total", model="a", endpoint="chat", outcome="completed") == 1


async def test_stream_hides_the_usage_nobody_asked_for(rig: Rig) -> None:
    status, text, headers = await rig.chat(stream=True)
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    got = events(text)
    assert got[-1] == "[DONE]"
    assert [e["choices"][0]["delta"]["content"] for e in got[:-1]] == ["Hel", "lo"]
    assert got[0]["choices"][0]["token_ids"] == [0]
    assert got[0]["extra"] == 1
    assert rig.ad.calls()[0].body["stream_options"] == {"include_usage": True}
    assert (await ended(rig)).completion_tokens == 2


async def test_stream_usage_reports_what_p_found_cached(rig: Rig) -> None:
    _, text, _ = await rig.chat(stream=True, stream_options={"include_usage": True, "x": 1})
    usage = events(text)[-2]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == rig.ap.cached
    assert rig.ad.calls()[0].body["stream_options"] == {"include_usage": True, "x": 1}
    assert "stream_options" not in rig.ap.calls()[0].body


@pytest.mark.parametrize("prompt", ["hello there", [1, 2, 3, 4, 5, 6]])
async def test_completions(rig: Rig, prompt: Any) -> None:
    status, payload, _ = await rig.post("/v1/completions", {"model": "a", "prompt": prompt}, X_Session_ID="s")
    assert status == 200
    assert payload["choices"][0]["text"] == "Hello"
    assert (await ended(rig)).handoff == common_pb2.HANDOFF_HANDED_OFF


async def test_no_session_is_served_without_stickiness(rig: Rig) -> None:
    rig.controller.targets = [rig.target("b")]
    status, _, _ = await rig.chat(session="")
    assert status == 200
    begin = rig.controller.begun[0]
    assert not begin.HasField("session")
    assert begin.routed is False
    assert rig.ap.calls()[0].body["return_token_ids"] is False
    await ended(rig)
    assert rig.bp.seen == []


async def test_caller_request_id_is_kept(rig: Rig) -> None:
    _, _, headers = await rig.post("/v1/completions", {"model": "a", "prompt": "x"}, X_Request_Id="mine-1")
    assert headers["X-Request-Id"] == "mine-1"
    assert rig.ad.calls()[0].headers["X-Request-Id"] == "mine-1"


async def test_recomputed_when_d_says_so(rig: Rig) -> None:
    rig.ad.decode_cached = 0
    status, payload, _ = await rig.chat()
    assert status == 200
    assert payload["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    end = await ended(rig)
    assert end.handoff == common_pb2.HANDOFF_RECOMPUTED
    assert end.recompute_reason == common_pb2.RECOMPUTE_REASON_TRANSFER_FAILED
    assert rig.metric("recomputed_total", model="a", reason="transfer_failed") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("trouble", ["5xx", "busy", "params", "none", "choices", "down", "slow"])
async def test_p_trouble_leaves_the_prompt_to_d(trouble: str, stream: bool) -> None:
    reasons = {
        "params": "missing_params",
        "none": "no_prefill_instance",
        "choices": "not_transferable",
    }
    async with running({"deadlines": {"prefill": 0.05 if trouble == "slow" else 30}}) as rig:
        body: dict[str, Any] = {"stream": stream}
        match trouble:
            case "5xx":
                rig.ap.script = lambda seen: (500, {"error": {"message": "boom"}})
            case "busy":
                rig.ap.script = lambda seen: (429, {"error": {"message": "busy"}})
            case "params":
                rig.ap.drop_params = True
            case "none":
                rig.controller.without_prefill = True
            case "choices":
                body["n"] = 2
            case "down":
                rig.controller.view.instances[0].endpoint.url = "http://127.0.0.1:9"
            case "slow":
                rig.ap.go.clear()
        status, answer, _ = await rig.chat(**body)
        assert status == 200
        assert "Hel" in str(answer)
        assert "kv_transfer_params" not in rig.ad.calls()[0].body
        end = await ended(rig)
        assert end.outcome == common_pb2.CALL_OUTCOME_COMPLETED
        assert end.handoff == common_pb2.HANDOFF_RECOMPUTED
        assert rig.metric("recomputed_total", model="a", reason=reasons.get(trouble, "prefill_failed")) == 1


async def test_a_p_that_vanishes_is_not_waited_for(rig: Rig) -> None:
    rig.ap.go.clear()
    call = asyncio.create_task(rig.chat())
    await rig.ap.until(lambda: bool(rig.ap.seen))
    rig.controller.view.instances[0].endpoint.ref.incarnation = "2"
    for queue in rig.controller.views:
        await queue.put(rig.controller.view)
    assert (await call)[0] == 200
    await rig.ap.until(lambda: rig.ap.aborted == 1)
    end = await ended(rig)
    assert end.recompute_reason == common_pb2.RECOMPUTE_REASON_PREFILL_FAILED


async def test_only_a_stream_may_not_fall_silent() -> None:
    async with running({"deadlines": {"decode_silence": 0.02}}) as rig:
        rig.ad.go.clear()
        whole = asyncio.create_task(rig.chat())
        await rig.ad.until(lambda: bool(rig.ad.seen))
        # The stream began later and is given up on; the answer that does not stream is still waited for.
        assert (await rig.chat(stream=True))[0] == 504
        assert not whole.done()
        rig.ad.go.set()
        assert (await whole)[0] == 200


async def test_a_client_mistake_on_p_is_passed_through_without_d(rig: Rig) -> None:
    rig.ap.script = lambda seen: (400, {"error": {"message": "max context is 8192", "param": "messages", "code": 400}})
    status, payload, _ = await rig.chat(stream=True)
    assert status == 400
    assert payload["error"] == {
        "message": "max context is 8192",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "400",
    }
    assert rig.ad.seen == []
    end = await ended(rig)
    assert end.outcome == common_pb2.CALL_OUTCOME_REJECTED
    assert end.handoff == common_pb2.HANDOFF_NONE


@pytest.mark.parametrize("stream", [False, True])
async def test_d_failure_is_a_bad_gateway(rig: Rig, stream: bool) -> None:
    rig.ad.script = lambda seen: (500, {"error": {"message": "boom"}})
    status, payload, _ = await rig.chat(stream=stream)
    assert (status, payload["error"]["code"]) == (502, "engine_failed")
    assert (await ended(rig)).outcome == common_pb2.CALL_OUTCOME_DECODE_FAILED


async def test_d_down_is_a_bad_gateway(rig: Rig) -> None:
    rig.controller.view.instances[1].endpoint.url = "http://127.0.0.1:9"
    status, payload, _ = await rig.chat()
    assert (status, payload["error"]["code"]) == (502, "engine_unreachable")
    assert (await ended(rig)).handoff == common_pb2.HANDOFF_NONE


async def test_d_too_slow_is_a_gateway_timeout() -> None:
    async with running({"deadlines": {"decode": 0.05}}) as rig:
        rig.ad.go.clear()
        status, payload, _ = await rig.chat()
        assert (status, payload["error"]["code"]) == (504, "engine_timeout")
        assert (await ended(rig)).outcome == common_pb2.CALL_OUTCOME_DECODE_FAILED


async def test_d_error_before_the_first_token_has_a_status(rig: Rig) -> None:
    rig.ad.error_after = 0
    status, payload, _ = await rig.chat(stream=True)
    assert status == 502
    assert "engine died" in payload["error"]["message"]


@pytest.mark.parametrize("kind", ["error_after", "break_after"])
async def test_d_failing_midway_ends_the_stream_with_an_error_event(rig: Rig, kind: str) -> None:
    setattr(rig.ad, kind, 1)
    status, text, _ = await rig.chat(stream=True)
    assert status == 200
    got = events(text)
    assert got[0]["choices"][0]["delta"]["content"] == "Hel"
    assert got[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in got
    assert (await ended(rig)).outcome == common_pb2.CALL_OUTCOME_DECODE_FAILED


@pytest.mark.parametrize("where", ["begin", "prefill", "decode", "stream"])
async def test_client_gone(rig: Rig, where: str) -> None:
    engine = {"begin": rig.ap, "prefill": rig.ap}.get(where, rig.ad)
    if where == "begin":
        rig.controller.go.clear()
    else:
        engine.go.clear()
        engine.hold_after = 1 if where == "stream" else None
    call = asyncio.create_task(rig.chat(stream=where == "stream"))
    if where == "begin":
        await rig.controller.until(lambda: bool(rig.controller.begun))
    else:
        await engine.until(lambda: bool(engine.calls()))
    if where == "stream":
        await rig.controller.until(lambda: len(rig.controller.progress) == 2)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    if where == "begin":
        rig.controller.go.set()
    else:
        await engine.until(lambda: engine.aborted == 1)
    end = await ended(rig)
    assert end.outcome == common_pb2.CALL_OUTCOME_CLIENT_GONE
    expected = common_pb2.HANDOFF_UNSPECIFIED if where == "stream" else common_pb2.HANDOFF_NONE
    assert end.handoff == expected
    # One more call shows that nothing more was said about the first.
    for one in rig.engines.values():
        one.go.set()
        one.hold_after = None
    await rig.chat(session="other")
    await rig.controller.until(lambda: len(rig.controller.ended) == 2)
    assert [e.call_id for e in rig.controller.ended] == ["call-1", "call-2"]


async def test_tenants_never_share_cache_and_callers_cannot_forge_fields(rig: Rig) -> None:
    async def salt(tenant: str, given: str | None) -> str | None:
        rig.ad.seen.clear()
        body = {"model": "a", "prompt": "x", "priority": -5, "kv_transfer_params": {"do_remote_prefill": True}}
        if given is not None:
            body["cache_salt"] = given
        headers = {"X_Tenant_ID": tenant} if tenant else {}
        assert (await rig.post("/v1/completions", body, **headers))[0] == 200
        sent = rig.ad.calls()[0].body
        assert "priority" not in sent
        assert sent["kv_transfer_params"]["remote_engine_id"] == "engine-p"
        found = sent.get("cache_salt")
        assert found is None or (isinstance(found, str) and len(found) <= 128)
        return found

    assert await salt("", None) is None
    assert await salt("", "mine") == "mine"
    acme = await salt("acme", None)
    assert acme is not None
    others = [await salt("acme", "mine"), await salt("evil", "mine"), await salt("", acme), await salt("acme:m", "ine")]
    assert len({acme, *others}) == 5
