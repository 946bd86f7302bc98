"""Plans move every byte of a chunk to its place, for layouts that differ on both sides."""

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.chunks import Chunk
from transfer.descriptors import plan_chunk
from transfer.layouts import KvLayout, KvPool, Order, common_piece, rank_pairs

HEADS, HEAD_BYTES = 4, 8
Token = tuple[int, int, int]


def pool_of(layout: KvLayout, rank: int, blocks: int, *, block_major: bool) -> tuple[KvPool, npt.NDArray[np.uint8]]:
    memory = np.zeros(blocks * layout.block_bytes, dtype=np.uint8)
    make = KvPool.block_major if block_major else KvPool.plane_major
    return make(layout, rank, blocks, memory.ctypes.data), memory


def offset(pool: KvPool, base: int, table: list[int], plane: int, head: int, token: int) -> int:
    """Where the first byte of (plane, head of the model, token of the context) lies, told from the layout alone."""
    layout = pool.layout
    own = head - pool.rank * layout.rank_heads
    within = token % layout.block_tokens
    inner = own * layout.block_tokens + within if layout.order is Order.HEADS else within * layout.rank_heads + own
    block = table[token // layout.block_tokens]
    return pool.bases[plane] - base + block * pool.stride + inner * layout.head_bytes


layouts = st.builds(
    KvLayout,
    planes=st.just(3),
    heads=st.just(HEADS),
    head_bytes=st.just(HEAD_BYTES),
    block_tokens=st.sampled_from([2, 4, 8]),
    ranks=st.sampled_from([1, 2, 4]),
    order=st.sampled_from(Order),
)


@settings(max_examples=60, deadline=None)
@given(layouts, layouts, st.booleans(), st.booleans(), st.randoms(), st.integers(0, 3), st.integers(1, 4))
def test_every_byte_of_the_chunk_lands_in_its_place_and_no_other_is_touched(
    first: KvLayout, second: KvLayout, one_major: bool, other_major: bool, random: object, begin: int, length: int
) -> None:
    grain = max(first.block_tokens, second.block_tokens)
    chunk = Chunk(begin * grain, (begin + length) * grain)
    context = 8 * grain
    tables = []
    for layout in (first, second):
        blocks = list(range(context // layout.block_tokens))
        random.shuffle(blocks)  # type: ignore[attr-defined]
        tables.append(blocks)
    targets = {rank: pool_of(second, rank, len(tables[1]), block_major=other_major) for rank in range(second.ranks)}
    sources = {}
    for rank in range(first.ranks):
        pool, memory = pool_of(first, rank, len(tables[0]), block_major=one_major)
        memory[:] = np.frombuffer(random.randbytes(len(memory)), dtype=np.uint8) | 1  # type: ignore[attr-defined]
        sources[rank] = (pool, memory)
    moved = 0
    for origin, rank in rank_pairs(first, second):
        source, target = sources[origin][0], targets[rank][0]
        plan = plan_chunk(source, target, tables[0], tables[1], chunk, batch_bytes=64, batch_runs=3)
        assert sum(len(batch.source) for batch in plan.batches()) == plan.descriptors
        for batch in plan.batches():
            copy(source, target, batch.source, batch.target, plan.piece.bytes)
        moved += plan.bytes
    assert moved == chunk.tokens * 3 * HEADS * HEAD_BYTES
    for rank, (target, memory) in targets.items():
        expected = np.zeros_like(memory)
        for head in range(rank * second.rank_heads, (rank + 1) * second.rank_heads):
            source, held = sources[head // first.rank_heads]
            for plane in range(3):
                for token in range(chunk.start, chunk.end):
                    here = offset(source, held.ctypes.data, tables[0], plane, head, token)
                    there = offset(target, memory.ctypes.data, tables[1], plane, head, token)
                    expected[there : there + HEAD_BYTES] = held[here : here + HEAD_BYTES]
        assert (memory == expected).all()


def copy(
    source: KvPool, target: KvPool, origin: npt.NDArray[np.int32], destination: npt.NDArray[np.int32], size: int
) -> None:
    addresses = []
    for pool, indices in ((source, origin), (target, destination)):
        flat = np.concatenate([int(row[0]) + np.arange(int(row[4])) * int(row[3]) for row in pool.rows(size)])
        addresses.append(flat[indices])
    for here, there in zip(*addresses, strict=True):
        ctypes.memmove(int(there), int(here), size)


LAYOUT = KvLayout(planes=2, heads=2, head_bytes=16, block_tokens=16)


def pair(blocks: int = 64) -> tuple[KvPool, KvPool]:
    return KvPool.plane_major(LAYOUT, 0, blocks, 1 << 20), KvPool.plane_major(LAYOUT, 0, blocks, 1 << 24)


def test_runs_that_are_consecutive_on_both_sides_are_one_descriptor() -> None:
    source, target = pair()
    plan = plan_chunk(source, target, np.arange(8), np.arange(20, 28), Chunk(0, 128))
    assert (plan.descriptors, plan.runs) == (16, 2)
    scattered = plan_chunk(source, target, np.arange(8), np.arange(20, 36, 2), Chunk(0, 128))
    assert (scattered.descriptors, scattered.runs) == (16, 16)


def test_runs_that_rise_in_any_order_of_the_context_still_merge() -> None:
    source, target = pair()
    plan = plan_chunk(source, target, [3, 2, 1, 0], [13, 12, 11, 10], Chunk(0, 64))
    assert plan.runs == 2


def test_batches_end_at_bytes_and_at_runs() -> None:
    source, target = pair()
    piece = common_piece(source, target).bytes
    by_bytes = plan_chunk(source, target, np.arange(8), np.arange(8), Chunk(0, 128), batch_bytes=3 * piece)
    assert [len(batch.source) for batch in by_bytes.batches()] == [3, 3, 3, 3, 3, 1]
    by_runs = plan_chunk(source, target, np.arange(8), np.arange(0, 16, 2), Chunk(0, 128), batch_runs=5)
    assert [len(batch.source) for batch in by_runs.batches()] == [5, 5, 5, 1]


def test_heads_that_lie_apart_on_one_side_are_not_moved_as_one() -> None:
    inner = KvLayout(planes=1, heads=4, head_bytes=16, block_tokens=16, ranks=2, order=Order.TOKENS)
    outer = KvLayout(planes=1, heads=4, head_bytes=16, block_tokens=16, ranks=2, order=Order.HEADS)
    pools = [KvPool.plane_major(layout, 0, 4, 1 << 20) for layout in (inner, outer)]
    assert common_piece(*pools) == (1, 1, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": 3}, "planes: the source has 2, the target 3"),
        ({"head_bytes": 32}, "head_bytes: the source has 16, the target 32"),
        ({"heads": 4}, "heads: the source has 2, the target 4"),
    ],
)
def test_pools_of_another_model_are_refused(change: dict[str, int], message: str) -> None:
    source, _ = pair()
    other = KvLayout(**{"planes": 2, "heads": 2, "head_bytes": 16, "block_tokens": 16, **change})
    with pytest.raises(ValueError, match=message):
        common_piece(source, KvPool.plane_major(other, 0, 8, 1 << 20))


@pytest.mark.parametrize(
    ("source_blocks", "target_blocks", "chunk", "message"),
    [
        ([0], [0, 1], Chunk(0, 32), "source_blocks: 1 blocks of 16 do not reach token 32"),
        ([0, 64], [0, 1], Chunk(0, 32), "source_blocks: a block is not in 0…63"),
        ([0, 1], [0, -1], Chunk(0, 32), "target_blocks: a block is not in 0…63"),
        ([0, 1], [0, 1], Chunk(0, 24), "does not begin and end at whole blocks of 16 tokens"),
        ([0, 1], [0, 1], Chunk(16, 16), "holds no tokens"),
    ],
)
def test_blocks_that_do_not_fit_the_chunk_are_refused(
    source_blocks: list[int], target_blocks: list[int], chunk: Chunk, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_chunk(*pair(), source_blocks, target_blocks, chunk)


@pytest.mark.parametrize(
    ("field", "value"), [("planes", 0), ("heads", 0), ("head_bytes", -1), ("block_tokens", 0), ("ranks", 0)]
)
def test_a_layout_names_the_field_that_is_wrong(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}: must be at least 1"):
        KvLayout(**{"planes": 1, "heads": 1, "head_bytes": 1, "block_tokens": 1, field: value})
