from pd_shadow.sim.host_tier import HostTier


def test_spans_grow_downwards_as_a_context_is_given_up_from_its_end() -> None:
    host = HostTier(1000)
    host.spill(-1, 300, 400)
    host.spill(-1, 200, 300)
    assert host.held == 200
    assert host.end_of(-1, 200) == 400
    assert host.end_of(-1, 250) == 400


def test_a_span_behind_a_gap_is_of_no_use() -> None:
    host = HostTier(1000)
    host.spill(-1, 300, 400)
    assert host.end_of(-1, 299) == 299
    assert host.end_of(-1, 500) == 500


def test_the_least_recently_spilled_is_dropped_first() -> None:
    host = HostTier(250)
    host.spill(-1, 0, 100)
    host.spill(-2, 0, 100)
    host.spill(-3, 0, 100)
    assert host.end_of(-1, 0) == 0
    assert host.end_of(-2, 0) == 100
    assert host.held == 200


def test_what_is_larger_than_all_of_it_is_not_kept() -> None:
    host = HostTier(250)
    host.spill(-1, 0, 100)
    host.spill(-2, 0, 300)
    assert host.end_of(-2, 0) == 0
    assert host.end_of(-1, 0) == 100


def test_a_rewritten_history_is_cut() -> None:
    host = HostTier(1000)
    host.spill(-1, 100, 400)
    host.truncate(-1, 250)
    assert host.end_of(-1, 100) == 250
    assert host.held == 150
    host.truncate(-1, 50)
    assert host.end_of(-1, 100) == 100
    assert host.held == 0
