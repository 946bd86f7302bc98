"""The shadow dispatcher: renderings and legs, as the controller and the engines see them."""

import asyncio
from typing import Any

import pytest

from pd_shadow.api.v1 import common_pb2, placement_pb2

from .rig import BLOCK, PARAMS, Rig, encode, render, running

USER = {"role": "user", "content": "hello there, keep me warm"}
INPUT = render([USER])
WITH_OUTPUT = render([USER, {"role": "assistant", "content": "Hello"}])
SESSION = common_pb2.SessionKey(session_id="s1")


async def warmed(rig: Rig, **body: Any) -> placement_pb2.ContextRendered:
    """One call on model a whose input was rendered for b."""
    rig.controller.targets = [rig.target("b")]
    status, _, _ = await rig.chat(messages=[USER], **body)
    assert status == 200
    await rig.controller.until(lambda: bool(rig.controller.rendered))
    return rig.controller.rendered[-1]


def leg(
    rig: Rig, kind: int, revision: int, upto: int, leg_id: str = "leg-1", deadline: float = 30
) -> placement_pb2.WatchShadowWorkResponse:
    role = common_pb2.ROLE_DECODE if kind == common_pb2.LEG_KIND_FETCH else common_pb2.ROLE_PREFILL
    start = placement_pb2.LegStart(
        leg_id=leg_id,
        session=SESSION,
        model="b",
        kind=kind,
        instance=rig.controller.place("b", role).instance,
        revision=revision,
        upto_tokens=upto,
        deadline_seconds=deadline,
        switch_probability=0.25,
    )
    return placement_pb2.WatchShadowWorkResponse(leg_start=start)


async def run(rig: Rig, work: placement_pb2.WatchShadowWorkResponse) -> placement_pb2.LegFinished:
    """Direct one leg and wait for its end."""
    leg_id = work.leg_start.leg_id
    await rig.controller.work.put(work)
    await rig.controller.until(lambda: any(x.leg_id == leg_id for x in rig.controller.legs))
    return next(x for x in rig.controller.legs if x.leg_id == leg_id)


async def test_input_is_rendered_by_the_target_and_output_is_appended(rig: Rig) -> None:
    rig.controller.end_targets = [rig.target("b")]
    first = await warmed(rig, tools=[{"type": "function"}], chat_template_kwargs={"x": 1}, reasoning_effort="low")
    await rig.controller.until(lambda: any(r.tokens == len(WITH_OUTPUT) for r in rig.controller.rendered))
    last = rig.controller.rendered[-1]
    assert last.revision > 0
    if first is not last:
        assert (first.tokens, first.kept_tokens) == (len(INPUT), 0)
        assert last.revision > first.revision
        assert last.kept_tokens == len(INPUT)
    asked = rig.bp.calls("/tokenize")[-1].body
    assert asked["tools"] == [{"type": "function"}]
    assert asked["chat_template_kwargs"] == {"x": 1, "reasoning_effort": "low", "enable_thinking": True}
    assert "continue_final_message" not in asked
    assert rig.metric("renderings_total", model="b", result="ok") == len(rig.controller.rendered)


async def test_a_stream_is_followed_while_it_runs() -> None:
    async with running({"shadow": {"stream_batch_tokens": 2}}) as rig:
        rig.ad.words = ["He", "l", "lo", "!"]
        rig.ad.hold_after = 2
        rig.ad.go.clear()
        rig.controller.targets = rig.controller.end_targets = [rig.target("b")]
        call = asyncio.create_task(rig.chat(messages=[USER], stream=True))
        partial = INPUT + "<assistant>Hel"
        await rig.controller.until(lambda: any(r.tokens == len(partial) for r in rig.controller.rendered))
        assert rig.bp.calls("/tokenize")[-1].body["continue_final_message"] is True
        rig.ad.go.set()
        assert (await call)[0] == 200
        whole = render([USER, {"role": "assistant", "content": "Hello!"}])
        await rig.controller.until(lambda: any(r.tokens == len(whole) for r in rig.controller.rendered))
        assert rig.controller.rendered[-1].kept_tokens >= len(partial)


