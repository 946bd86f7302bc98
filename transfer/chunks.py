"""Chunk plans: which token range moves next.

A chunk is up to 4,096 tokens of KV, the unit of a push (paper section 3.5). Chunks end at multiples of the chunk size,
so that a target that grows while it is being pushed keeps its boundaries; the last one is shorter and still moves, in
whole blocks. Blocks that are not full are never cached by an engine and so never worth moving.
"""

from typing import NamedTuple

CHUNK_TOKENS = 4096


class Chunk(NamedTuple):
    """Tokens [start, end) of a context."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


def whole_blocks(tokens: int, block_size: int) -> int:
    """`tokens` rounded down to whole blocks."""
    return tokens - tokens % block_size


def next_chunk(covered: int, target: int, block_size: int, chunk_tokens: int = CHUNK_TOKENS) -> Chunk | None:
    """The next range to cover on the way from `covered` to `target` tokens, or None when no whole block is missing.

    The range ends at the next multiple of `chunk_tokens` or at the target's last whole block, whichever comes first.
    """
    start = whole_blocks(covered, block_size)
    last = whole_blocks(target, block_size)
    if start >= last:
        return None
    boundary = whole_blocks((start // chunk_tokens + 1) * chunk_tokens, block_size)
    return Chunk(start, min(max(boundary, start + block_size), last))
