from pd_shadow.engine.outbox import Coverage, News, Outbox


def test_the_newest_coverage_of_a_session_wins_and_goes_out_once() -> None:
    outbox = Outbox()
    for tokens in (128, 256, 384):
        outbox.put("s", tokens, evicted=False)
    outbox.put("other", 128, evicted=False)
    assert outbox.take() == News(False, [Coverage("s", 384, False), Coverage("other", 128, False)])
    assert outbox.take() == News(False, [])


def test_an_eviction_stays_one_until_it_was_told() -> None:
    outbox = Outbox()
    outbox.put("s", 128, evicted=True)
    outbox.put("s", 256, evicted=False)
    assert outbox.take().coverage == [Coverage("s", 256, True)]
    outbox.put("s", 384, evicted=False)
    assert outbox.take().coverage == [Coverage("s", 384, False)]


def test_a_cleared_cache_outdates_what_was_said_before_it() -> None:
    outbox = Outbox()
    outbox.put("s", 512, evicted=False)
    outbox.reset()
    outbox.put("s", 128, evicted=False)
    assert outbox.take() == News(True, [Coverage("s", 128, False)])
    assert outbox.resident() == {"s": 128}


def test_sessions_that_wait_are_capped_and_the_oldest_news_go_first() -> None:
    outbox = Outbox(pending=2)
    for session in ("a", "b", "a", "c"):
        outbox.put(session, 128, evicted=False)
    assert [coverage.session for coverage in outbox.take().coverage] == ["a", "c"]
    assert outbox.forgotten == 1


def test_what_a_new_hello_needs_is_remembered_for_the_latest_sessions_that_hold_something() -> None:
    outbox = Outbox(resident=2)
    for session, tokens in (("a", 128), ("b", 128), ("c", 128), ("b", 256), ("d", 128), ("d", 0)):
        outbox.put(session, tokens, evicted=True)
    outbox.take()
    assert outbox.resident() == {"b": 256}