async def test_the_latest_rendering_wins(rig: Rig) -> None:
    rig.controller.targets = [rig.target("b")]
    first_in, go = asyncio.Event(), asyncio.Event()
    real = rig.bp.tokenize

    async def slow(body: dict[str, Any]) -> Any:
        first_in.set()
        await go.wait()
        return await real(body)

    rig.bp.tokenize = slow
    await rig.chat("one")
    await first_in.wait()
    for text in ("two", "three", "the last"):
        await rig.chat(text)
    go.set()
    last = len(render([{"role": "user", "content": "the last"}]))
    await rig.controller.until(lambda: any(r.tokens == last for r in rig.controller.rendered))
    assert len(rig.bp.calls("/tokenize")) == 2


async def test_text_prompts_are_rendered_and_token_prompts_are_not(rig: Rig) -> None:
    rig.controller.targets = [rig.target("b")]
    await rig.post("/v1/completions", {"model": "a", "prompt": "a text"}, X_Session_ID="s1")
    await rig.controller.until(lambda: len(rig.controller.rendered) == 1)
    assert rig.controller.rendered[0].tokens == len("a text")
    await rig.post("/v1/completions", {"model": "a", "prompt": [1, 2, 3]}, X_Session_ID="s2")
    await rig.controller.until(lambda: len(rig.controller.rendered) == 2)
    assert rig.controller.rendered[1].tokens == 0
    assert "text prompt" in rig.controller.rendered[1].error


@pytest.mark.parametrize(
    "reply",
    [(500, {"error": {"message": "secret prompt"}}), (200, {"tokens": "no"}), (200, {"tokens": [2**40]}), (200, {})],
)
async def test_a_failed_rendering_is_reported_without_prompt_text(rig: Rig, reply: Any) -> None:
    async def fail(body: dict[str, Any]) -> Any:
        return reply

    rig.bp.tokenize = fail
    rendered = await warmed(rig)
    assert (rendered.tokens, rendered.revision) == (0, 0)
    assert rendered.error
    assert "secret" not in rendered.error
    assert rig.metric("renderings_total", model="b", result="failed") == 1


async def test_prefill_export_fetch(rig: Rig) -> None:
    rendered = await warmed(rig, cache_salt="salted")
    upto = rendered.tokens // BLOCK * BLOCK
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, upto, "p"))
    assert (done.outcome, done.cached_tokens) == (common_pb2.LEG_OUTCOME_DONE, rig.bp.cached)
    sent = rig.bp.calls()[0]
    assert sent.path == "/v1/completions"
    assert sent.body == {
        "model": "b",
        "prompt": encode(INPUT)[:upto],
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
        "stream": False,
        "priority": 1_000_000,
        "cache_salt": "salted",
        "vllm_xargs": {"pd_shadow_leg": "prefill", "pd_shadow_session": "/s1", "pd_shadow_probability": 0.25},
    }
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_EXPORT, rendered.revision, upto, "e"))
    assert done.outcome == common_pb2.LEG_OUTCOME_DONE
    assert rig.bp.calls()[1].body["kv_transfer_params"]["do_remote_decode"] is True
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_FETCH, rendered.revision, upto, "f"))
    assert done.outcome == common_pb2.LEG_OUTCOME_DONE
    fetched = rig.bd.calls()[0].body
    assert fetched["prompt"] == encode(INPUT)[:upto]
    expected = {k: v for k, v in PARAMS.items() if k != "remote_prefill_cached_tokens"}
    assert fetched["kv_transfer_params"] == expected
    # D has read the blocks: the same export cannot be fetched again.
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_FETCH, rendered.revision, upto, "f2"))
    assert done.outcome == common_pb2.LEG_OUTCOME_STALE
    assert rig.metric("shadow_legs_total", kind="fetch", outcome="done") == 1


