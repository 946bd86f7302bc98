"""What goes wrong, done on purpose with real processes, and how long it takes until it is dealt with."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from transfer.bench.peer import Peer, PoolShape, Usage, completed, usage
from transfer.bench.sweep import SENDER, Pair, drive, llama_like
from transfer.chunks import Chunk
from transfer.courier import Drained, Push, PushOutcome, PushReason
from transfer.descriptors import plan_chunk
from transfer.reservations import Freed
from transfer.transport.base import TransportError
from transfer.transport.nixl import NixlSettings

TCP = NixlSettings(environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})
SHAPE = PoolShape(llama_like(4, 16), blocks=512)
DEADLINE_SECONDS = 0.5
PATIENCE_SECONDS = 20.0


class Drill(NamedTuple):
    """`seconds` is from what was done to the named end; `passed` whether the end was the right one."""

    name: str
    seconds: float
    passed: bool
    detail: str


class Endurance(NamedTuple):
    """What was used before and after many transfers and restarts, on both sides."""

    transfers: int
    restarts: int
    seconds: float
    sender_before: Usage
    sender_after: Usage
    receiver_before: Usage
    receiver_after: Usage


class _Run:
    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.outcomes: list[PushOutcome] = []
        self.drains: list[Drained] = []

    def order(self, seconds: float = PATIENCE_SECONDS, blocks: int = 256) -> Push:
        reserved = self.pair.peer.reserve(blocks, [SENDER], seconds)
        if reserved is None:
            raise TransportError("the receiver has no blocks free")
        epoch, taken = reserved
        chunk = Chunk(0, blocks * SHAPE.layout.block_tokens)
        plan = plan_chunk(self.pair.courier.pool, self.pair.offer.pool, np.arange(blocks), taken, chunk)
        peer = self.pair.peer
        return Push(peer.name, peer.incarnation, epoch, 0, plan, time.monotonic() + seconds)

    def push(self, order: Push) -> None:
        self.pair.courier.push(order, self.outcomes.append, self.drains.append)

    def until(self, condition: Callable[[], bool]) -> float:
        """Seconds until it holds. Raises TimeoutError."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > PATIENCE_SECONDS:
                raise TimeoutError("a drill has not come to its end")
            time.sleep(self.pair.courier.step())
        return time.monotonic() - started

    def stuck(self, seconds: float = PATIENCE_SECONDS) -> Push:
        """A push to a peer that was met before and has stopped: some of its bytes are on their way and stay there."""
        self.push(self.order(blocks=1))
        self.until(lambda: bool(self.drains))
        order = self.order(seconds)
        self.pair.peer.freeze()
        order = order._replace(deadline=time.monotonic() + seconds)
        self.push(order)
        self.until(lambda: self.pair.transport.held().transfers > 0)
        return order


def peer_killed() -> Drill:
    with Pair(SHAPE, TCP) as pair:
        run = _Run(pair)
        run.stuck()
        pair.peer.kill()
        seconds = run.until(lambda: len(run.drains) == 2)
        reason = run.outcomes[1].reason
        return Drill("peer_killed", seconds, reason is PushReason.PEER_LOST, reason.value)


def peer_hung() -> Drill:
    """The push must end by its deadline; the receiver's blocks must come back after it wakes, not before it drained."""
    with Pair(SHAPE, TCP) as pair:
        run = _Run(pair)
        run.stuck(DEADLINE_SECONDS)
        run.until(lambda: len(run.outcomes) == 2)
        seconds = run.outcomes[1].seconds
        waiting = run.drains[1:] == []
        pair.peer.thaw()
        run.until(lambda: len(run.drains) == 2)
        freed = run.until(lambda: any(isinstance(seen.effect, Freed) for seen in pair.peer.take()))
        right = run.outcomes[1].reason is PushReason.DEADLINE and waiting
        return Drill("peer_hung", seconds, right, f"blocks back {freed:.2f} s after the drain")


def release_in_flight() -> Drill:
    """A cancelled push: what is in flight lands, in memory that is still reserved, and then the receiver is told."""
    with Pair(SHAPE, TCP) as pair:
        run = _Run(pair)
        order = run.stuck()
        pair.courier.cancel(order.peer, order.epoch, order.part)
        outcome = run.outcomes[1]
        waiting = run.drains[1:] == []
        pair.peer.thaw()
        held = pair.peer.held_blocks()
        seconds = run.until(lambda: len(run.drains) == 2)
        right = outcome.reason is PushReason.CANCELLED and waiting and run.drains[1] is Drained.TOLD and held > 0
        return Drill("release_in_flight", seconds, right, f"{outcome.bytes} bytes in place when it was cancelled")


def restart_same_name() -> Drill:
    with Pair(SHAPE, TCP) as pair:
        run = _Run(pair)
        run.push(run.order())
        run.until(lambda: bool(run.drains))
        pair.peer.kill()
        with Peer("receiver", 2, SHAPE, TCP) as again:
            old, pair.peer = pair.peer, again
            started = time.monotonic()
            pair.meet()
            run.push(run.order())
            run.until(lambda: len(run.drains) == 2)
            seconds = time.monotonic() - started
            right = run.outcomes[1].reason is PushReason.DONE
            pair.peer = old
        return Drill("restart_same_name", seconds, right, run.outcomes[1].reason.value)


def all_drills() -> list[Drill]:
    return [peer_killed(), peer_hung(), release_in_flight(), restart_same_name()]


def endurance(transfers: int, restarts: int) -> Endurance:
    """Small chunks, restarts of the receiver spread between them. Usage is taken after a tenth, when all is warm."""
    shape = SHAPE._replace(blocks=64)
    with Pair(shape, NixlSettings()) as pair:
        started = time.monotonic()
        warm_at = max(1, transfers // 10)
        before: tuple[Usage, Usage] | None = None
        every = max(1, transfers // restarts) if restarts else transfers + 1
        restarted = 0
        for number in range(transfers):
            if number == warm_at:
                before = usage(pair.transport.held()), pair.peer.usage()
            if number and number % every == 0 and restarted < restarts:
                pair.peer.restart()
                pair.meet()
                restarted += 1
            reserved = pair.peer.reserve(32, [SENDER], PATIENCE_SECONDS)
            if reserved is None:
                raise TransportError("the receiver has no blocks free")
            plan = plan_chunk(pair.courier.pool, pair.offer.pool, np.arange(32), reserved[1], Chunk(0, 512))
            deadline = time.monotonic() + PATIENCE_SECONDS
            (outcome,) = drive(pair.courier, [Push("receiver", pair.peer.incarnation, reserved[0], 0, plan, deadline)])
            if outcome.reason is not PushReason.DONE:
                raise TransportError(f"transfer {number} did not arrive: {outcome.reason.value} {outcome.detail}")
            while not completed(pair.peer.take()):
                pass
            pair.peer.free(reserved[1])
        assert before is not None
        after = usage(pair.transport.held()), pair.peer.usage()
        seconds = time.monotonic() - started
        return Endurance(transfers, restarted, seconds, before[0], after[0], before[1], after[1])
