from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_shadow.policy.shadow_cache import ShadowCache

BLOCKS = 12
COLD = 5.0


def cache(blocks: int = 8, cap: int = 4) -> ShadowCache:
    return ShadowCache(range(blocks), cap, COLD)


def test_free_blocks_in_order_unhashed_then_shadow_then_normal() -> None:
    pool = cache()
    shadow, normal = pool.take_for_shadow(2, 0.0), pool.take(2)
    pool.free_hashed(reversed(normal), 1.0)
    pool.free_hashed(reversed(shadow), 2.0)
    assert pool.order() == [4, 5, 6, 7, 1, 0, 3, 2]
    assert pool.take(7) == [4, 5, 6, 7, 1, 0, 3]
    assert pool.order() == [2]


def test_normal_blocks_gone_stale_give_way_before_shadow_ones() -> None:
    pool = ShadowCache(range(6), 4, COLD, stale_seconds=10.0)
    shadow, normal = pool.take_for_shadow(2, 0.0), pool.take(4, 0.0)
    pool.free_hashed(normal[:2], 1.0)
    pool.free_hashed(normal[2:], 9.0)
    pool.free_hashed(shadow, 2.0)
    assert pool.take(3, 12.0) == [*normal[:2], shadow[0]]
    assert pool.drain_evicted() == [*normal[:2], shadow[0]]
    assert pool.take(2, 12.0) == [shadow[1], normal[2]]


def test_blocks_without_content_go_to_the_front_in_the_order_given() -> None:
    pool = cache(blocks=4)
    taken = pool.take(2)
    pool.free_unhashed(taken)
    assert pool.order() == [0, 1, 2, 3]


def test_blocks_are_taken_all_or_none() -> None:
    pool = cache(blocks=4)
    with pytest.raises(ValueError, match="5 blocks asked for, 4 free"):
        pool.take(5)
    with pytest.raises(ValueError, match="5 shadow blocks asked for, room for 4"):
        pool.take_for_shadow(5, 0.0)
    assert pool.order() == [0, 1, 2, 3]
    assert not pool.members


def test_only_a_free_block_can_be_removed() -> None:
    pool = cache(blocks=2)
    pool.remove(1)
    assert 1 not in pool
    assert 0 in pool
    with pytest.raises(KeyError):
        pool.remove(1)


def test_the_class_grows_to_its_cap_and_no_further() -> None:
    pool = cache(cap=3)
    assert pool.room(0.0) == 3
    pool.take_for_shadow(2, 0.0)
    assert (pool.size, pool.room(0.0)) == (2, 1)
    pool.take_for_shadow(1, 0.0)
    assert (pool.size, pool.room(0.0)) == (3, 0)


def test_at_its_cap_the_class_recycles_its_own_blocks_once_they_are_cold() -> None:
    pool = cache(cap=3)
    pool.free_hashed(pool.take_for_shadow(3, 0.0), 10.0)
    assert pool.room(15.0) == 0
    assert pool.room(15.1) == 3
    assert pool.take_for_shadow(2, 15.1) == [0, 1]
    assert pool.size == 3
    assert pool.drain_evicted() == [0, 1]


def test_normal_blocks_are_taken_once_they_are_cold_oldest_first_and_last_of_all() -> None:
    pool = cache(blocks=6, cap=6)
    normal = pool.take(4)
    pool.free_hashed(normal[:2], 0.0)
    pool.free_hashed(normal[2:], 4.0)
    assert pool.room(5.0) == 2
    assert pool.room(5.1) == 4
    assert pool.take_for_shadow(3, 5.1) == [4, 5, 0]
    assert pool.drain_evicted() == [0]
    assert pool.room(5.1) == 1
    assert set(pool.members) == {0, 4, 5}


def test_a_warm_block_of_the_class_is_left_alone_for_a_cold_normal_one() -> None:
    pool = cache(blocks=3, cap=3)
    normal, shadow = pool.take(1), pool.take_for_shadow(2, 0.0)
    pool.free_hashed(normal, 0.0)
    pool.free_hashed(shadow, 3.0)
    assert pool.take_for_shadow(1, 6.0) == normal


def test_room_counts_no_further_than_asked() -> None:
    pool = cache(blocks=6, cap=4)
    shadow, normal = pool.take_for_shadow(2, 0.0), pool.take(2)
    pool.free_hashed([*shadow, *normal], 0.0)
    # Two of its own, and of the other four as many as the cap leaves.
    assert [pool.room(9.0, most=most) for most in (None, 5, 4, 3, 2, 1, 0)] == [4, 4, 4, 3, 2, 1, 0]


def test_blocks_about_to_be_used_as_they_are_give_no_room() -> None:
    pool = cache(blocks=6, cap=6)
    shadow, normal = pool.take_for_shadow(2, 0.0), pool.take(2)
    pool.free_hashed([*shadow, *normal], 0.0)
    assert pool.room(9.0) == 6
    assert pool.room(9.0, apart_from=[shadow[0], normal[1], 5]) == 3


