"""The KV pool of one instance: contexts of sessions, which later calls extend, and of requests that end.

Blocks are managed by the product's own shadow class (pd_shadow/policy/shadow_cache.py); only their size differs from
an engine's, since a simulated block is an accounting unit. Hits are exact in tokens: a context knows its length.
"""

import itertools
from collections.abc import Iterable
from enum import StrEnum

from pd_shadow.policy.shadow_cache import ShadowCache
from pd_shadow.sim.host_tier import HostTier

BLOCK_TOKENS = 256
# Finished requests are nobody's context; where they are evicted as a whole, they have one with a number like this.
_FIRST_ANONYMOUS = 1 << 40


class EvictionUnit(StrEnum):
    """How much goes when room is made. The paper speaks of entries; vLLM evicts blocks."""

    BLOCKS = "blocks"
    # A whole session context, or what shadow work added to it, or a whole finished request.
    ENTRIES = "entries"


class Context:
    """The KV of one session that an instance holds: `tokens` from the beginning, in `blocks`.

    The first `normal` of these blocks are not of the shadow class.
    """

    __slots__ = ("blocks", "normal", "tokens")

    def __init__(self, blocks: list[int], tokens: int, normal: int) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.normal = normal


class Lease:
    """Blocks in use by one request, and how much of its prompt was found in them or in host memory."""

    __slots__ = ("blocks", "cached", "loaded")

    def __init__(self, blocks: list[int], cached: int, loaded: int) -> None:
        self.blocks = blocks
        # Tokens found in the pool, and further ones that come from host memory.
        self.cached = cached
        self.loaded = loaded


