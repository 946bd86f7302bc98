"""What shadow chunks cost normal transfers on one link: the same normal transfers without and with a shadow backlog."""

import asyncio
import time
from typing import NamedTuple

import numpy as np

from transfer.bench.memory import Buffer
from transfer.bench.peer import Peer, PoolShape, completed, open_courier
from transfer.bench.sweep import PUSH_SECONDS, SENDER, llama_like
from transfer.chunks import Chunk
from transfer.courier import Courier, PeerOffer, Push, PushReason
from transfer.courier_thread import CourierThread
from transfer.descriptors import plan_chunk
from transfer.ledger import LinkLedger
from transfer.link import Link, Slot
from transfer.transport.base import TransportError
from transfer.transport.nixl import NixlSettings

SHAPE = PoolShape(llama_like(4, 16), blocks=1024)
CHUNK_BLOCKS = 256
NORMAL_BLOCKS = 64
CHUNKS_ALONE = 5


class Side(NamedTuple):
    """Seconds of the normal transfers, from their beginning until all their bytes were in place."""

    transfers: int
    p50_s: float
    p90_s: float
    p99_s: float
    longest_s: float


class Contention(NamedTuple):
    """`longest_wait_s` is the longest that a normal transfer took beyond the median without a backlog.

    `chunk_s` is the median time of one shadow chunk alone, which is the most that a normal transfer should meet.
    """

    alone: Side
    with_shadow: Side
    longest_wait_s: float
    chunk_s: float
    shadow_gb_per_s: float
    normal_seconds: float
    shadow_seconds: float
    idle_seconds: float


class _Mover:
    """Pushes over one link, and gives the receiver's blocks back."""

    def __init__(self, peer: Peer, thread: CourierThread, link: Link, buffer: Buffer, offer: PeerOffer) -> None:
        self._peer, self._thread, self._link = peer, thread, link
        self._pools = SHAPE.pool(buffer.address), offer.pool
        # The peer answers one question at a time.
        self._asking = asyncio.Lock()
        self._arrived: set[int] = set()

    async def move(self, blocks: int, first: int, *, normal: bool) -> float:
        """Seconds from the post until all bytes were in place; a shadow chunk waits for the link before that."""
        async with self._asking:
            reserved = await asyncio.to_thread(self._peer.reserve, blocks, [SENDER], PUSH_SECONDS)
        if reserved is None:
            raise TransportError("the receiver has no blocks free")
        epoch, taken = reserved
        tokens = Chunk(0, blocks * SHAPE.layout.block_tokens)
        plan = plan_chunk(*self._pools, np.arange(first, first + blocks), taken, tokens)
        push = Push("receiver", 1, epoch, 0, plan, time.monotonic() + PUSH_SECONDS, normal)
        if normal:
            with self._link.normal() as slot:
                seconds = await self._push(push, slot)
        else:
            async with self._link.shadow() as slot:
                seconds = await self._push(push, slot)
        while epoch not in self._arrived:
            async with self._asking:
                seen = await asyncio.to_thread(self._peer.take)
            self._arrived.update(effect.epoch for _, effect in completed(seen))
        self._arrived.discard(epoch)
        async with self._asking:
            await asyncio.to_thread(self._peer.free, taken)
        return seconds

    async def _push(self, push: Push, slot: Slot) -> float:
        started = time.monotonic()
        ticket = self._thread.push(push)
        outcome = await ticket.outcome
        seconds = time.monotonic() - started
        await ticket.drained
        if outcome.reason is not PushReason.DONE:
            raise TransportError(f"a transfer did not arrive: {outcome.reason.value} {outcome.detail}")
        slot.bytes = outcome.bytes
        return seconds


async def _normals(mover: _Mover, count: int, gap_seconds: float) -> Side:
    seconds = []
    for _ in range(count):
        await asyncio.sleep(gap_seconds)
        seconds.append(await mover.move(NORMAL_BLOCKS, 0, normal=True))
    p50, p90, p99 = (float(value) for value in np.percentile(seconds, [50, 90, 99]))
    return Side(count, p50, p90, p99, max(seconds))


async def _shadows(mover: _Mover) -> None:
    while True:
        await mover.move(CHUNK_BLOCKS, NORMAL_BLOCKS, normal=False)


async def contention(transfers: int, gap_seconds: float = 0.02) -> Contention:
    """`transfers` normal transfers of 1,024 tokens with pauses, then as many beside shadow chunks without end."""
    buffer = Buffer(SHAPE.bytes)
    settings = NixlSettings(progress_thread=False)

    def open_sender() -> Courier:
        return open_courier(SENDER.name, SENDER.incarnation, SHAPE, buffer, settings)[1]

    peer = await asyncio.to_thread(Peer, "receiver", 1, SHAPE)
    thread = CourierThread(open_sender)
    try:
        await thread.start()
        own = await thread.call(lambda courier: courier.offer())
        offer = await asyncio.to_thread(peer.offer)
        await asyncio.to_thread(peer.connect, own)
        await thread.call(lambda courier: courier.connect(offer))
        link = Link(time.monotonic)
        mover = _Mover(peer, thread, link, buffer, offer)
        chunks = [await mover.move(CHUNK_BLOCKS, NORMAL_BLOCKS, normal=False) for _ in range(CHUNKS_ALONE)]
        alone = await _normals(mover, transfers, gap_seconds)
        link.ledger = LinkLedger(link.gate, time.monotonic())
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            backlog = group.create_task(_shadows(mover))
            beside = await _normals(mover, transfers, gap_seconds)
            backlog.cancel()
        elapsed = time.monotonic() - started
        ledger = link.ledger
        ledger.settle(time.monotonic())
        return Contention(
            alone,
            beside,
            max(0.0, beside.longest_s - alone.p50_s),
            float(np.median(chunks)),
            ledger.shadow_bytes / elapsed / 1e9,
            ledger.normal_seconds,
            ledger.shadow_seconds,
            ledger.idle_seconds,
        )
    finally:
        await thread.close()
        await asyncio.to_thread(peer.close)
