from pd_shadow.common.backoff import Backoff


def test_waits_double_up_to_the_most_until_a_try_goes_well() -> None:
    backoff = Backoff(1.0, 5.0, rng=lambda: 0.0)
    assert [backoff.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next() == 1.0


def test_jitter_cuts_up_to_half() -> None:
    draws = iter([0.0, 0.5, 1.0])
    backoff = Backoff(8.0, 8.0, rng=lambda: next(draws))
    assert [backoff.next() for _ in range(3)] == [8.0, 6.0, 4.0]
