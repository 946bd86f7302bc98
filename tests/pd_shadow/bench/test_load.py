"""The load generator against a scripted engine."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from pd_shadow.bench import load
from pd_shadow.bench.load import FAILED, SHADOW_SESSIONS_IN_FLIGHT, Load
from pd_shadow.bench.modes import SHADOW_PRIORITY, Mode
from pd_shadow.bench.samples import Phase
from pd_shadow.bench.traffic import LEG_TOKENS, Request, Traffic
from pd_shadow.demo.models import SMALL

from .scripted_engine import ScriptedEngine, serving


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with serving(ScriptedEngine()) as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def on(engine: ScriptedEngine, http: aiohttp.ClientSession, mode: Mode) -> Load:
    engine.plugin = mode.has_plugin
    return Load(http, engine.url, "m", mode, Traffic(SMALL, seed=3))


def requests(count: int, output_tokens: int = 3, **more: Any) -> list[Request]:
    return [Request(0.001 * number, [number + 10, 7], output_tokens, **more) for number in range(count)]


async def open_loop(load: Load, due: Sequence[Request]) -> Phase:
    return await load.open_loop(due, lambda: None)


async def test_requests_are_sent_when_due_whatever_became_of_earlier_ones(
    engine: ScriptedEngine, http: aiohttp.ClientSession
) -> None:
    # No request is answered before the last one is there: a client that waits would never end.
    engine.go = lambda: len(engine.normal) == 5
    phase = await open_loop(on(engine, http, Mode.NO_SHADOW), requests(5))
    assert engine.most_streaming == 5
    assert [len(sample.token_times) for sample in phase.samples] == [3] * 5
    assert not engine.legs


async def test_a_closed_loop_keeps_so_many_requests_in_flight_and_their_order(
    engine: ScriptedEngine, http: aiohttp.ClientSession
) -> None:
    engine.go = lambda: engine.streaming == 2 or len(engine.normal) == 6
    finished: list[int] = []
    phase = await on(engine, http, Mode.NO_SHADOW).closed_loop(
        requests(6), 2, shadow=False, on_request=lambda: finished.append(1)
    )
    assert engine.most_streaming == 2
    assert [body["prompt"][0] for body in engine.normal] == [10, 11, 12, 13, 14, 15]
    assert len(phase.samples) == len(finished) == 6


async def test_a_request_says_what_it_is(engine: ScriptedEngine, http: aiohttp.ClientSession) -> None:
    side = on(engine, http, Mode.PLUGIN)
    await side.closed_loop(requests(1, routed=True, cache_salt="x"), 1, shadow=False, on_request=lambda: None)
    await side.closed_loop(requests(1), 1, shadow=False, on_request=lambda: None)
    routed, plain = engine.normal
    assert (routed["vllm_xargs"], routed["cache_salt"]) == ({"pd_shadow_routed": 1}, "x")
    assert not {"vllm_xargs", "cache_salt", "priority"} & plain.keys()
    assert (plain["model"], plain["max_tokens"], plain["ignore_eos"], plain["prompt"]) == ("m", 3, True, [10, 7])


@pytest.mark.parametrize(
    ("mode", "priority", "tagged"),
    [(Mode.PLUGIN, SHADOW_PRIORITY, True), (Mode.STOCK_LOW, SHADOW_PRIORITY, False), (Mode.STOCK_EQUAL, 0, False)],
)
async def test_shadow_work_waits_all_the_time_in_growing_prefixes(
    engine: ScriptedEngine, http: aiohttp.ClientSession, mode: Mode, priority: int, tagged: bool
) -> None:
    engine.go = lambda: len(engine.legs) >= 12
    phase = await open_loop(on(engine, http, mode), requests(2))
    legs = engine.legs
    assert {body["priority"] for body in legs} == {priority}
    assert {body["max_tokens"] for body in legs} == {1}
    by_session: dict[tuple[int, ...], list[list[int]]] = {}
    for body in legs:
        by_session.setdefault(tuple(body["prompt"][:50]), []).append(body["prompt"])
    assert len(by_session) >= 12 // 2
    for first, *more in by_session.values():
        assert len(first) == LEG_TOKENS
        assert all(prompt[:LEG_TOKENS] == first and len(prompt) == 2 * LEG_TOKENS for prompt in more)
    if tagged:
        xargs = [body["vllm_xargs"] for body in legs]
        assert all(x["pd_shadow_leg"] == "prefill" and 0 < x["pd_shadow_probability"] <= 1 for x in xargs)
        assert len({x["pd_shadow_session"] for x in xargs}) == len(by_session)
    else:
        assert not any("vllm_xargs" in body for body in legs)
    assert {leg.end for leg in phase.legs} == {"done"}


async def test_sessions_go_on_from_phase_to_phase(engine: ScriptedEngine, http: aiohttp.ClientSession) -> None:
    side = on(engine, http, Mode.STOCK_LOW)
    engine.go = lambda: len(engine.legs) >= 6
    await open_loop(side, requests(1))
    before = {tuple(body["prompt"][:50]) for body in engine.legs}
    count = len(engine.legs)
    engine.go = lambda: len(engine.legs) >= count + 6
    await open_loop(side, requests(1))
    assert before.isdisjoint(tuple(body["prompt"][:50]) for body in engine.legs[count:])


async def test_normal_requests_begin_once_shadow_work_is_under_way(
    engine: ScriptedEngine, http: aiohttp.ClientSession
) -> None:
    engine.leg_go = lambda: len(engine.legs) >= SHADOW_SESSIONS_IN_FLIGHT
    phase = await open_loop(on(engine, http, Mode.STOCK_LOW), requests(1))
    assert not any(body.get("stream") for body in engine.seen[:SHADOW_SESSIONS_IN_FLIGHT])
    assert phase.legs[0].ended_at <= phase.opened


async def test_an_engine_that_does_no_shadow_work_is_measured_all_the_same_and_left_clean(
    engine: ScriptedEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "SETTLE_SECONDS", 0.05)
    engine.leg_go = lambda: False
    phase = await open_loop(on(engine, http, Mode.PLUGIN), requests(2))
    assert len(phase.good) == 2
    assert phase.legs == []
    await engine.until(lambda: engine.aborted_legs == SHADOW_SESSIONS_IN_FLIGHT)


async def test_what_legs_computed_is_the_engines_word(engine: ScriptedEngine, http: aiohttp.ClientSession) -> None:
    engine.go = lambda: len(engine.legs) > SHADOW_SESSIONS_IN_FLIGHT
    engine.cached_tokens = 96
    phase = await open_loop(on(engine, http, Mode.STOCK_LOW), requests(1))
    assert {leg.computed_tokens for leg in phase.legs} <= {LEG_TOKENS - 96, 2 * LEG_TOKENS - 96}
    engine.result = {"covered_tokens": 4096, "computed_tokens": 640, "end": "no_room"}
    phase = await open_loop(on(engine, http, Mode.PLUGIN), requests(1))
    assert {(leg.computed_tokens, leg.end) for leg in phase.legs} == {(640, "no_room")}


async def test_failed_legs_are_values(
    engine: ScriptedEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "SETTLE_SECONDS", 0.2)
    engine.result = None
    (error,) = {leg.error for leg in (await open_loop(on(engine, http, Mode.PLUGIN), requests(1))).legs}
    assert "is the plugin on?" in error
    engine.refuse = lambda body: None if body.get("stream") else 400
    legs = (await open_loop(on(engine, http, Mode.STOCK_LOW), requests(1))).legs
    assert {(leg.end, leg.computed_tokens) for leg in legs} == {(FAILED, 0)}
    assert all("HTTP 400" in leg.error for leg in legs)


async def test_failed_requests_are_values(engine: ScriptedEngine, http: aiohttp.ClientSession) -> None:
    async def error() -> str:
        phase = await open_loop(on(engine, http, Mode.NO_SHADOW), requests(1))
        assert not phase.good
        return phase.samples[0].error

    engine.chunks = [[1], [2]]
    assert "after 2 of 3 tokens" in await error()
    engine.break_stream = {"error": {"message": "engine gone"}}
    assert "engine gone" in await error()
    engine.refuse = lambda body: 503
    assert "HTTP 503" in await error()
    engine.url = "http://127.0.0.1:9"
    assert "ClientConnectorError" in await error()


async def test_tokens_that_come_together_have_one_time(engine: ScriptedEngine, http: aiohttp.ClientSession) -> None:
    engine.chunks = [[1], [2, 3]]
    (sample,) = (await open_loop(on(engine, http, Mode.NO_SHADOW), requests(1))).samples
    assert len(sample.token_times) == 3
    assert sample.token_times[1] == sample.token_times[2]
    assert sample.ttft > 0


async def test_isolated_times_come_from_requests_that_run_alone(
    engine: ScriptedEngine, http: aiohttp.ClientSession
) -> None:
    side = on(engine, http, Mode.STOCK_EQUAL)
    isolated = await side.isolated()
    assert [tokens for tokens, _ in isolated.prefill] == [128, 320, 512]
    assert engine.most_streaming == 1
    assert not engine.legs
    assert len({tuple(body["prompt"]) for body in engine.normal}) == len(engine.normal)
    engine.refuse = lambda body: 500
    with pytest.raises(RuntimeError, match="stock_equal: a request to the idle engine failed: HTTP 500"):
        await side.isolated()
