import asyncio
from types import SimpleNamespace

import pytest
from asyncio_throttle import throttler

from transfer.gate import GateState
from transfer.link import Link
from transfer.pacing import ShadowPacer


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_shadow_chunk_waits_for_the_last_normal_transfer_and_the_next_for_its_end(clock: Clock) -> None:
    link = Link(clock)
    started: list[int] = []
    leave = [asyncio.Event(), asyncio.Event()]

    async def chunk(number: int) -> None:
        async with link.shadow() as slot:
            started.append(number)
            await leave[number].wait()
            slot.bytes = 100

    with link.normal() as first:
        with link.normal():
            tasks = [asyncio.create_task(chunk(number)) for number in range(2)]
            await settle()
        await settle()
        assert started == []
        first.bytes = 7
        clock.now += 2.0
    await settle()
    assert started == [0]
    clock.now += 3.0
    leave[0].set()
    await settle()
    assert started == [0, 1]
    leave[1].set()
    await asyncio.gather(*tasks)
    clock.now += 4.0
    ledger = link.ledger
    ledger.settle(clock.now)
    assert (ledger.normal_seconds, ledger.shadow_seconds, ledger.idle_seconds) == (2.0, 3.0, 4.0)
    assert (ledger.normal_bytes, ledger.shadow_bytes) == (7, 200)


async def test_a_normal_transfer_that_comes_meanwhile_meets_one_chunk_and_no_second(clock: Clock) -> None:
    link = Link(clock)
    async with link.shadow():
        waiting = asyncio.create_task(link.shadow().__aenter__())
        with link.normal():
            await settle()
            assert (link.gate.normal_transfers, link.gate.shadow_chunks) == (1, 1)
    link.pause(True)
    with link.normal():
        await settle()
    assert not waiting.done()
    link.pause(False)
    await waiting
    assert link.gate.state is GateState.SHADOW_IN_FLIGHT


async def test_a_chunk_that_fails_or_gives_up_waiting_leaves_the_link_free(clock: Clock) -> None:
    link = Link(clock)
    with pytest.raises(RuntimeError):
        async with link.shadow():
            raise RuntimeError
    with link.normal():
        waiting = asyncio.create_task(link.shadow().__aenter__())
        await settle()
        waiting.cancel()
        await settle()
    async with link.shadow():
        assert link.gate.shadow_chunks == 1


async def test_a_cap_spaces_chunks_by_what_the_one_before_has_moved(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(throttler, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(throttler, "asyncio", SimpleNamespace(sleep=sleep))
    link = Link(clock, ShadowPacer(bytes_per_second=100.0))
    starts: list[float] = []
    for size in (200, 50, 0, 100):
        async with link.shadow() as slot:
            starts.append(clock.now - 50.0)
            slot.bytes = size
    assert starts == pytest.approx([0.0, 2.0, 2.5, 2.5], abs=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_cap_is_above_zero(rate: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_second: must be above 0"):
        ShadowPacer(rate)


def test_bytes_cannot_be_negative(clock: Clock) -> None:
    for bad in ({"normal": -1}, {"shadow": -1}):
        with pytest.raises(ValueError, match="bytes cannot be negative"):
            asyncio.run(linked(clock)).ledger.carried(**bad)


async def linked(clock: Clock) -> Link:
    return Link(clock)
