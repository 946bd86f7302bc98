import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.chunks import CHUNK_TOKENS, Chunk, next_chunk, whole_blocks

block_sizes = st.sampled_from([16, 32, 128])


@pytest.mark.parametrize(
    ("covered", "target", "expected"),
    [
        (0, 10_000, Chunk(0, 4096)),
        (4096, 10_000, Chunk(4096, 8192)),
        (8192, 10_000, Chunk(8192, 9984)),
        (9984, 10_000, None),
        (0, 127, None),
        (0, 4095, Chunk(0, 3968)),
        (0, 4096, Chunk(0, 4096)),
        (0, 4097, Chunk(0, 4096)),
        (1000, 4096, Chunk(896, 4096)),
    ],
)
def test_chunks_end_at_multiples_and_the_last_is_shorter(covered: int, target: int, expected: Chunk | None) -> None:
    assert next_chunk(covered, target, block_size=128) == expected


@given(st.integers(0, 200_000), block_sizes, st.sampled_from([256, 1000, CHUNK_TOKENS]))
def test_chunks_tile_every_whole_block_once(target: int, block_size: int, chunk_tokens: int) -> None:
    covered = 0
    while (chunk := next_chunk(covered, target, block_size, chunk_tokens)) is not None:
        assert chunk.start == covered
        assert 0 < chunk.tokens <= max(chunk_tokens, block_size)
        covered = chunk.end
    assert covered == whole_blocks(target, block_size)


@given(st.integers(0, 50_000), st.integers(0, 50_000), block_sizes)
def test_a_growing_target_keeps_inner_boundaries(target: int, growth: int, block_size: int) -> None:
    first, later = next_chunk(0, target, block_size), next_chunk(0, target + growth, block_size)
    if first is not None and first.end % CHUNK_TOKENS == 0:
        assert later == first
