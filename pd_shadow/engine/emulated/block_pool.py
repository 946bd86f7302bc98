"""The KV blocks of one instance: reference counts, prefix hashes, and what is in them.

The order in which free blocks are reused is the product's shadow class (policy/shadow_cache.py). A block's content
stands for its KV: a digest of the content of the block before it and of its own tokens, or what a transfer brought.
Tokens are generated from contents, so that KV in the wrong place changes what an engine says.
"""

import hashlib
from collections.abc import Iterable, Sequence

from pd_shadow.policy.shadow_cache import ShadowCache

HASH_ALGORITHM = "blake2b"
"""Of prefix hashes; P and D must agree on it."""

Content = bytes
CONTENT_BYTES = 16
NOTHING: Content = b""


def content_of(before: Content, tokens: bytes) -> Content:
    """What a block of these tokens (four bytes each) holds behind one with that content."""
    return hashlib.blake2b(before + tokens, digest_size=CONTENT_BYTES).digest()


def root_hash(salt: str) -> bytes:
    """What the hash of a prefix begins with: contexts under different salts share no block."""
    return hashlib.blake2b(salt.encode("utf-8", "replace"), digest_size=CONTENT_BYTES).digest()


class BlockPool:
    """Not thread-safe. Times are the engine's clock, in seconds."""

    def __init__(self, blocks: int, *, cap: int, cold_seconds: float, stale_seconds: float) -> None:
        self.size = blocks
        self.cache = ShadowCache(range(blocks), cap, cold_seconds, stale_seconds)
        self.content: list[Content] = [NOTHING] * blocks
        self._references = [0] * blocks
        self._hashes: list[bytes | None] = [None] * blocks
        self._cached: dict[bytes, int] = {}
        self._evicted: list[int] = []

    @property
    def used(self) -> int:
        """Blocks that something holds."""
        return self.size - len(self.cache)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of these hashes."""
        found = []
        for each in hashes:
            block = self._cached.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, hits: Sequence[int], fresh: int, now: float) -> list[int] | None:
        """Hold cached blocks and so many new ones for normal work; None, and nothing held, without room."""
        free = [block for block in hits if block in self.cache]
        if fresh > len(self.cache) - len(free):
            return None
        for block in free:
            self.cache.remove(block)
        self.cache.promote(hits, now)
        return self._hold(hits, self.cache.take(fresh, now))

    def take_for_shadow(self, hits: Sequence[int], fresh: int, now: float) -> list[int] | None:
        """The same for shadow work, out of its class."""
        if fresh > self.shadow_room(hits, now, fresh):
            return None
        for block in hits:
            if block in self.cache:
                self.cache.remove(block)
        return self._hold(hits, self.cache.take_for_shadow(fresh, now))

    def shadow_room(self, hits: Sequence[int], now: float, most: int) -> int:
        """Blocks shadow work may take beside the hits, counted no further than `most`."""
        return self.cache.room(now, apart_from=[block for block in hits if block in self.cache], most=most)

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold cached blocks as they are, in whatever class they are."""
        for block in blocks:
            if block in self.cache:
                self.cache.remove(block)
        self._hold(blocks, [])

    def publish(self, block: int, prefix_hash: bytes) -> None:
        """A held block is whole: it can be found from now on, unless an equal one is there already."""
        if self._hashes[block] is None and prefix_hash not in self._cached:
            self._hashes[block] = prefix_hash
            self._cached[prefix_hash] = block

    def release(self, blocks: Sequence[int], now: float) -> None:
        """Let go of blocks, in the order of their context: its end is given up first."""
        hashed: list[int] = []
        unhashed: list[int] = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                (unhashed if self._hashes[block] is None else hashed).append(block)
        self.cache.free_unhashed(unhashed)
        self.cache.free_hashed(hashed, now)
        self._forget()

    def set_cap(self, cap: int) -> None:
        """Change the size of the shadow class."""
        self.cache.set_cap(cap)
        self._forget()

    def drain_evicted(self) -> list[int]:
        """Blocks whose cached content was given up since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _hold(self, hits: Sequence[int], fresh: list[int]) -> list[int]:
        self._forget()
        blocks = [*hits, *fresh]
        for block in fresh:
            self.content[block] = NOTHING
        for block in blocks:
            self._references[block] += 1
        return blocks

    def _forget(self) -> None:
        for block in self.cache.drain_evicted():
            known = self._hashes[block]
            if known is not None:
                self._hashes[block] = None
                del self._cached[known]
                self._evicted.append(block)
