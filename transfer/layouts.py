"""Where the KV of a block lies in memory, on each side, and which pieces are contiguous on both.

A pool holds the KV of one tensor-parallel rank: `planes` (one per layer, or two where K and V lie apart), each an array
of blocks. Within a plane a block is [heads, tokens, head bytes] or [tokens, heads, head bytes].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd
from typing import NamedTuple

import numpy as np

from transfer.transport.base import Rows


class Order(Enum):
    """What is outermost within one plane of a block."""

    HEADS = "heads"
    TOKENS = "tokens"


@dataclass(frozen=True)
class KvLayout:
    """The KV of one model as one rank holds it. Raises ValueError naming the field.

    `heads` are the model's KV heads, all ranks together; where a model has fewer heads than ranks they are replicated,
    and the caller describes each rank by the heads it holds. `head_bytes` is the size of one head's entry for one token
    in one plane: K and V both, where they lie in one plane side by side per head.
    """

    planes: int
    heads: int
    head_bytes: int
    block_tokens: int
    ranks: int = 1
    order: Order = Order.HEADS

    def __post_init__(self) -> None:
        for name in ("planes", "heads", "head_bytes", "block_tokens", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, is {getattr(self, name)}")
        if self.heads % self.ranks:
            raise ValueError(f"ranks: {self.ranks} ranks do not share {self.heads} heads evenly")

    @property
    def rank_heads(self) -> int:
        return self.heads // self.ranks

    @property
    def plane_bytes(self) -> int:
        """Bytes of one block in one plane of one rank."""
        return self.rank_heads * self.block_tokens * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one rank, all planes."""
        return self.planes * self.plane_bytes


@dataclass(frozen=True)
class KvPool:
    """One rank's pool: block `b` of plane `i` begins at `bases[i] + b * stride`. Addresses and bytes.

    Planes one after another have `stride == layout.plane_bytes`; blocks with all planes inside have
    `stride == layout.block_bytes`. Raises ValueError naming the field.
    """

    layout: KvLayout
    rank: int
    blocks: int
    bases: tuple[int, ...]
    stride: int
    device: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.layout.ranks:
            raise ValueError(f"rank: {self.rank} is not in 0…{self.layout.ranks - 1}")
        if self.blocks < 1:
            raise ValueError(f"blocks: must be at least 1, is {self.blocks}")
        if len(self.bases) != self.layout.planes:
            raise ValueError(f"bases: {len(self.bases)} addresses for {self.layout.planes} planes")
        if self.stride < self.layout.plane_bytes:
            raise ValueError(f"stride: {self.stride} bytes do not hold a block of {self.layout.plane_bytes}")

    @classmethod
    def plane_major(cls, layout: KvLayout, rank: int, blocks: int, base: int, device: int = 0) -> "KvPool":
        """Planes one after another from `base`."""
        size = blocks * layout.plane_bytes
        bases = tuple(base + plane * size for plane in range(layout.planes))
        return cls(layout, rank, blocks, bases, layout.plane_bytes, device)

    @classmethod
    def block_major(cls, layout: KvLayout, rank: int, blocks: int, base: int, device: int = 0) -> "KvPool":
        """Blocks one after another from `base`, each with all its planes."""
        bases = tuple(base + plane * layout.plane_bytes for plane in range(layout.planes))
        return cls(layout, rank, blocks, bases, layout.block_bytes, device)

    def pieces_per_stride(self, piece_bytes: int) -> int:
        return self.stride // piece_bytes

    def pieces_per_plane(self, piece_bytes: int) -> int:
        return ((self.blocks - 1) * self.stride + self.layout.plane_bytes) // piece_bytes

    def rows(self, piece_bytes: int) -> Rows:
        """The whole pool in pieces of `piece_bytes`, a row per plane: what `Transport.prepare` takes."""
        count = self.pieces_per_plane(piece_bytes)
        return np.array([[base, piece_bytes, self.device, piece_bytes, count] for base in self.bases], dtype=np.uint64)


class Piece(NamedTuple):
    """The largest part of a block that is contiguous, and in the same order, in both pools."""

    heads: int
    tokens: int
    bytes: int


def _contiguous(layout: KvLayout, heads: int, tokens: int) -> tuple[int, int]:
    """What of a rectangle of (heads, tokens) one side holds in one run."""
    if layout.order is Order.HEADS:
        return (heads, tokens) if tokens == layout.block_tokens else (1, tokens)
    return (heads, tokens) if heads == layout.rank_heads else (heads, 1)


def common_piece(source: KvPool, target: KvPool) -> Piece:
    """How the KV that both ranks hold is cut. Raises ValueError when the pools are not the same model's or share none.

    A block whose stride is no multiple of the piece cannot be addressed; the error names the pool.
    """
    first, second = source.layout, target.layout
    for name in ("planes", "heads", "head_bytes"):
        if getattr(first, name) != getattr(second, name):
            raise ValueError(
                f"{name}: the source has {getattr(first, name)}, the target {getattr(second, name)}; "
                "both must serve the same model with the same KV type"
            )
    if not (first.rank_heads % second.rank_heads == 0 or second.rank_heads % first.rank_heads == 0):
        raise ValueError(f"ranks: {first.ranks} and {second.ranks} cut the heads at different places")
    shared = shared_heads(source, target)
    if not shared:
        raise ValueError(f"rank: source rank {source.rank} and target rank {target.rank} share no heads")
    tokens = gcd(first.block_tokens, second.block_tokens)
    heads = len(shared)
    # What one side cuts may no longer be whole, and so not contiguous, on the other.
    for layout in (first, second, first):
        heads, tokens = _contiguous(layout, heads, tokens)
    if first.order is not second.order and heads > 1 and tokens > 1:
        # A transport copies, it does not transpose.
        heads = tokens = 1
    size = heads * tokens * first.head_bytes
    for name, pool in (("source", source), ("target", target)):
        if pool.stride % size:
            raise ValueError(f"stride: the {name}'s {pool.stride} bytes are no multiple of a piece of {size}")
    return Piece(heads, tokens, size)


def shared_heads(source: KvPool, target: KvPool) -> range:
    """The model's heads that both ranks hold."""
    first = source.rank * source.layout.rank_heads
    second = target.rank * target.layout.rank_heads
    return range(max(first, second), min(first + source.layout.rank_heads, second + target.layout.rank_heads))


def rank_pairs(source: KvLayout, target: KvLayout) -> list[tuple[int, int]]:
    """(source rank, target rank) of every transfer that a chunk needs, each head of each target rank once."""
    pairs = []
    for rank in range(target.ranks):
        wanted = range(rank * target.rank_heads, (rank + 1) * target.rank_heads)
        pairs += [(origin, rank) for origin in _owners(source, wanted)]
    return pairs


def _owners(source: KvLayout, heads: range) -> Sequence[int]:
    return range(heads.start // source.rank_heads, (heads.stop - 1) // source.rank_heads + 1)
