import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.allocation import BlockPool, Blocks


def runs(blocks: Blocks) -> int:
    return int((np.diff(blocks) != 1).sum()) + 1


def with_free_runs(*lengths: int) -> BlockPool:
    """A pool whose free runs have these lengths, in this order."""
    pool = BlockPool(sum(lengths) + len(lengths))
    everything = pool.allocate(pool.free_blocks)
    assert everything is not None
    begin = 0
    for length in lengths:
        pool.free(np.arange(begin, begin + length, dtype=np.int32))
        begin += length + 1
    return pool


def test_the_shortest_run_that_holds_all_is_taken_so_that_longer_ones_stay_whole() -> None:
    pool = with_free_runs(10, 4, 6)
    blocks = pool.allocate(4)
    assert blocks is not None
    assert blocks.tolist() == [11, 12, 13, 14]
    assert pool.longest_run() == 10


def test_without_one_run_the_fewest_are_taken() -> None:
    pool = with_free_runs(2, 5, 3, 6, 1)
    blocks = pool.allocate(9)
    assert blocks is not None
    assert runs(blocks) == 2


def test_what_is_not_there_is_not_given() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.free_blocks == 4


@pytest.mark.parametrize("blocks", [[0], [1, 1], [-1], [4]])
def test_blocks_that_are_not_out_cannot_come_back(blocks: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free(np.array([0], dtype=np.int32))
    with pytest.raises(ValueError, match="blocks:"):
        pool.free(np.array(blocks, dtype=np.int32))


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40))
def test_no_block_is_given_twice_and_none_is_lost(steps: list[tuple[int, bool]]) -> None:
    pool, out = BlockPool(64), []
    for count, give_back in steps:
        if give_back and out:
            pool.free(out.pop(count % len(out)))
        elif (blocks := pool.allocate(count)) is not None:
            assert len(blocks) == count
            out.append(blocks)
        held = [int(block) for blocks in out for block in blocks]
        assert len(held) == len(set(held)) == 64 - pool.free_blocks
    for blocks in out:
        pool.free(blocks)
    assert pool.longest_run() == pool.free_blocks == 64
