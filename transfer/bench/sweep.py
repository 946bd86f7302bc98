"""Chunks of many shapes, each beside the machine's own limit for the same addresses, in turns in the same minute.

Every chunk moves memory that has not been touched for longer than the caches last, from and to blocks in runs of a
given length in shuffled order: what an engine's block tables look like after some hours.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer.bench.limits import merged, single_copy
from transfer.bench.memory import Buffer
from transfer.bench.peer import Peer, PoolShape, completed, open_courier
from transfer.chunks import CHUNK_TOKENS, Chunk
from transfer.courier import Courier, Drained, PeerOffer, Push, PushOutcome, PushReason
from transfer.descriptors import ChunkPlan, plan_chunk
from transfer.layouts import KvLayout
from transfer.reservations import Sender
from transfer.transport.base import Operation, TransportError
from transfer.transport.nixl import NixlSettings

PUSH_SECONDS = 30.0
SENDER = Sender("sender", 1)


@dataclass(frozen=True)
class Case:
    """One row of the result. `run_blocks` is how many blocks lie side by side; 0 stands for all of them."""

    layout: KvLayout
    run_blocks: int = 1
    chunk_tokens: int = CHUNK_TOKENS
    operation: Operation = Operation.WRITE
    block_major: bool = False
    tcp: bool = False
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.run_blocks < 0:
            raise ValueError(f"run_blocks: must not be negative, is {self.run_blocks}")
        if self.chunk_tokens < 1 or self.chunk_tokens % self.layout.block_tokens:
            raise ValueError(
                f"chunk_tokens: {self.chunk_tokens} are no whole blocks of {self.layout.block_tokens} tokens"
            )
        if self.concurrency < 1:
            raise ValueError(f"concurrency: must be at least 1, is {self.concurrency}")

    @property
    def blocks(self) -> int:
        return self.chunk_tokens // self.layout.block_tokens

    @property
    def settings(self) -> NixlSettings:
        return NixlSettings(environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"} if self.tcp else {})

    @property
    def shape(self) -> PoolShape:
        """Room for every chunk in flight twice, so that no chunk meets its own memory in a cache."""
        return PoolShape(self.layout, 2 * self.concurrency * self.blocks, self.block_major)


class Row(NamedTuple):
    """Bandwidths in 1e9 bytes per second, medians; times in seconds as the receiver sees them.

    `best_ratio_to_limit` compares the fastest chunk with the fastest run of the limit: on a machine that does other
    work beside, medians say more about that than about the transfer.
    """

    layout: str
    direction: str
    backend: str
    chunk_tokens: int
    descriptor_bytes: int
    run_blocks: int
    concurrency: int
    chunk_bytes: int
    descriptors: int
    merged_descriptors: int
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    ratio_to_limit: float
    best_ratio_to_limit: float
    p50_s: float
    p90_s: float
    p99_s: float
    cpu_seconds_per_gb: float


def block_table(generator: np.random.Generator, blocks: npt.NDArray[np.int32], run: int) -> npt.NDArray[np.int32]:
    """`blocks` in runs of `run`, the runs shuffled."""
    if run == 0 or run >= len(blocks):
        return blocks
    pieces = [blocks[begin : begin + run] for begin in range(0, len(blocks), run)]
    generator.shuffle(pieces)
    return np.concatenate(pieces)


class Pair:
    """A sender here and a receiver there. A context manager."""

    def __init__(self, shape: PoolShape, settings: NixlSettings) -> None:
        self.peer = Peer("receiver", 1, shape, settings)
        try:
            self.buffer = Buffer(shape.bytes, huge_pages=shape.huge_pages)
            self.buffer.fill(1)
            # A side that only sends needs no progress thread, and copies are slower beside one.
            settings = replace(settings, progress_thread=False)
            self.transport, self.courier = open_courier(SENDER.name, SENDER.incarnation, shape, self.buffer, settings)
            try:
                self.meet()
            except BaseException:
                self.courier.close()
                raise
        except BaseException:
            self.peer.close()
            raise

    def meet(self) -> None:
        self.offer: PeerOffer = self.peer.offer()
        self.peer.connect(self.courier.offer())
        self.courier.connect(self.offer)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.courier.close()
        finally:
            self.peer.close()


def drive(courier: Courier, pushes: Sequence[Push]) -> list[PushOutcome]:
    """Push and wait until all have drained."""
    outcomes: list[PushOutcome] = []
    drains: list[Drained] = []
    for push in pushes:
        courier.push(push, outcomes.append, drains.append)
    while len(drains) < len(pushes):
        wait = courier.step()
        if wait:
            time.sleep(wait)
    return outcomes


def run_case(case: Case, rounds: int, seed: int) -> Row:
    """Move `rounds` chunks (after one that is not counted). Raises TransportError when one does not arrive."""
    generator = np.random.default_rng(seed)
    chunk = Chunk(0, case.chunk_tokens)
    seconds: list[float] = []
    visible: list[float] = []
    limits: list[float] = []
    cpu = 0.0
    plan: ChunkPlan | None = None
    with Pair(case.shape, case.settings) as pair:
        pair.peer.fill(2)
        pools = (pair.courier.pool, pair.offer.pool)
        halves = itertools.cycle(np.array_split(np.arange(case.shape.blocks, dtype=np.int32), 2))
        for turn in range(rounds + 1):
            own = next(halves)
            pushes, taken = [], []
            for part in np.array_split(own, case.concurrency):
                reserved = pair.peer.reserve(case.blocks, [SENDER], PUSH_SECONDS)
                if reserved is None:
                    raise TransportError("the receiver has no blocks free")
                epoch, blocks = reserved
                taken.append(blocks)
                tables = (
                    block_table(generator, part, case.run_blocks),
                    block_table(generator, blocks, case.run_blocks),
                )
                plan = (
                    plan_chunk(*pools, *tables, chunk)
                    if case.operation is Operation.WRITE
                    else plan_chunk(*pools[::-1], *tables[::-1], chunk)
                )
                deadline = time.monotonic() + PUSH_SECONDS
                pushes.append(Push("receiver", 1, epoch, 0, plan, deadline, operation=case.operation))
            assert plan is not None
            # In turns before and after, so that neither always finds what the other has left in the caches.
            limit = _limit(case, pair, plan, taken[-1]) if turn % 2 else 0.0
            before = time.process_time() + pair.peer.usage().cpu_seconds
            started = time.monotonic()
            outcomes = drive(pair.courier, pushes)
            elapsed = time.monotonic() - started
            used = time.process_time() + pair.peer.usage().cpu_seconds - before
            if failed := [outcome for outcome in outcomes if outcome.reason is not PushReason.DONE]:
                raise TransportError(f"a chunk did not arrive: {failed[0].reason.value} {failed[0].detail}")
            times = _arrivals(pair.peer, len(pushes))
            limit = limit or _limit(case, pair, plan, taken[-1])
            for blocks in taken:
                pair.peer.free(blocks)
            if turn:
                seconds.append(elapsed)
                visible += [at - started for at in times]
                limits.append(limit)
                cpu += used
    assert plan is not None
    size = plan.bytes * case.concurrency
    speed, raw = size / float(np.median(seconds)) / 1e9, float(np.median(limits)) / 1e9
    p50, p90, p99 = (float(value) for value in np.percentile(visible, [50, 90, 99]))
    return Row(
        layout="block_major" if case.block_major else "plane_major",
        direction=case.operation.value.lower(),
        backend="ucx_tcp" if case.tcp else "ucx",
        chunk_tokens=case.chunk_tokens,
        descriptor_bytes=plan.piece.bytes,
        run_blocks=case.run_blocks or case.blocks,
        concurrency=case.concurrency,
        chunk_bytes=plan.bytes,
        descriptors=plan.descriptors,
        merged_descriptors=plan.runs,
        gb_per_s=speed,
        limit="tcp_loopback" if case.tcp else "single_copy",
        limit_gb_per_s=raw,
        ratio_to_limit=speed / raw,
        best_ratio_to_limit=size / min(seconds) / max(limits),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        cpu_seconds_per_gb=cpu / (size * rounds / 1e9),
    )


def _arrivals(peer: Peer, count: int) -> list[float]:
    seen: list[float] = []
    give_up = time.monotonic() + PUSH_SECONDS
    while len(seen) < count:
        if time.monotonic() > give_up:
            raise TransportError("the receiver has not seen a chunk that was sent")
        seen += [at for at, _ in completed(peer.take())]
    return seen


def _limit(case: Case, pair: Pair, plan: ChunkPlan, blocks: npt.NDArray[np.int32]) -> float:
    """Bytes per second of the machine, for the same bytes at the same addresses where it takes addresses."""
    if case.tcp:
        begin = int(blocks[0]) * case.layout.plane_bytes
        data = np.roll(pair.buffer.array, -begin)[: plan.bytes] if begin else pair.buffer.array[: plan.bytes]
        return plan.bytes / pair.peer.raw_tcp(data)
    write = case.operation is Operation.WRITE
    pools = (pair.courier.pool, pair.offer.pool)
    runs = merged(plan, *(pools if write else pools[::-1]))
    if not write:
        runs = runs[:, [1, 0, 2]]
    return plan.bytes / single_copy(pair.peer.pid, runs, write=write)


def llama_like(planes: int, block_tokens: int, head_bytes: int = 512, heads: int = 8) -> KvLayout:
    """Eight KV heads of 128 in bfloat16, K beside V: 4 KB per token and layer, as in Llama 3 8B and Qwen3 8B."""
    return KvLayout(planes=planes, heads=heads, head_bytes=head_bytes, block_tokens=block_tokens)


def default_cases() -> Iterator[Case]:
    """What a user's question is most often about, first."""
    for run in (0, 16, 1):
        yield Case(llama_like(4, 16), run)
    yield Case(llama_like(4, 128), 1)
    yield Case(llama_like(4, 16), 0, operation=Operation.READ)
    yield Case(llama_like(4, 16), 1, operation=Operation.READ)
    yield Case(llama_like(4, 16), 1, block_major=True)
    yield Case(llama_like(4, 16), 0, chunk_tokens=1024)
    for run in (0, 16, 1):
        yield Case(llama_like(16, 16, head_bytes=128, heads=2), run)
    yield Case(llama_like(4, 128), 0, tcp=True)
    yield Case(llama_like(4, 16), 1, tcp=True)
