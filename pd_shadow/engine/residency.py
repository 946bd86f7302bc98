"""Whose context a KV block holds, so that an eviction can be told as tokens of a session."""

from collections.abc import Iterable, Sequence


class Residency:
    """The last session to use each block. Bounded by the pool: one entry per block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._owner: dict[int, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def hold(self, session: str, blocks: Sequence[int]) -> None:
        """A session's context begins with these blocks, in order."""
        for index, block in enumerate(blocks):
            self._owner[block] = (session, index)

    def evicted(self, blocks: Iterable[int]) -> dict[str, int]:
        """Blocks whose content is gone; returns the tokens left of every session touched, from the beginning."""
        remaining: dict[str, int] = {}
        for block in blocks:
            owner = self._owner.pop(block, None)
            if owner is not None:
                session, index = owner
                tokens = index * self._block_size
                remaining[session] = min(tokens, remaining.get(session, tokens))
        return remaining

    def blocks(self, session: str) -> list[int]:
        """The blocks a session was the last to use, from the beginning of its context."""
        owned = sorted((index, block) for block, (owner, index) in self._owner.items() if owner == session)
        return [block for _, block in owned]

    def clear(self) -> None:
        """The whole cache was reset."""
        self._owner.clear()
