"""The KV pool against what it must keep to, and random histories of a session's life in it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_shadow.sim.host_tier import HostTier
from pd_shadow.sim.kv_pool import BLOCK_TOKENS, EvictionUnit, KvPool, Lease

B = BLOCK_TOKENS
SESSION = -1


def pool(
    blocks: int = 8,
    *,
    cap_share: float = 0.5,
    cold_seconds: float = 5.0,
    evicts: EvictionUnit = EvictionUnit.BLOCKS,
    extensions_are_normal: bool = False,
    host: HostTier | None = None,
) -> KvPool:
    return KvPool(
        blocks * B,
        cap_share=cap_share,
        cold_seconds=cold_seconds,
        evicts=evicts,
        extensions_are_normal=extensions_are_normal,
        host=host,
    )


def served(kv: KvPool, context: int | None, tokens: int, now: float, reusable: int = 0) -> Lease:
    lease = kv.reserve(context, reusable, tokens, now)
    assert lease is not None
    kv.release(lease, context, tokens, now)
    return lease


def test_a_later_call_finds_exactly_what_the_earlier_one_left() -> None:
    kv = pool()
    served(kv, SESSION, 300, 0.0)
    assert kv.tokens(SESSION) == 300
    lease = served(kv, SESSION, 700, 1.0, reusable=300)
    assert lease.cached == 300
    assert kv.tokens(SESSION) == 700


def test_no_more_is_found_than_the_call_shares() -> None:
    kv = pool()
    served(kv, SESSION, 700, 0.0)
    lease = kv.reserve(SESSION, 257, 800, 1.0)
    assert lease is not None
    assert lease.cached == 257


def test_a_request_waits_for_room_and_takes_nothing_meanwhile() -> None:
    kv = pool(4)
    served(kv, SESSION, 2 * B, 0.0)
    held = kv.reserve(None, 0, 2 * B, 1.0)
    assert held is not None
    assert kv.reserve(SESSION, 2 * B, 3 * B, 2.0) is None
    assert kv.tokens(SESSION) == 2 * B
    kv.release(held, None, 2 * B, 3.0)
    assert kv.free_blocks == 4


def test_a_request_that_can_never_fit_is_an_error() -> None:
    kv = pool(4)
    assert kv.capacity_tokens == 4 * B
    with pytest.raises(ValueError, match=f"a request of {4 * B + 1} tokens does not fit into a KV pool of {4 * B}"):
        kv.reserve(SESSION, 0, 4 * B + 1, 0.0)
    assert kv.reserve(SESSION, 0, 4 * B, 0.0) is not None


def test_normal_work_evicts_the_shadow_first_and_from_its_end() -> None:
    kv = pool(8)
    served(kv, -2, 2 * B, 0.0)
    assert kv.grow_shadow(SESSION, 0, 4 * B, 1.0) == 4 * B
    assert kv.reserve(None, 0, 4 * B, 2.0) is not None
    assert kv.tokens(SESSION) == 2 * B
    assert kv.tokens(-2) == 2 * B


def test_the_shadow_class_takes_free_and_cold_blocks_up_to_its_cap() -> None:
    kv = pool(8, cap_share=0.5)
    served(kv, -2, 6 * B, 0.0)
    # Two blocks are free, six are warm.
    assert kv.shadow_room(SESSION, 4.0, 8 * B) == 2 * B
    assert kv.shadow_room(SESSION, 6.0, 8 * B) == 4 * B
    assert kv.grow_shadow(SESSION, 0, 8 * B, 6.0) == 4 * B


def test_shadow_work_that_fits_nowhere_any_more_is_dropped() -> None:
    kv = pool()
    assert kv.grow_shadow(SESSION, 0, 100, 0.0) == 100
    assert kv.grow_shadow(SESSION, 50, 100, 0.0) == 0
    assert kv.tokens(SESSION) == 100


def test_a_call_makes_a_shadow_normal() -> None:
    kv = pool(8, cap_share=0.25)
    kv.grow_shadow(SESSION, 0, 2 * B, 0.0)
    assert kv.shadow_room(-2, 1.0, B) == 0
    served(kv, SESSION, 2 * B + 10, 1.0, reusable=2 * B)
    assert kv.shadow_room(-2, 1.0, B) == B


def test_a_rewritten_history_keeps_its_beginning() -> None:
    kv = pool(host=HostTier(100 * B))
    served(kv, SESSION, 4 * B, 0.0)
    kv.truncate(SESSION, B + 7)
    assert kv.tokens(SESSION) == kv.reach(SESSION) == B + 7
    kv.truncate(SESSION, 0)
    assert kv.reach(SESSION) == 0
    assert kv.free_blocks == 8


def test_what_is_evicted_is_found_in_host_memory() -> None:
    kv = pool(4, host=HostTier(100 * B))
    served(kv, SESSION, 3 * B, 0.0)
    served(kv, None, 3 * B, 1.0)
    assert kv.tokens(SESSION) == B
    assert kv.reach(SESSION) == 3 * B
    lease = kv.reserve(SESSION, 3 * B, 4 * B, 2.0)
    assert lease is not None
    assert (lease.cached, lease.loaded) == (B, 2 * B)


def test_entries_go_as_a_whole() -> None:
    kv = pool(8, evicts=EvictionUnit.ENTRIES)
    served(kv, SESSION, 3 * B, 0.0)
    served(kv, None, 4 * B, 1.0)
    served(kv, -2, 2 * B, 2.0)
    # One block was free, and one of the session's three was needed.
    assert kv.tokens(SESSION) == 0
    # The room that it leaves is used first, then a finished request's.
    served(kv, -3, 2 * B, 3.0)
    served(kv, -4, B, 4.0)
    served(kv, -5, 3 * B, 5.0)
    assert [kv.tokens(context) for context in (-2, -3, -4, -5)] == [2 * B, 2 * B, B, 3 * B]


@pytest.mark.parametrize("evicts", EvictionUnit)
def test_what_shadow_work_added_goes_before_what_a_call_left(evicts: EvictionUnit) -> None:
    kv = pool(8, evicts=evicts)
    served(kv, -2, 2 * B, 0.0)
    served(kv, SESSION, 2 * B, 1.0)
    assert kv.grow_shadow(SESSION, 2 * B, 2 * B, 2.0) == 2 * B
    served(kv, None, 3 * B, 3.0)
    assert kv.tokens(SESSION) == (3 if evicts is EvictionUnit.BLOCKS else 2) * B
    assert kv.tokens(-2) == 2 * B


def test_extensions_that_are_normal_go_with_what_they_extend() -> None:
    kv = pool(8, extensions_are_normal=True)
    served(kv, -2, 2 * B, 0.0)
    served(kv, SESSION, 2 * B, 1.0)
    assert kv.grow_shadow(SESSION, 2 * B, 2 * B, 2.0) == 2 * B
    assert kv.cache.size == 0
    served(kv, None, 3 * B, 3.0)
    assert kv.tokens(SESSION) == 4 * B
    assert kv.tokens(-2) == B
    # A shadow that extends nothing is one.
    kv.grow_shadow(-3, 0, B, 10.0)
    assert kv.cache.size == 1


def test_a_pool_without_a_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no block"):
        KvPool(B - 1, cap_share=0.25, cold_seconds=5)


class Life(RuleBasedStateMachine):
    """Calls and shadow work of a few sessions, and normal requests that push them out."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = pool(12)
        self.now = 0.0
        self.leases: list[tuple[Lease, int | None, int]] = []

    @initialize(evicts=st.sampled_from(EvictionUnit), extensions_are_normal=st.booleans())
    def choose(self, evicts: EvictionUnit, extensions_are_normal: bool) -> None:
        self.kv = pool(12, evicts=evicts, extensions_are_normal=extensions_are_normal, host=HostTier(10 * B))

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(context=st.sampled_from([None, -1, -2, -3]), total=st.integers(1, 6 * B), share=st.floats(0, 1))
    def begin(self, context: int | None, total: int, share: float) -> None:
        if context is not None and any(context == running for _, running, _ in self.leases):
            return
        before = 0 if context is None else self.kv.reach(context)
        lease = self.kv.reserve(context, int(share * total), total, self.now)
        if lease is None:
            return
        assert len(lease.blocks) >= -(-total // B)
        assert lease.cached + lease.loaded <= min(before, int(share * total))
        self.leases.append((lease, context, total))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease, context, total = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.kv.release(lease, context, total, self.now)
        if context is not None:
            assert self.kv.tokens(context) == total

    @rule(session=st.sampled_from([-1, -2, -3]), tokens=st.integers(1, 4 * B))
    def shadow(self, session: int, tokens: int) -> None:
        if any(session == running for _, running, _ in self.leases):
            return
        start = self.kv.tokens(session)
        room = self.kv.shadow_room(session, self.now, tokens)
        assert self.kv.grow_shadow(session, start, tokens, self.now) == room
        assert self.kv.tokens(session) == start + room

    @rule(session=st.sampled_from([-1, -2, -3]), tokens=st.integers(0, 6 * B))
    def rewrite(self, session: int, tokens: int) -> None:
        self.kv.truncate(session, tokens)
        assert self.kv.reach(session) <= tokens

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        used = [block for lease, _, _ in self.leases for block in lease.blocks]
        assert sorted([*used, *self.kv.cache.order()]) == list(range(self.kv.blocks))

    @invariant()
    def what_is_held_is_cached(self) -> None:
        for session in (-1, -2, -3):
            assert self.kv.reach(session) >= self.kv.tokens(session)
        assert sum(-(-self.kv.tokens(session) // B) for session in (-1, -2, -3)) <= self.kv.free_blocks

    @invariant()
    def the_class_keeps_its_cap(self) -> None:
        assert self.kv.cache.size <= self.kv.cache.cap


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
