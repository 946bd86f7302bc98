"""The shadow KV class on vLLM's block pool: its free queue, in the order the policy keeps.

Nothing on disk is patched: one pool's queue object is exchanged for this one before the pool serves its first request.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from pd_shadow.policy.shadow_cache import ShadowCache


class ShadowFreeQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """vLLM's queue of free blocks; within `for_shadow` it hands out what shadow work may take."""

    def __init__(
        self,
        blocks: list[Any],
        free: Iterable[Any],
        cap: int,
        cold_seconds: float,
        clock: Callable[[], float],
        stale_seconds: float = 0.0,
    ):
        self._blocks = blocks
        self._clock = clock
        # Within `for_shadow`: free blocks about to be used as they are.
        self._apart_from: Collection[Any] | None = None
        self.cache = ShadowCache((block.block_id for block in free), cap, cold_seconds, stale_seconds)

    @property
    def num_free_blocks(self) -> int:
        if self._apart_from is not None:
            return self.room(self._apart_from) + len(self._apart_from)
        return len(self.cache)

    @contextlib.contextmanager
    def for_shadow(self, apart_from: Collection[Any] = ()) -> Iterator[None]:
        """Inside, only blocks for shadow work count as free, those of `apart_from`, and blocks are taken for it."""
        self._apart_from = apart_from
        try:
            yield
        finally:
            self._apart_from = None

    def room(self, apart_from: Collection[Any] = (), most: int | None = None, ahead: float = 0.0) -> int:
        """Blocks shadow work may take now, counted up to `most`; `apart_from` are blocks it will use as they are.

        With nothing used until then, so many it may take `ahead` seconds from now.
        """
        when = self._clock() + ahead
        return self.cache.room(when, apart_from=[block.block_id for block in apart_from], most=most)

    def promote(self, blocks: Iterable[Any]) -> None:
        """A normal request hit these blocks."""
        self.cache.promote((block.block_id for block in blocks), self._clock())

    def expire(self, blocks: Iterable[Any]) -> None:
        """Of these blocks, those that are free in the class are the next to be taken from it, last ones first."""
        self.cache.expire(block.block_id for block in blocks)

    def forget(self) -> None:
        """The content of all free blocks was dropped."""
        order = self.cache.order()
        for block_id in order:
            self.cache.remove(block_id)
        self.cache.free_unhashed(order)

    # vLLM's interface.

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        shadow = self._apart_from is not None
        now = self._clock()
        taken = self.cache.take_for_shadow(n, now) if shadow else self.cache.take(n, now)
        return [self._blocks[block_id] for block_id in taken]

    def remove(self, block: Any) -> None:
        self.cache.remove(block.block_id)

    def append(self, block: Any) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        self.cache.free_hashed((block.block_id for block in blocks), self._clock())

    def prepend_n(self, blocks: list[Any]) -> None:
        self.cache.free_unhashed(block.block_id for block in blocks)

    def get_all_free_blocks(self) -> list[Any]:
        return [self._blocks[block_id] for block_id in self.cache.order()]

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        order = iter(self.cache.order())
        if cursor is not None:
            for block_id in order:
                if block_id == cursor.block_id:
                    break
        return (self._blocks[block_id] for block_id in order)


def install(
    pool: Any, cap: int, cold_seconds: float, clock: Callable[[], float], stale_seconds: float = 0.0
) -> ShadowFreeQueue:
    """Exchange the pool's free queue for one with a shadow class of at most `cap` blocks."""
    free = pool.free_block_queue.get_all_free_blocks()
    queue = ShadowFreeQueue(pool.blocks, free, cap, cold_seconds, clock, stale_seconds)
    pool.free_block_queue = queue
    return queue
