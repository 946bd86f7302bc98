"""Emulated P and D between which real bytes move: what arrives is used, what does not is computed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from pd_shadow.engine.emulated.engine import Engine
from pd_shadow.engine.emulated.mover import TimedLink
from pd_shadow.engine.settings import Role
from tests.pd_shadow.engine.emulated.test_server import EXPORT, Served, cached, ids_of

pytest.importorskip("nixl", reason="NIXL is not installed")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Served(stack, http)


async def pair(served: Served, **of_p: Any) -> tuple[Engine, Engine]:
    p = await served.start(Role.PREFILL, **{"kv_transfer": "nixl", "name": "p", **of_p})
    return p, await served.start(Role.DECODE, kv_transfer="nixl", name="d")


async def handed_over(served: Served, p: Engine, d: Engine, content: str = "word") -> Any:
    said = [{"role": "user", "content": f"{content} " * 200}]
    first = await served.chat(p, messages=said, max_tokens=1, kv_transfer_params=EXPORT)
    return await served.chat(d, messages=said, kv_transfer_params=first["kv_transfer_params"])


async def alone(served: Served, content: str = "word") -> list[int]:
    said = [{"role": "user", "content": f"{content} " * 200}]
    return ids_of(await served.chat(await served.start(name="alone"), messages=said))


def moved(d: Engine) -> tuple[int, int]:
    return d.instance.counts["transfers"], d.instance.counts["failed_transfers"]


async def test_bytes_arrive_and_the_tokens_are_those_of_one_engine(served: Served) -> None:
    p, d = await pair(served)
    answer = await handed_over(served, p, d)
    assert moved(d) == (1, 0)
    assert cached(answer) == answer["usage"]["prompt_tokens"] - 1
    assert ids_of(answer) == await alone(served)
    assert not p.instance.pool.used
    assert "NIXL" in d.mover.name
    assert "1/1024" in d.mover.name


async def test_bytes_that_were_lost_are_computed_and_p_lets_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = await pair(served)
    lay = p.mover.lay

    def forgetful(blocks: list[int], contents: list[bytes]) -> Any:
        """What is told is right, what lies there is not."""
        said = lay(blocks, contents)
        lay(blocks[-1:], contents[:1])
        return said

    monkeypatch.setattr(p.mover, "lay", forgetful)
    answer = await handed_over(served, p, d)
    assert moved(d) == (0, 1)
    assert cached(answer) == 0
    assert ids_of(answer) == await alone(served)
    assert not p.instance.pool.used


async def test_a_p_that_started_again_is_met_again(served: Served) -> None:
    p, d = await pair(served)
    await handed_over(served, p, d)
    await p.close()
    again = await served.start(Role.PREFILL, kv_transfer="nixl", name="p")
    answer = await handed_over(served, again, d, "other")
    assert moved(d) == (2, 0)
    assert ids_of(answer) == await alone(served, "other")


async def test_a_p_whose_clock_went_back_is_met_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = await pair(served)
    await handed_over(served, p, d)
    await p.close()
    monkeypatch.setattr("pd_shadow.engine.emulated.nixl_mover.time.time_ns", lambda: 1)
    again = await served.start(Role.PREFILL, kv_transfer="nixl", name="p")
    await handed_over(served, again, d, "other")
    assert moved(d) == (2, 0)


async def test_sources_are_capped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_shadow.engine.emulated.nixl_mover.PEERS_MOST", 1)
    p, d = await pair(served)
    other = await served.start(Role.PREFILL, kv_transfer="nixl", name="other")
    for turn, source in enumerate([p, other, p]):
        await handed_over(served, source, d, f"word{turn}")
    assert moved(d) == (3, 0)


async def test_a_p_on_the_timed_link_is_read_over_it(served: Served) -> None:
    p, d = await pair(served, kv_transfer="timed")
    answer = await handed_over(served, p, d)
    assert p.mover.name == TimedLink.name
    assert moved(d) == (1, 0)
    assert ids_of(answer) == await alone(served)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": "00ff"},
        {"metadata": None},
        {"base": -1},
        {"base": 4096},
        {"pool_blocks": 10**30},
        {"pool_blocks": "9"},
        {"block_bytes": 7},
        {"incarnation": -1},
        {"digest": "0"},
    ],
    ids=str,
)
async def test_whatever_p_says_the_tokens_are_right(
    served: Served, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    p, d = await pair(served)
    lay = p.mover.lay
    monkeypatch.setattr(p.mover, "lay", lambda blocks, contents: {**(lay(blocks, contents) or {}), **change})
    answer = await handed_over(served, p, d)
    assert moved(d) == (0, 1)
    assert ids_of(answer) == await alone(served)
    monkeypatch.setattr(p.mover, "lay", lay)


async def test_many_pulls_at_a_time_do_not_mix(served: Served) -> None:
    p, d = await pair(served)
    names = [f"word{number}" for number in range(6)]
    answers = await asyncio.gather(*(handed_over(served, p, d, name) for name in names))
    assert moved(d) == (6, 0)
    one = await served.start(name="alone")
    for name, answer in zip(names, answers, strict=True):
        said = [{"role": "user", "content": f"{name} " * 200}]
        assert ids_of(answer) == ids_of(await served.chat(one, messages=said))


async def test_an_engine_closes_while_it_pulls(served: Served) -> None:
    p, d = await pair(served)
    call = asyncio.create_task(handed_over(served, p, d))
    while not d.instance.snapshot(0.0).running and not call.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await d.close()
    await asyncio.gather(call, return_exceptions=True)
    assert call.done()
