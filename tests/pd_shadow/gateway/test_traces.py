"""Spans of calls and shadow legs, and the trace headers that engines and the controller get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.api.v1 import common_pb2, placement_pb2
from pd_shadow.common.controller_access import ControllerAccess
from pd_shadow.gateway.call_traces import CallTraces
from pd_shadow.gateway.config import Deadlines
from pd_shadow.gateway.controller_client import ControllerClient
from pd_shadow.gateway.metrics import Metrics
from tests.controller.server.test_app import add_instance
from tests.traces import Kept, about, ids

from .rig import Rig, Seen, running
from .test_shadow import leg, run, warmed

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
SECRET = "a secret nobody may read"


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
async def rig(kept: Kept) -> AsyncIterator[Rig]:
    async with running(tracing=kept.tracing) as rig:
        yield rig


def told(seen: Seen) -> tuple[str, str, bool]:
    """(trace id, span id, sampled) that an engine was told."""
    _, trace_id, span_id, flags = seen.headers["traceparent"].split("-")
    return trace_id, span_id, bool(int(flags, 16) & 1)


async def chat(rig: Rig, **body: object) -> int:
    request = {"model": "a", "messages": [{"role": "user", "content": SECRET}], **body}
    status, _, _ = await rig.post("/v1/chat/completions", request, X_Session_ID="s1", traceparent=PARENT)
    return int(status)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_one_trace_over_all_its_legs(kept: Kept, rig: Rig, stream: bool) -> None:
    assert await chat(rig, stream=stream) == 200
    call = kept.named("call")
    assert {ids(span)[0] for span in kept.spans} == {"a" * 32}
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == "b" * 16
    names = ["begin_call", "p_leg", *(["transfer"] if stream else []), "d_leg", "call"]
    assert [span.name for span in kept.spans] == names
    parents = {span.name: span.parent.span_id for span in kept.spans if span.parent is not None}
    for name in ("begin_call", "p_leg", "d_leg"):
        assert f"{parents[name]:016x}" == ids(call)[1]
    # Each engine's own spans belong to its leg.
    for engine, name in ((rig.ap, "p_leg"), (rig.ad, "d_leg")):
        (seen,) = engine.calls()
        assert told(seen) == (*ids(kept.named(name)), True)
    said = about(call)
    assert {key: said[key] for key in ("model", "session", "outcome", "is_switch", "call_id")} == {
        "model": "a", "session": "s1", "outcome": "completed", "is_switch": False, "call_id": "call-1",
    }  # fmt: skip
    prefill, decode = about(kept.named("p_leg")), about(kept.named("d_leg"))
    assert (prefill["instance"], prefill["placement_reason"]) == ("a-p", "first_call")
    assert (prefill["prompt_tokens"], prefill["cached_tokens"]) == (said["prompt_tokens"], 4)
    assert decode["instance"] == "a-d"
    assert all(span.status.is_unset for span in kept.spans)
    everything = json.dumps([span.to_json() for span in kept.spans])
    assert SECRET not in everything


async def test_whether_kv_was_handed_off_or_recomputed_is_said_with_the_reason(kept: Kept, rig: Rig) -> None:
    assert await chat(rig) == 200
    said = about(kept.named("call"))
    assert said["handoff"] == "handed_off"
    assert "recompute_reason" not in said
    rig.ap.script = lambda seen: (503, {})
    assert await chat(rig) == 200
    again = about(kept.spans[-1])
    assert (again["handoff"], again["recompute_reason"]) == ("recomputed", "prefill_failed")
    failed = next(span for span in kept.spans if span.name == "p_leg" and not span.status.is_unset)
    assert failed.status.description == "prefill_failed"


async def test_a_failed_call_ends_its_spans(kept: Kept, rig: Rig) -> None:
    rig.ad.script = lambda seen: (500, {"error": {"message": SECRET}})
    assert await chat(rig) == 502
    assert kept.named("d_leg").status.description == "status 500"
    assert kept.named("call").status.description == "ApiError"
    assert SECRET not in json.dumps([span.to_json() for span in kept.spans])


async def test_a_client_that_leaves_ends_its_spans(kept: Kept, rig: Rig) -> None:
    rig.ad.go.clear()
    call = asyncio.create_task(chat(rig))
    await rig.ad.until(lambda: bool(rig.ad.calls()))
    call.cancel()
    await rig.controller.until(lambda: bool(rig.controller.ended))
    assert about(kept.named("call"))["outcome"] == "client_gone"
    assert kept.named("d_leg").status.description == "CancelledError"


async def test_a_shadow_leg_is_a_trace_of_its_own_linked_to_the_session_s_call(kept: Kept, rig: Rig) -> None:
    rendered = await warmed(rig)
    await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, rendered.tokens))
    call, shadow = kept.named("call"), kept.named("shadow_leg")
    assert shadow.parent is None
    assert ids(shadow)[0] != ids(call)[0]
    (link,) = shadow.links
    assert (link.context.trace_id, link.context.span_id) == (
        call.get_span_context().trace_id,
        call.get_span_context().span_id,
    )
    said = about(shadow)
    assert {key: said[key] for key in ("leg_id", "kind", "model", "instance", "outcome", "session")} == {
        "leg_id": "leg-1", "kind": "prefill", "model": "b", "instance": "b-p", "outcome": "done", "session": "s1",
    }  # fmt: skip
    (seen,) = rig.bp.calls()
    assert told(seen) == (*ids(shadow), True)


async def test_a_failed_shadow_leg_says_so(kept: Kept, rig: Rig) -> None:
    rendered = await warmed(rig)
    rig.bp.script = lambda seen: (500, {})
    await run(rig, leg(rig, common_pb2.LEG_KIND_PREFILL, rendered.revision, rendered.tokens))
    assert kept.named("shadow_leg").status.description == "failed"


async def test_calls_that_are_not_sampled_still_tell_engines_so() -> None:
    kept = Kept(ParentBased(ALWAYS_OFF))
    async with running(tracing=kept.tracing) as rig:
        assert (await rig.chat())[0] == 200
        assert kept.spans == ()
        (seen,) = rig.ap.calls()
        assert told(seen)[2] is False


async def test_without_tracing_no_header_is_sent() -> None:
    async with running() as rig:
        assert await chat(rig) == 200
        assert all("traceparent" not in seen.headers for engine in (rig.ap, rig.ad) for seen in engine.calls())


def test_sessions_remembered_are_capped(kept: Kept) -> None:
    traces = CallTraces(kept.tracing, sessions=2)
    for name in "abc":
        traces.call(("", name), {}).end()
    for name, links in (("a", 0), ("b", 1), ("c", 1)):
        traces.shadow_leg(("", name)).end()
        assert len(kept.spans[-1].links) == links


async def test_the_controller_s_span_belongs_to_the_gateway_s(kept: Kept) -> None:
    config = ControllerConfig(listen="127.0.0.1:0", grace_seconds=0)
    async with Controller(config, kept.tracing).running() as controller:
        for role, name in ((common_pb2.ROLE_PREFILL, "a-p0"), (common_pb2.ROLE_DECODE, "a-d0")):
            add_instance(controller.plane, name, "a", role)
        address = f"127.0.0.1:{controller.port}"
        access = ControllerAccess(address, None, None, on_stale=lambda _: None)
        client = ControllerClient(access, "gw", Deadlines(begin_call=20.0), Metrics())
        request = placement_pb2.BeginCallRequest(gateway_id="gw", model="a", prompt_tokens=7)
        with kept.tracing.serve("call", {}) as call, call.child("begin_call") as begin:
            await client.begin(request, begin.headers())
        await client.close()
    placed = kept.named("place_call")
    assert placed.parent is not None
    assert placed.parent.span_id == kept.named("begin_call").get_span_context().span_id
    assert about(placed)["prefill_instance"] == "a-p0"
    assert (about(placed)["decode_reason"], about(placed)["prompt_tokens"]) == ("no_session", 7)