async def test_an_engine_with_the_plugin_may_cover_less_than_it_was_asked(rig: Rig) -> None:
    rendered = await warmed(rig)
    result = {"covered_tokens": 8, "computed_tokens": 4, "end": "no_room"}
    rig.bp.script = lambda seen: (200, {"choices": [], "kv_transfer_params": {"pd_shadow": result}})
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 16, "p"))
    assert (done.outcome, done.covered_tokens, done.end) == (
        common_pb2.LEG_OUTCOME_DONE, 8, common_pb2.LEG_END_NO_ROOM,
    )  # fmt: skip
    assert done.cached_tokens == 4
    result["end"] = "not_cached"
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_EXPORT, rendered.revision, 16, "e"))
    assert (done.outcome, done.covered_tokens, done.end) == (
        common_pb2.LEG_OUTCOME_FAILED, 8, common_pb2.LEG_END_NOT_CACHED,
    )  # fmt: skip


async def test_the_same_leg_never_runs_twice(rig: Rig) -> None:
    rendered = await warmed(rig)
    work = leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 8, "once")
    await rig.controller.work.put(work)
    await run(rig, work)
    await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 8, "after"))
    assert len(rig.bp.calls()) == 2
    assert [x.leg_id for x in rig.controller.legs] == ["once", "after"]


async def test_stale_legs_do_not_reach_an_engine(rig: Rig) -> None:
    rendered = await warmed(rig)
    for number, (revision, upto) in enumerate([(1, 8), (rendered.revision, 10_000), (rendered.revision, 0)]):
        done = await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, revision, upto, f"stale-{number}"))
        assert done.outcome == common_pb2.LEG_OUTCOME_STALE
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_FETCH, rendered.revision, 8, "no-export"))
    assert done.outcome == common_pb2.LEG_OUTCOME_STALE
    assert rig.bp.calls() == []


async def test_a_superseded_rendering_is_stale_but_its_export_is_not(rig: Rig) -> None:
    old = await warmed(rig)
    await run(rig, leg(rig, common_pb2.LEG_KIND_EXPORT, old.revision, 8, "e"))
    await rig.chat(messages=[USER, {"role": "assistant", "content": "Hello"}, USER])
    await rig.controller.until(lambda: rig.controller.rendered[-1].revision > old.revision)
    new = rig.controller.rendered[-1]
    assert new.kept_tokens == old.tokens
    assert (await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, old.revision, 8, "old"))).outcome == (
        common_pb2.LEG_OUTCOME_STALE
    )
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_FETCH, new.revision, 8, "f"))
    assert done.outcome == common_pb2.LEG_OUTCOME_DONE


async def test_a_cancelled_leg_closes_its_connection(rig: Rig) -> None:
    rendered = await warmed(rig)
    rig.bp.go.clear()
    await rig.controller.work.put(leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 8, "gone"))
    await rig.bp.until(lambda: bool(rig.bp.calls()))
    cancel = placement_pb2.LegCancel(leg_id="gone", reason=common_pb2.SHADOW_REASON_PREEMPTED)
    await rig.controller.work.put(placement_pb2.WatchShadowWorkResponse(leg_cancel=cancel))
    await rig.bp.until(lambda: rig.bp.aborted == 1)
    await rig.controller.until(lambda: bool(rig.controller.legs))
    assert rig.controller.legs[0].outcome == common_pb2.LEG_OUTCOME_CANCELLED


async def test_a_leg_cancelled_in_the_same_breath_still_reports(rig: Rig) -> None:
    rendered = await warmed(rig)
    rig.gateway.dispatcher.on_work(leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 8, "short"))
    cancel = placement_pb2.LegCancel(leg_id="short")
    rig.gateway.dispatcher.on_work(placement_pb2.WatchShadowWorkResponse(leg_cancel=cancel))
    await rig.controller.until(lambda: bool(rig.controller.legs))
    assert rig.controller.legs[0].outcome == common_pb2.LEG_OUTCOME_CANCELLED


