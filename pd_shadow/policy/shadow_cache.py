"""The shadow KV class: capped, evicted before everything else, least recently used first (paper section 3.3).

One order over all free blocks of a pool, what is reused first at the front:

    unhashed | shadow, least recently used first | normal, least recently used first

Blocks are ids. A member of the class is a block that shadow work allocated: it stays one while shadow work uses it and
while it is free, and leaves the class when something else takes it (eviction), when its content is dropped, or when a
normal request hits it (promotion).
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable

CAP_SHARE = 0.25
"""Largest share of the pool (paper section 3.3)."""
COLD_SECONDS = 5.0
"""Idle time from which a cached block may be taken for shadow work (paper section 3.3)."""


class ShadowCache:
    """Keeps the order; the caller keeps reference counts and hashes. Not thread-safe.

    Raises KeyError for a block that is not free, and ValueError when more blocks are taken than there are.
    """

    def __init__(self, blocks: Iterable[int], cap: int, cold_seconds: float = COLD_SECONDS) -> None:
        self._unhashed: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)
        # Values are the times the blocks were freed.
        self._shadow: OrderedDict[int, float] = OrderedDict()
        self._normal: OrderedDict[int, float] = OrderedDict()
        self._members: set[int] = set()
        self._cold_seconds = cold_seconds
        self.cap = cap
        self._evicted: list[int] = []

    def __len__(self) -> int:
        """Free blocks."""
        return len(self._unhashed) + len(self._shadow) + len(self._normal)

    def __contains__(self, block: int) -> bool:
        """Whether a block is free."""
        return block in self._unhashed or block in self._shadow or block in self._normal

    @property
    def size(self) -> int:
        """Blocks of the class, free or in use."""
        return len(self._members)

    @property
    def members(self) -> Collection[int]:
        return self._members

    def order(self) -> list[int]:
        """All free blocks, the next to be reused first."""
        return [*self._unhashed, *self._shadow, *self._normal]

    def take(self, count: int) -> list[int]:
        """Blocks for normal work."""
        if count > len(self):
            raise ValueError(f"{count} blocks asked for, {len(self)} free")
        taken: list[int] = []
        for queue in (self._unhashed, self._shadow, self._normal):
            while len(taken) < count and queue:
                taken.append(queue.popitem(last=False)[0])
        for block in self._members.intersection(taken):
            self._members.discard(block)
            self._evicted.append(block)
        return taken

    def room(self, now: float, *, apart_from: Collection[int] = ()) -> int:
        """How many blocks shadow work may take now; `apart_from` are free blocks that it is about to use as they are.

        Free blocks without content and normal ones gone cold, up to the cap; and the class's own cold blocks.
        """
        spared = set(apart_from)
        grow = sum(block not in spared for block in self._unhashed) if spared else len(self._unhashed)
        grow += self._count_cold(self._normal, now, spared)
        growth = max(0, min(grow, self.cap - self.size))
        return growth + (self._count_cold(self._shadow, now, spared) if self.size <= self.cap else 0)

    def take_for_shadow(self, count: int, now: float) -> list[int]:
        """Blocks for shadow work, which makes them members; raises ValueError for more than `room` says."""
        if count > self.room(now):
            raise ValueError(f"{count} shadow blocks asked for, room for {self.room(now)}")
        growth = max(0, self.cap - self.size)
        taken: list[int] = []
        while len(taken) < min(count, growth) and self._unhashed:
            taken.append(self._unhashed.popitem(last=False)[0])
        # Its own cold blocks before those of normal work: recycling does not make the class larger.
        while len(taken) < count and self._shadow and self._is_cold(self._shadow, now):
            block = self._shadow.popitem(last=False)[0]
            self._evicted.append(block)
            taken.append(block)
        while len(taken) < count:
            taken.append(self._normal.popitem(last=False)[0])
        self._members.update(taken)
        return taken

    def remove(self, block: int) -> None:
        """A free block is in use again with its content."""
        for queue in (self._normal, self._shadow, self._unhashed):
            if block in queue:
                del queue[block]
                return
        raise KeyError(block)

    def free_unhashed(self, blocks: Iterable[int]) -> None:
        """Blocks without content worth keeping go to the front, in the order given."""
        for block in reversed(list(blocks)):
            self._members.discard(block)
            self._unhashed[block] = None
            self._unhashed.move_to_end(block, last=False)

    def free_hashed(self, blocks: Iterable[int], now: float) -> None:
        """Cached blocks become the most recently used of their class, in the order given."""
        for block in blocks:
            (self._shadow if block in self._members else self._normal)[block] = now

    def promote(self, blocks: Iterable[int]) -> None:
        """A normal request hit these blocks: they are normal from now on."""
        for block in self._members.intersection(blocks):
            self._members.discard(block)
            if block in self._shadow:
                self._normal[block] = self._shadow.pop(block)

    def expire(self, blocks: Iterable[int]) -> None:
        """Of these blocks, free members become cold and the next to be reused of their class, last ones first."""
        for block in blocks:
            if block in self._shadow:
                self._shadow[block] = -math.inf
                self._shadow.move_to_end(block, last=False)

    def set_cap(self, cap: int) -> None:
        """Change the cap; free members beyond it, least recently used first, leave the class to be reused first."""
        self.cap = cap
        while self.size > cap and self._shadow:
            block, _ = self._shadow.popitem(last=False)
            self._members.discard(block)
            self._evicted.append(block)
            self._unhashed[block] = None

    def drain_evicted(self) -> list[int]:
        """Members whose content was given up for other use since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _is_cold(self, queue: OrderedDict[int, float], now: float) -> bool:
        return now - next(iter(queue.values())) > self._cold_seconds

    def _count_cold(self, queue: OrderedDict[int, float], now: float, spared: set[int]) -> int:
        count = 0
        # Oldest first, so the first warm one ends the count.
        for block, freed in queue.items():
            if now - freed <= self._cold_seconds:
                break
            count += block not in spared
        return count