def test_a_normal_hit_promotes() -> None:
    pool = cache(blocks=4, cap=2)
    shadow = pool.take_for_shadow(2, 0.0)
    pool.free_hashed(shadow, 0.0)
    pool.remove(shadow[0])
    pool.promote([shadow[0], 3], 1.0)
    assert set(pool.members) == {shadow[1]}
    pool.free_hashed([shadow[0]], 2.0)
    assert pool.order() == [2, 3, shadow[1], shadow[0]]
    assert pool.drain_evicted() == []


def test_a_promoted_free_block_is_as_recent_as_its_hit() -> None:
    pool = cache(blocks=3, cap=3)
    shadow, normal = pool.take_for_shadow(1, 0.0), pool.take(2)
    pool.free_hashed(shadow, 0.0)
    pool.free_hashed(normal, 3.0)
    pool.promote(shadow, 4.0)
    assert pool.order() == [*normal, *shadow]
    assert pool.room(8.5) == 2
    assert pool.room(9.5) == 3


def test_content_given_up_to_normal_work_is_reported_of_either_class() -> None:
    pool = cache(blocks=3)
    shadow, normal = pool.take_for_shadow(1, 0.0), pool.take(1)
    pool.free_hashed([*shadow, *normal], 0.0)
    assert pool.take(3) == [2, *shadow, *normal]
    assert pool.drain_evicted() == [*shadow, *normal]
    assert pool.drain_evicted() == []
    assert pool.size == 0


def test_blocks_in_use_again_or_without_content_are_not_reported() -> None:
    pool = cache(blocks=2)
    kept, dropped = pool.take_for_shadow(2, 0.0)
    pool.free_hashed([kept], 0.0)
    pool.remove(kept)
    pool.free_unhashed([dropped])
    assert pool.take(1) == [dropped]
    assert pool.drain_evicted() == []


def test_a_report_nobody_fetches_holds_each_block_once() -> None:
    pool = cache(blocks=2)
    for _ in range(3):
        pool.free_hashed(pool.take(2), 0.0)
    assert pool.drain_evicted() == [0, 1]


def test_a_lower_cap_puts_out_free_members_at_once_and_others_when_they_are_freed() -> None:
    pool = cache(blocks=8, cap=6)
    shadow = pool.take_for_shadow(5, 0.0)
    pool.free_hashed(shadow[:2], 0.0)
    pool.set_cap(1)
    assert pool.cap == 1
    assert pool.order() == [5, 6, 7, shadow[0], shadow[1]]
    assert (pool.size, pool.room(0.0)) == (3, 0)
    pool.free_hashed(shadow[2:], 1.0)
    assert (pool.size, pool.room(1.0)) == (1, 0)
    assert pool.order()[-1] == shadow[4]
    assert pool.drain_evicted() == shadow[:4]
    # The class goes on within the new cap instead of waiting for normal work to need its blocks.
    assert pool.room(6.1) == 1


class Cached(NamedTuple):
    """What the reference model knows of a free block; `used` None without content."""

    shadow: bool
    used: float | None


