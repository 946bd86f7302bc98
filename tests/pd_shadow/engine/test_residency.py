"""Whose context a block holds."""

from pd_shadow.engine.residency import Residency


def test_an_eviction_leaves_what_comes_before_it() -> None:
    residency = Residency(16)
    residency.hold("/a", [4, 7, 9])
    residency.hold("/b", [1, 2])
    assert residency.evicted([9, 7]) == {"/a": 16}
    assert residency.evicted([1, 99]) == {"/b": 0}
    assert residency.blocks("/a") == [4]
    assert residency.blocks("/b") == [2]


def test_a_block_belongs_to_the_last_session_that_used_it() -> None:
    residency = Residency(16)
    residency.hold("/a", [4, 7])
    residency.hold("/b", [4])
    assert residency.blocks("/a") == [7]
    assert residency.evicted([4]) == {"/b": 0}
    assert len(residency) == 1


def test_each_eviction_is_told_once_and_a_reset_forgets_all() -> None:
    residency = Residency(16)
    residency.hold("/a", [4, 7])
    assert residency.evicted([7]) == {"/a": 16}
    assert residency.evicted([7]) == {}
    residency.clear()
    assert residency.evicted([4]) == {}
