"""KV as real bytes, read by D out of P's memory over NIXL; how long it takes is still what the timed link says.

A block's bytes are its content, again and again. P lays them out when D asks, and names a digest of them; D takes a
block's content from what has arrived in its own memory, and only if the digest of that is P's. So bytes that are lost,
late or another block's show as a failed transfer, after which D computes, and never as other tokens.
"""

import contextlib
import hashlib
import math
import mmap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pd_shadow.engine.emulated.block_pool import CONTENT_BYTES, NOTHING, Content
from pd_shadow.engine.emulated.clock import EngineClock
from pd_shadow.engine.emulated.handoff import RemoteKv
from pd_shadow.engine.emulated.mover import LAY_PATH, READ_SECONDS, TimedLink, TransferFailedError, nixl_name
from transfer.chunks import Chunk
from transfer.courier import Courier, PeerOffer, Push, PushReason
from transfer.courier_thread import CourierThread
from transfer.descriptors import plan_chunk
from transfer.layouts import KvLayout, KvPool
from transfer.transport.base import Operation, Region, TransportError
from transfer.transport.nixl import NixlSettings, NixlTransport

PEERS_MOST = 1024
"""Sources that are known at a time; the one not read for longest is forgotten for another."""
_CONFLICT = 409
_EMPTY = bytes(CONTENT_BYTES)
"""What a block without content holds: the last one of a context that it does not fill."""
_ADDRESS_MOST = 2**63


def digest(data: bytes) -> str:
    """Of the bytes of blocks, one after another."""
    return hashlib.blake2b(data, digest_size=CONTENT_BYTES).hexdigest()