class KvPool:
    """Not thread-safe. A session has one request at a time here, which takes its context over."""

    def __init__(
        self,
        tokens: int,
        *,
        cap_share: float,
        cold_seconds: float,
        stale_seconds: float = 0.0,
        keeps_finished: bool = True,
        evicts: EvictionUnit = EvictionUnit.BLOCKS,
        extensions_are_normal: bool = False,
        host: HostTier | None = None,
    ) -> None:
        """`keeps_finished`: requests without a session stay cached, too, until their blocks are taken.

        `extensions_are_normal`: what shadow work adds to a context that a call left is evicted with it, not before it.

        Raises ValueError for a pool without a block.
        """
        count = tokens // BLOCK_TOKENS
        if count < 1:
            raise ValueError(f"a KV pool of {tokens} tokens holds no block of {BLOCK_TOKENS}")
        self.blocks = count
        self.cap_share = cap_share
        self.cache = ShadowCache(range(count), int(cap_share * count), cold_seconds, stale_seconds)
        self.host = host
        self._keeps_finished = keeps_finished
        self._evicts = evicts
        self._extensions_are_normal = extensions_are_normal
        self._anonymous = itertools.count(_FIRST_ANONYMOUS)
        self._contexts: dict[int, Context] = {}
        # Which context a cached block belongs to, and its place in it.
        self._owners: dict[int, tuple[int, int]] = {}

    @property
    def capacity_tokens(self) -> int:
        """The longest request, prompt and output, that there can be room for."""
        return self.blocks * BLOCK_TOKENS

    @property
    def free_blocks(self) -> int:
        """Blocks that no request uses, cached ones included."""
        return len(self.cache)

    def tokens(self, context: int) -> int:
        """Tokens held of a session in the pool."""
        found = self._contexts.get(context)
        return 0 if found is None else found.tokens

    def reach(self, context: int) -> int:
        """Tokens held of a session in the pool and, without a gap, in host memory."""
        held = self.tokens(context)
        return held if self.host is None else self.host.end_of(context, held)

    def reserve(self, context: int | None, reusable: int, total: int, now: float) -> Lease | None:
        """Room for a request of `total` tokens, of which up to `reusable` may be found; None if there is none now.

        Raises ValueError for one that the whole pool has no room for: it would wait for ever, and all behind it.
        """
        found = self._contexts.get(context) if context is not None else None
        cached = min(found.tokens, reusable) if found is not None else 0
        kept = found.blocks[: -(-cached // BLOCK_TOKENS)] if found is not None else []
        needed = max(0, -(-total // BLOCK_TOKENS) - len(kept))
        if needed > len(self.cache) - len(kept):
            if total > self.capacity_tokens:
                raise ValueError(f"a request of {total} tokens does not fit into a KV pool of {self.capacity_tokens}")
            return None
        loaded = 0
        if context is not None:
            if self.host is not None:
                loaded = max(0, min(self.host.end_of(context, cached), reusable) - cached)
            if found is not None:
                self._leave(context)
                for block in kept:
                    self.cache.remove(block)
                self.cache.promote(kept, now)
        blocks = kept + self.cache.take(needed, now)
        self._note_evictions()
        return Lease(blocks, cached, loaded)

    def release(self, lease: Lease, context: int | None, tokens: int, now: float) -> None:
        """A request has ended and leaves `tokens` of KV, reusable by its session if it has one."""
        used = -(-tokens // BLOCK_TOKENS) if context is not None or self._keeps_finished else 0
        blocks = lease.blocks[:used]
        if len(lease.blocks) > used:
            self.cache.free_unhashed(lease.blocks[used:])
        # The end of a context is given up first.
        self.cache.free_hashed(reversed(blocks), now)
        if context is None and blocks and self._evicts is EvictionUnit.ENTRIES:
            context = next(self._anonymous)
        if context is not None:
            self._enter(context, Context(blocks, tokens, len(blocks)))

    def truncate(self, context: int, tokens: int) -> None:
        """The session's history was rewritten after so many tokens: what lies behind is of no use."""
        found = self._contexts.get(context)
        if found is not None and found.tokens > tokens:
            kept = -(-tokens // BLOCK_TOKENS)
            self._drop(found.blocks[kept:])
            if kept:
                self._cut(found, kept, tokens)
            else:
                del self._contexts[context]
        if self.host is not None:
            self.host.truncate(context, tokens)

    def shadow_room(self, context: int, now: float, most: int) -> int:
        """How many tokens shadow work may add to a session's context, counted no further than `most`."""
        found = self._contexts.get(context)
        spare = 0 if found is None else len(found.blocks) * BLOCK_TOKENS - found.tokens
        blocks = -(-max(0, most - spare) // BLOCK_TOKENS)
        if not blocks:
            return most
        apart = () if found is None else found.blocks
        return min(most, spare + self.cache.room(now, apart_from=apart, most=blocks) * BLOCK_TOKENS)

    def grow_shadow(self, context: int, start: int, tokens: int, now: float) -> int:
        """Shadow work computed or fetched tokens behind the first `start` of a session; returns how many are kept.

        Fewer than `tokens` without room for all, and none when the context no longer ends at `start`.
        """
        tokens = self.shadow_room(context, now, tokens) if self.tokens(context) == start else 0
        if not tokens:
            return 0
        found = self._contexts.get(context)
        if found is None:
            found = Context([], 0, 0)
        else:
            self._leave(context)
            for block in found.blocks:
                self.cache.remove(block)
        needed = -(-(found.tokens + tokens) // BLOCK_TOKENS) - len(found.blocks)
        added = self.cache.take_for_shadow(needed, now)
        normal = found.normal
        if self._extensions_are_normal and normal:
            self.cache.promote(added, now)
            normal += len(added)
        blocks = found.blocks + added
        self._note_evictions()
        self.cache.free_hashed(reversed(blocks), now)
        self._enter(context, Context(blocks, found.tokens + tokens, normal))
        # Blocks over the cap leave the class when they are freed.
        self._note_evictions()
        return tokens

    def _enter(self, context: int, found: Context) -> None:
        # A shadow may have grown here meanwhile, when the session's call was placed elsewhere.
        before = self._contexts.get(context)
        if before is not None:
            self._leave(context)
            self._drop(before.blocks)
        self._contexts[context] = found
        owners = self._owners
        for place, block in enumerate(found.blocks):
            owners[block] = (context, place)

    def _leave(self, context: int) -> None:
        for block in self._contexts.pop(context).blocks:
            del self._owners[block]

    @staticmethod
    def _cut(found: Context, blocks: int, tokens: int) -> None:
        found.blocks, found.tokens, found.normal = found.blocks[:blocks], tokens, min(found.normal, blocks)

    def _drop(self, blocks: Iterable[int]) -> None:
        """Free cached blocks lose their content."""
        dropped = list(blocks)
        for block in dropped:
            self._owners.pop(block, None)
            self.cache.remove(block)
        self.cache.free_unhashed(dropped)

    def _note_evictions(self) -> None:
        owners = self._owners
        for block in [evicted for evicted in self.cache.drain_evicted() if evicted in owners]:
            owner = owners.get(block)
            if owner is None:
                continue
            context, place = owner
            found = self._contexts[context]
            if self._evicts is EvictionUnit.ENTRIES:
                place = found.normal if place >= found.normal else 0
            left = place * BLOCK_TOKENS
            if self.host is not None:
                self.host.spill(context, left, found.tokens)
            lost = found.blocks[place:]
            for gone in lost:
                del owners[gone]
            # The rest of it that was not taken yet is of no use without it.
            behind = [gone for gone in lost if gone in self.cache]
            for gone in behind:
                self.cache.remove(gone)
            self.cache.free_unhashed(behind)
            if place:
                self._cut(found, place, left)
            else:
                del self._contexts[context]
