"""The shadow KV class: capped, evicted before everything else, least recently used first (paper section 3.3).

One order over all free blocks of a pool, what is reused first at the front:

    unhashed | normal gone stale | shadow, least recently used first | normal, least recently used first

Nothing goes stale by default, which is the paper's order. There, on a pool full of finished requests that nothing will
hit again, any request that arrives evicts the shadows first, which are what will be hit next.

Blocks are ids. A member of the class is a block that shadow work allocated: it stays one while shadow work uses it and
while it is free, and leaves the class when something else takes it (eviction), when its content is dropped, or when a
normal request hits it (promotion).
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

CAP_SHARE = 0.25
"""Largest share of the pool (paper section 3.3)."""
COLD_SECONDS = 5.0
"""Idle time from which a cached block may be taken for shadow work (paper section 3.3)."""


class ShadowCache:
    """Keeps the order; the caller keeps reference counts and hashes. Not thread-safe.

    Raises KeyError for a block that is not free, and ValueError when more blocks are taken than there are.
    """

    def __init__(
        self, blocks: Iterable[int], cap: int, cold_seconds: float = COLD_SECONDS, stale_seconds: float = 0.0
    ) -> None:
        self._unhashed: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)
        # Values are the times the blocks were last used; no later block has an earlier one.
        self._shadow: OrderedDict[int, float] = OrderedDict()
        self._normal: OrderedDict[int, float] = OrderedDict()
        self._members: set[int] = set()
        self._cold_seconds = cold_seconds
        # Idle time from which normal blocks are stale; 0: never.
        self.stale_seconds = stale_seconds
        self._cap = cap
        # Keys only: in order, and never more of them than there are blocks.
        self._evicted: dict[int, None] = {}

    def __len__(self) -> int:
        """Free blocks."""
        return len(self._unhashed) + len(self._shadow) + len(self._normal)

    def __contains__(self, block: int) -> bool:
        """Whether a block is free."""
        return block in self._unhashed or block in self._shadow or block in self._normal

    @property
    def cap(self) -> int:
        """Most blocks the class may grow to."""
        return self._cap

    @property
    def size(self) -> int:
        """Blocks of the class, free or in use."""
        return len(self._members)

    @property
    def members(self) -> Collection[int]:
        return self._members

    def order(self) -> list[int]:
        """All free blocks, the next to be reused first while none is stale."""
        return [*self._unhashed, *self._shadow, *self._normal]

    def take(self, count: int, now: float = 0.0) -> list[int]:
        """Blocks for normal work; `now` matters where blocks go stale."""
        if count > len(self):
            raise ValueError(f"{count} blocks asked for, {len(self)} free")
        taken = _pop(self._unhashed, count)
        if len(taken) == count:
            return taken
        cached = self._pop_stale(now, count - len(taken))
        cached += _pop(self._shadow, count - len(taken) - len(cached))
        cached += _pop(self._normal, count - len(taken) - len(cached))
        self._members.difference_update(cached)
        self._evict(cached)
        return taken + cached

    def room(self, now: float, *, apart_from: Collection[int] = (), most: int | None = None) -> int:
        """How many blocks shadow work may take now; `apart_from` are free blocks that it is about to use as they are.

        Free blocks without content and normal ones gone cold, up to the cap; and the class's own cold blocks. Counts no
        further than `most`, which is what makes it cheap in a large pool.
        """
        most = len(self) if most is None else most
        spared = frozenset(apart_from)
        growth = min(most, max(0, self._cap - self.size))
        unhashed = len(self._unhashed)
        if unhashed:
            unhashed -= sum(block in self._unhashed for block in spared)
        room = min(growth, unhashed)
        room += self._count_cold(self._normal, now, spared, growth - room)
        return room + self._count_cold(self._shadow, now, spared, most - room)

    def take_for_shadow(self, count: int, now: float) -> list[int]:
        """Blocks for shadow work, which makes them members; raises ValueError for more than `room` says."""
        if count > self.room(now, most=count):
            raise ValueError(f"{count} shadow blocks asked for, room for {self.room(now)}")
        taken = _pop(self._unhashed, min(count, max(0, self._cap - self.size)))
        # Its own cold blocks before those of normal work: recycling does not make the class larger.
        cached = _pop(self._shadow, self._count_cold(self._shadow, now, (), count - len(taken)))
        cached += _pop(self._normal, count - len(taken) - len(cached))
        self._evict(cached)
        taken += cached
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
        shadow, normal, members = self._shadow, self._normal, self._members
        for block in blocks:
            (shadow if block in members else normal)[block] = now
        self._shrink()

    def promote(self, blocks: Iterable[int], now: float) -> None:
        """A normal request hit these blocks: they are normal from now on, and free ones were used just now."""
        for block in blocks:
            if block in self._members:
                self._members.discard(block)
                if block in self._shadow:
                    del self._shadow[block]
                    self._normal[block] = now

    def expire(self, blocks: Iterable[int]) -> None:
        """Of these blocks, free members become cold and the next to be reused of their class, last ones first."""
        for block in blocks:
            if block in self._shadow:
                self._shadow[block] = -math.inf
                self._shadow.move_to_end(block, last=False)

    def set_cap(self, cap: int) -> None:
        """Change the cap; members beyond it leave the class once they are free, the least recently used first.

        They are reused before anything that is cached.
        """
        self._cap = cap
        self._shrink()

    def drain_evicted(self) -> list[int]:
        """Blocks whose cached content, shadow or normal, was given up since the last call; each once, oldest first.

        The content of blocks that `set_cap` put out of the class is given up at once: the caller forgets it.
        """
        evicted = list(self._evicted)
        self._evicted.clear()
        return evicted

    def _pop_stale(self, now: float, most: int) -> list[int]:
        """Normal blocks that were not used for so long that nothing is likely to hit them."""
        taken: list[int] = []
        before = now - self.stale_seconds if self.stale_seconds else -math.inf
        for block, used in self._normal.items():
            if len(taken) >= most or used >= before:
                break
            taken.append(block)
        for block in taken:
            del self._normal[block]
        return taken

    def _shrink(self) -> None:
        if self.size <= self._cap:
            return
        beyond = _pop(self._shadow, self.size - self._cap)
        self._members.difference_update(beyond)
        self._evict(beyond)
        self._unhashed.update(dict.fromkeys(beyond))

    def _evict(self, blocks: Iterable[int]) -> None:
        self._evicted.update(dict.fromkeys(blocks))

    def _count_cold(self, queue: OrderedDict[int, float], now: float, spared: Collection[int], most: int) -> int:
        count = 0
        # Oldest first, so the first warm one ends the count.
        for block, used in queue.items():
            if count >= most or now - used <= self._cold_seconds:
                break
            count += block not in spared
        return count


def _pop(queue: OrderedDict[int, Any], most: int) -> list[int]:
    return [queue.popitem(last=False)[0] for _ in range(min(most, len(queue)))]