@pytest.mark.parametrize("trouble", ["deadline", "5xx", "down", "params"])
async def test_failing_legs(rig: Rig, trouble: str) -> None:
    rendered = await warmed(rig)
    kind, deadline = common_pb2.LEG_KIND_PREFILL, 30.0
    expected = common_pb2.LEG_OUTCOME_FAILED
    if trouble == "deadline":
        rig.bp.go.clear()
        deadline, expected = 0.05, common_pb2.LEG_OUTCOME_TIMED_OUT
    elif trouble == "5xx":
        rig.bp.script = lambda seen: (500, {"error": {"message": "secret prompt"}})
    elif trouble == "params":
        kind = common_pb2.LEG_KIND_EXPORT
        rig.bp.drop_params = True
    work = leg(rig, kind, rendered.revision, 8, deadline=deadline)
    if trouble == "down":
        work.leg_start.instance.url = "http://127.0.0.1:9"
    done = await run(rig, work)
    assert done.outcome == expected
    assert done.detail
    assert "secret" not in done.detail


async def test_losing_the_controller_cancels_running_legs(rig: Rig) -> None:
    rendered = await warmed(rig)
    rig.bp.go.clear()
    await rig.controller.work.put(leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 8))
    await rig.bp.until(lambda: bool(rig.bp.calls()))
    await rig.controller.work.put(None)
    await rig.bp.until(lambda: rig.bp.aborted == 1)
    await rig.controller.until(lambda: rig.controller.watchers == 2)


async def test_a_dropped_session_is_forgotten(rig: Rig) -> None:
    rendered = await warmed(rig)
    dropped = placement_pb2.SessionDropped(session=SESSION, reason=common_pb2.SHADOW_REASON_FORGOTTEN)
    await rig.controller.work.put(placement_pb2.WatchShadowWorkResponse(session_dropped=dropped))
    done = await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 8))
    assert done.outcome == common_pb2.LEG_OUTCOME_STALE
    await rig.controller.until(lambda: bool(rig.controller.ended))
    assert rig.metric("sessions") == 0


async def test_the_switch_call_reports_what_the_rendering_was_worth(rig: Rig) -> None:
    rig.controller.end_targets = [rig.target("b")]
    await warmed(rig)
    await rig.controller.until(lambda: any(r.tokens == len(WITH_OUTPUT) for r in rig.controller.rendered))
    rig.controller.targets = rig.controller.end_targets = []
    history = [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "more"}]
    assert (await rig.chat(model="b", messages=history))[0] == 200
    await rig.controller.until(lambda: len(rig.controller.ended) == 2)
    assert rig.controller.ended[1].common_prefix_tokens == len(WITH_OUTPUT)
    assert rig.metric("not_append_only_total", model="b") == 0


async def test_a_rewritten_history_is_counted(rig: Rig) -> None:
    await warmed(rig)
    rig.controller.targets = []
    rewritten = {**USER, "content": "hello THERE, keep me warm"}
    assert (await rig.chat(model="b", messages=[rewritten]))[0] == 200
    await rig.controller.until(lambda: len(rig.controller.ended) == 2)
    assert rig.controller.ended[1].common_prefix_tokens == len("<user>hello ")
    assert rig.metric("not_append_only_total", model="b") == 1


async def test_tenants_shadow_legs_carry_the_tenants_salt(rig: Rig) -> None:
    rig.controller.targets = [rig.target("b")]
    await rig.post("/v1/chat/completions", {"model": "a", "messages": [USER]}, X_Session_ID="s1", X_Tenant_ID="acme")
    await rig.controller.until(lambda: bool(rig.controller.rendered))
    rendered = rig.controller.rendered[0]
    assert rendered.session.tenant == "acme"
    work = leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, 8)
    assert (await run(rig, work)).outcome == common_pb2.LEG_OUTCOME_STALE
    work.leg_start.session.tenant = "acme"
    work.leg_start.leg_id = "leg-2"
    assert (await run(rig, work)).outcome == common_pb2.LEG_OUTCOME_DONE
    assert rig.bp.calls()[0].body["cache_salt"] == rig.ad.calls()[0].body["cache_salt"]


async def test_a_call_that_failed_leaves_only_its_input(rig: Rig) -> None:
    rig.controller.end_targets = [rig.target("b")]
    rig.ad.error_after = 1
    await rig.chat(messages=[USER], stream=True)
    await rig.controller.until(lambda: bool(rig.controller.rendered))
    assert rig.controller.rendered[-1].tokens == len(INPUT)