class ShadowCacheMachine(RuleBasedStateMachine):
    """ShadowCache against a list of the free blocks, sorted anew by what the order is defined by."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        # In the order they were freed in; blocks that are missing are in use.
        self.free: dict[int, Cached] = {block: Cached(False, None) for block in range(BLOCKS)}
        self.members: set[int] = set()
        self.evicted: set[int] = set()

    @initialize(cap=st.integers(0, BLOCKS))
    def create(self, cap: int) -> None:
        self.cap = cap
        self.cache = ShadowCache(range(BLOCKS), cap, COLD)

    def order(self) -> list[int]:
        def rank(block: int) -> tuple[int, float]:
            shadow, used = self.free[block]
            return (0, 0.0) if used is None else (1 if shadow else 2, used)

        # The sort keeps blocks of one rank in the order they were freed in.
        return sorted(self.free, key=rank)

    def unhashed(self) -> list[int]:
        return [block for block in self.order() if self.free[block].used is None]

    def cached(self, *, shadow: bool, cold: bool) -> list[int]:
        return [
            block
            for block in self.order()
            for is_shadow, used in [self.free[block]]
            if used is not None and is_shadow is shadow and (self.now - used > COLD) is cold
        ]

    def room(self) -> int:
        others = len(self.unhashed()) + len(self.cached(shadow=False, cold=True))
        return min(others, max(0, self.cap - len(self.members))) + len(self.cached(shadow=True, cold=True))

    def hand_over(self, blocks: list[int]) -> None:
        self.evicted.update(block for block in blocks if self.free.pop(block).used is not None)

    def in_use(self, data: st.DataObject) -> list[int]:
        used = sorted(set(range(BLOCKS)) - self.free.keys())
        return data.draw(st.lists(st.sampled_from(used), unique=True), label="blocks")

    def shrink(self) -> None:
        free = [block for block in self.order() if self.free[block].shadow]
        beyond = free[: max(0, len(self.members) - self.cap)]
        self.members.difference_update(beyond)
        self.hand_over(beyond)
        self.free.update(dict.fromkeys(beyond, Cached(False, None)))

    @rule(seconds=st.sampled_from([0.5, COLD / 2, COLD, 1.5 * COLD]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)), label="count")
        expected = self.order()[:count]
        assert self.cache.take(count) == expected
        self.members.difference_update(expected)
        self.hand_over(expected)

    @rule(more=st.integers(1, 3))
    def take_too_many(self, more: int) -> None:
        with pytest.raises(ValueError, match="free"):
            self.cache.take(len(self.free) + more)

    @rule(data=st.data())
    def take_for_shadow(self, data: st.DataObject) -> None:
        # All that there is room for is as likely as all smaller numbers together.
        count = data.draw(st.just(self.room()) | st.integers(0, self.room()), label="count")
        cold = [*self.cached(shadow=True, cold=True), *self.cached(shadow=False, cold=True)]
        expected = [*self.unhashed()[: max(0, self.cap - len(self.members))], *cold][:count]
        warm = {*self.cached(shadow=True, cold=False), *self.cached(shadow=False, cold=False)}
        size = self.cache.size
        taken = self.cache.take_for_shadow(count, self.now)
        assert taken == expected
        assert not warm.intersection(taken)
        assert self.cache.size <= max(self.cap, size)
        self.members.update(expected)
        self.hand_over(expected)

    @rule(more=st.integers(1, 3))
    def take_too_many_for_shadow(self, more: int) -> None:
        with pytest.raises(ValueError, match="room"):
            self.cache.take_for_shadow(self.room() + more, self.now)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.free)), label="block")
        self.cache.remove(block)
        del self.free[block]

    @precondition(lambda self: len(self.free) < BLOCKS)
    @rule(data=st.data())
    def remove_in_use(self, data: st.DataObject) -> None:
        for block in self.in_use(data):
            with pytest.raises(KeyError):
                self.cache.remove(block)

    @precondition(lambda self: len(self.free) < BLOCKS)
    @rule(data=st.data())
    def free_unhashed(self, data: st.DataObject) -> None:
        blocks = self.in_use(data)
        self.cache.free_unhashed(blocks)
        self.members.difference_update(blocks)
        self.free = {**dict.fromkeys(blocks, Cached(False, None)), **self.free}

    @precondition(lambda self: len(self.free) < BLOCKS)
    @rule(data=st.data(), everything=st.booleans())
    def free_hashed(self, data: st.DataObject, everything: bool) -> None:
        blocks = [block for block in range(BLOCKS) if block not in self.free] if everything else self.in_use(data)
        self.cache.free_hashed(blocks, self.now)
        self.free.update((block, Cached(block in self.members, self.now)) for block in blocks)
        self.shrink()

    @rule(blocks=st.sets(st.integers(0, BLOCKS - 1)))
    def promote(self, blocks: set[int]) -> None:
        hit = sorted(blocks)
        self.cache.promote(hit, self.now)
        for block in hit:
            if block in self.members & self.free.keys():
                del self.free[block]
                self.free[block] = Cached(False, self.now)
        self.members.difference_update(hit)

    @rule(cap=st.integers(0, BLOCKS))
    def set_cap(self, cap: int) -> None:
        self.cap = cap
        self.cache.set_cap(cap)
        self.shrink()

    @rule()
    def drain_evicted(self) -> None:
        drained = self.cache.drain_evicted()
        assert len(drained) == len(set(drained))
        assert set(drained) == self.evicted
        self.evicted.clear()

    @rule(blocks=st.sets(st.integers(0, BLOCKS - 1)), most=st.integers(0, BLOCKS))
    def room_apart_from_some_is_the_room_without_them(self, blocks: set[int], most: int) -> None:
        free = self.free
        self.free = {block: cached for block, cached in free.items() if block not in blocks}
        assert self.cache.room(self.now, apart_from=blocks & free.keys()) == self.room()
        assert self.cache.room(self.now, apart_from=blocks & free.keys(), most=most) == min(most, self.room())
        self.free = free

    @invariant()
    def free_blocks_are_in_order_and_each_is_there_once(self) -> None:
        order = self.cache.order()
        assert order == self.order()
        assert len(order) == len(set(order)) == len(self.cache)
        assert [block for block in range(BLOCKS) if block in self.cache] == sorted(order)

    @invariant()
    def the_class_is_what_the_model_says_and_within_its_cap_unless_in_use(self) -> None:
        assert set(self.cache.members) == self.members
        assert self.cache.size == len(self.members)
        assert self.cache.size <= self.cap or not self.members & self.free.keys()

    @invariant()
    def there_is_as_much_room_as_the_model_says(self) -> None:
        assert self.cache.room(self.now) == self.room()


TestShadowCache = ShadowCacheMachine.TestCase
TestShadowCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
