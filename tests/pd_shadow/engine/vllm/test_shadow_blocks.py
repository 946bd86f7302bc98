"""The free queue with a shadow class, on vLLM's real block pool and beside vLLM's own queue."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_shadow.engine.vllm import shadow_blocks

pytestmark = pytest.mark.engine

BLOCKS = 24


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_pool(cap: int | None = None, cold_seconds: float = 5.0, clock: Clock | None = None) -> Any:
    """vLLM's block pool; with a cap, its queue is exchanged for ours."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=32)
    if cap is not None:
        shadow_blocks.install(pool, cap, cold_seconds, clock or Clock())
    return pool


def give_content(pool: Any, blocks: list[Any], number: int) -> None:
    """Cache blocks under hashes of their own, as a request that fills them would."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    for block in blocks:
        key = make_block_hash_with_group_id(BlockHash(f"{number}-{block.block_id}".encode()), 0)
        pool._insert_block_hash(key, block, num_tokens=32)


def free_ids(pool: Any) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


# What a cache manager does to a pool: takes blocks, caches some of them, frees in any order, takes cached ones again.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.integers(1, 6), st.integers(0, 6)),
        st.tuples(st.just("free"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("touch"), st.integers(0, BLOCKS), st.integers(0, 6)),
        st.tuples(st.just("evict"), st.integers(0, BLOCKS), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, BLOCKS), st.just(0)),
    ),
    max_size=60,
)


def play(pool: Any, operations: list[tuple[str, int, Any]]) -> list[Any]:
    """Everything that can be seen of a pool while these operations are done to it."""
    held: list[list[Any]] = []
    seen: list[Any] = []
    for number, (what, first, second) in enumerate(operations):
        if what == "get" and first <= pool.get_num_free_blocks():
            blocks = pool.get_new_blocks(first)
            give_content(pool, blocks[:second], number)
            held.append(blocks)
            seen.append([block.block_id for block in blocks])
        elif what == "free" and held:
            blocks = held.pop(first % len(held))
            pool.free_blocks(blocks if second else reversed(blocks))
        elif what == "touch":
            cached = [block for block in pool.blocks if block.block_hash is not None][first : first + second]
            pool.touch(cached)
            held.append(cached)
        elif what == "evict" and first < BLOCKS:
            pool.evict_blocks({first})
        elif what == "look":
            order = pool.free_block_queue.get_all_free_blocks()
            cursor = order[first] if first < len(order) else None
            seen.append([block.block_id for block in pool.free_block_queue.iter_blocks_after(cursor)])
        seen.append((pool.get_num_free_blocks(), free_ids(pool)))
    return seen


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_without_shadow_work_it_is_vllms_own_queue(operations: list[tuple[str, int, Any]]) -> None:
    assert play(make_pool(cap=10), operations) == play(make_pool(), operations)


def test_single_blocks_come_and_go_as_in_vllms_queue() -> None:
    seen = []
    for pool in (make_pool(cap=10), make_pool()):
        queue = pool.free_block_queue
        taken = [queue.popleft(), queue.popleft()]
        queue.append(taken[0])
        queue.prepend_n([taken[1]])
        seen.append((queue.num_free_blocks, free_ids(pool)))
    assert seen[0] == seen[1]


def test_more_than_is_free_is_refused() -> None:
    pool = make_pool(cap=10)
    with pytest.raises(ValueError, match="Cannot get 24 free blocks"):
        pool.get_new_blocks(BLOCKS)
    with pytest.raises(ValueError, match="24 blocks asked for, 23 free"):
        pool.free_block_queue.popleft_n(BLOCKS)


def test_the_walk_of_an_offloading_connector_goes_on_after_its_cursor() -> None:
    pool = make_pool(cap=10)
    order = pool.free_block_queue.get_all_free_blocks()
    assert list(pool.free_block_queue.iter_blocks_after(None)) == order
    assert list(pool.free_block_queue.iter_blocks_after(order[3])) == order[4:]
    assert list(pool.free_block_queue.iter_blocks_after(order[-1])) == []
    # One that is no longer free ends the walk.
    taken = pool.get_new_blocks(1)
    assert list(pool.free_block_queue.iter_blocks_after(taken[0])) == []


def cached(pool: Any, count: int, number: int, *, shadow: bool) -> list[Any]:
    """Blocks with content, free again."""
    if shadow:
        with pool.free_block_queue.for_shadow():
            blocks = pool.get_new_blocks(count)
    else:
        blocks = pool.get_new_blocks(count)
    give_content(pool, blocks, number)
    pool.free_blocks(reversed(blocks))
    return list(blocks)


def ids(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def test_normal_work_takes_empty_blocks_then_shadow_ones_then_its_own_least_recently_used_first() -> None:
    pool = make_pool(cap=10)
    normal = cached(pool, 10, 1, shadow=False)
    shadow = cached(pool, 10, 2, shadow=True)
    rest = [block_id for block_id in free_ids(pool) if block_id not in ids(normal + shadow)]
    # Within a request the tail goes first.
    assert free_ids(pool) == rest + ids(shadow)[::-1] + ids(normal)[::-1]
    assert ids(pool.get_new_blocks(len(rest) + 2)) == rest + ids(shadow)[:-3:-1]
    assert pool.free_block_queue.cache.size == 8


def test_shadow_work_gets_no_more_than_its_class_may_hold() -> None:
    pool = make_pool(cap=6)
    queue = pool.free_block_queue
    with queue.for_shadow():
        assert pool.get_num_free_blocks() == 6
        pool.get_new_blocks(4)
        assert pool.get_num_free_blocks() == 2
        with pytest.raises(ValueError, match="Cannot get 3 free blocks"):
            pool.get_new_blocks(3)
    assert pool.get_num_free_blocks() == BLOCKS - 1 - 4


def test_blocks_a_shadow_is_about_to_use_count_as_free_but_are_not_handed_out_to_it() -> None:
    clock = Clock()
    pool = make_pool(cap=10, clock=clock)
    hits = cached(pool, 4, 1, shadow=True)
    cached(pool, 19, 2, shadow=False)
    queue = pool.free_block_queue
    clock.now = 6.0
    # All is cold: 6 more may be taken from normal work, and its own 4 again unless they are what it needs.
    assert queue.room() == 10
    assert queue.room(hits) == 6
    with queue.for_shadow(hits):
        assert pool.get_num_free_blocks() == 6 + 4
        pool.touch(hits)
        assert not set(ids(pool.get_new_blocks(6))) & set(ids(hits))


def test_normal_blocks_may_be_taken_once_they_are_cold() -> None:
    clock = Clock()
    pool = make_pool(cap=10, cold_seconds=5.0, clock=clock)
    cached(pool, BLOCKS - 1, 1, shadow=False)
    for now, room in ((0.0, 0), (5.0, 0), (5.1, 10)):
        clock.now = now
        assert pool.free_block_queue.room() == room


def test_a_normal_hit_promotes_in_use_and_free() -> None:
    pool = make_pool(cap=10)
    queue = pool.free_block_queue
    shadow = cached(pool, 6, 1, shadow=True)
    pool.touch(shadow[:3])
    queue.promote(shadow[:4])
    assert queue.cache.size == 2
    pool.free_blocks(reversed(shadow[:3]))
    # What is left of the class goes first, the promoted ones last.
    assert [block_id for block_id in free_ids(pool) if block_id in ids(shadow)] == ids(
        [shadow[5], shadow[4], shadow[3], shadow[2], shadow[1], shadow[0]]
    )
    empty = BLOCKS - 1 - 6
    assert ids(pool.get_new_blocks(empty + 2))[-2:] == ids([shadow[5], shadow[4]])
    assert queue.cache.size == 0


def test_expired_blocks_may_be_taken_at_once_and_give_way_first() -> None:
    pool = make_pool(cap=6)
    queue = pool.free_block_queue
    kept, expired = cached(pool, 3, 1, shadow=True), cached(pool, 3, 2, shadow=True)
    assert queue.room() == 0
    queue.expire([*expired, pool.blocks[20]])
    assert queue.room() == 3
    with queue.for_shadow():
        assert ids(pool.get_new_blocks(3)) == ids(expired)[::-1]
    assert [block_id for block_id in free_ids(pool) if block_id in ids(kept)] == ids(kept)[::-1]


def test_after_a_reset_no_block_has_content() -> None:
    pool = make_pool(cap=6)
    queue = pool.free_block_queue
    cached(pool, 6, 1, shadow=True)
    cached(pool, BLOCKS - 1 - 6, 2, shadow=False)
    assert queue.room() == 0
    order = free_ids(pool)
    assert pool.reset_prefix_cache()
    queue.forget()
    assert (queue.cache.size, queue.room(), free_ids(pool)) == (0, 6, order)


def test_the_mode_ends_with_an_exception() -> None:
    pool = make_pool(cap=0)

    def fails() -> None:
        with pool.free_block_queue.for_shadow():
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fails()
    assert len(pool.get_new_blocks(BLOCKS - 1)) == BLOCKS - 1