class NixlMover:
    """Memory for all blocks of one instance, and a courier that reads others'. `serves`: others read it."""

    def __init__(
        self,
        link: TimedLink,
        clock: EngineClock,
        agent: str,
        *,
        blocks: int,
        block_tokens: int,
        token_bytes: int,
        divisor: int,
        serves: bool,
    ) -> None:
        """`token_bytes` are those of the model, divided by `divisor` and rounded up so that a block holds a content."""
        self.name = nixl_name(divisor)
        self._link = link
        self._clock = clock
        self._agent = agent
        self._serves = serves
        size = max(math.ceil(token_bytes / divisor), math.ceil(CONTENT_BYTES / block_tokens))
        self._layout = KvLayout(1, 1, size, block_tokens)
        self._blocks = blocks
        # Pages that no block was ever laid on or read into stay untouched, and take no memory.
        self._map = mmap.mmap(-1, blocks * self._layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = np.frombuffer(self._map, dtype=np.uint8).reshape(blocks, self._layout.block_bytes)
        self._pool = KvPool.block_major(self._layout, 0, blocks, int(self._memory.ctypes.data))
        self._thread = CourierThread(self._open)
        self._offer: PeerOffer | None = None
        self._peers: dict[str, None] = {}
        self._pulls = 0

    def _open(self) -> Courier:
        settings = NixlSettings(progress_thread=self._serves)
        transport = NixlTransport(self._agent, settings)
        region = Region(self._pool.bases[0], self._memory.nbytes)
        return Courier(transport, self._pool, [region], time.time_ns(), time.monotonic)

    async def start(self) -> None:
        try:
            await self._thread.start()
            self._offer = await self._thread.call(lambda courier: courier.offer())
        except TransportError as error:
            raise OSError(f"kv_transfer: NIXL does not start: {error}; set timed") from error

    async def close(self) -> None:
        await self._thread.close()
        await self._link.close()

    def lay(self, blocks: Sequence[int], contents: Sequence[Content]) -> dict[str, Any] | None:
        if self._offer is None:
            return None
        size = self._layout.block_bytes
        for block, content in zip(blocks, contents, strict=True):
            self._memory[block] = np.frombuffer(
                ((content or _EMPTY) * -(-size // CONTENT_BYTES))[:size], dtype=np.uint8
            )
        return {
            "agent": self._offer.name,
            "incarnation": self._offer.incarnation,
            "metadata": self._offer.metadata.hex(),
            "base": self._pool.bases[0],
            "pool_blocks": self._blocks,
            "block_bytes": size,
            "digest": digest(self._memory[list(blocks)].tobytes()),
        }

    async def pull(self, source: RemoteKv, remote: Sequence[int], blocks: Sequence[int], size: int) -> list[Content]:
        if not remote:
            return await self._link.pull(source, remote, blocks, size)
        try:
            said = await self._link.ask(source, LAY_PATH, remote)
        except TransferFailedError as error:
            if error.status == _CONFLICT:
                # P is on the timed link.
                return await self._link.pull(source, remote, blocks, size)
            raise
        there = self._link.occupy(size)
        try:
            contents = await self._read(said, remote, blocks)
            await self._clock.sleep_until(there)
        except TransferFailedError:
            # It is not asked for again.
            await self._let_go(source)
            raise
        await self._let_go(source)
        return contents

    async def _let_go(self, source: RemoteKv) -> None:
        # P that does not hear of it lets go when its lease ends.
        with contextlib.suppress(TransferFailedError):
            await self._link.pull(source, [], [], 0)

    async def _read(self, said: dict[str, Any], remote: Sequence[int], blocks: Sequence[int]) -> list[Content]:
        """Raises TransferFailedError unless P's bytes are what our memory holds now."""
        try:
            offer = self._offered(said)
            expected = str(said["digest"])
            self._pulls += 1
            chunk = Chunk(0, len(blocks) * self._layout.block_tokens)
            plan = plan_chunk(offer.pool, self._pool, remote, blocks, chunk)
            deadline = time.monotonic() + READ_SECONDS
            push = Push(
                offer.name, offer.incarnation, self._pulls, 0, plan, deadline, normal=True, operation=Operation.READ
            )
            await self._connect(offer)
            ticket = self._thread.push(push)
        except (KeyError, TypeError, ValueError, OverflowError, TransportError) as error:
            raise TransferFailedError(f"{type(error).__name__}: {error}") from error
        outcome = await ticket.outcome
        if outcome.reason is not PushReason.DONE:
            raise TransferFailedError(f"{outcome.reason.value} {outcome.detail}".rstrip())
        arrived = self._memory[list(blocks)]
        if digest(arrived.tobytes()) != expected:
            raise TransferFailedError("other bytes arrived than P had laid out")
        contents = (row[:CONTENT_BYTES].tobytes() for row in arrived)
        return [NOTHING if content == _EMPTY else content for content in contents]

    def _offered(self, said: dict[str, Any]) -> PeerOffer:
        if said["block_bytes"] != self._layout.block_bytes:
            raise ValueError(
                f"kv_bytes_divisor, block_size: a block has {said['block_bytes']} bytes there and "
                f"{self._layout.block_bytes} here; set them alike"
            )
        count, base = said["pool_blocks"], said["base"]
        if base < 0 or base + count * self._layout.block_bytes > _ADDRESS_MOST:
            raise ValueError(f"base, pool_blocks: {base} and {count} are no memory")
        pool = KvPool.block_major(self._layout, 0, count, base)
        return PeerOffer(str(said["agent"]), int(said["incarnation"]), bytes.fromhex(said["metadata"]), pool)

    async def _connect(self, offer: PeerOffer) -> None:
        """Raises TransportError when the metadata is not that of the agent it names."""

        def meet(courier: Courier) -> None:
            # In one go: other pulls meet the same peer meanwhile.
            known = courier.peers().get(offer.name)
            if known is not None and known > offer.incarnation:
                # The offer is the one that lives now, whatever its machine's clock says.
                courier.forget(offer.name)
            courier.connect(offer)

        await self._thread.call(meet)
        self._peers.pop(offer.name, None)
        self._peers[offer.name] = None
        if len(self._peers) > PEERS_MOST:
            oldest = next(iter(self._peers))
            del self._peers[oldest]
            await self._thread.call(lambda courier: courier.forget(oldest))
