"""The inbound link: one transfer at a time, normal ones in order, shadow chunks in the gaps."""

import pytest

from pd_shadow.sim.clock import Clock
from pd_shadow.sim.link import Link

RATE = 100.0


class Log:
    """A link, what ended on it when, and when it said that a shadow chunk may start."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ended: list[tuple[str, float]] = []
        self.idle: list[float] = []
        self.link = Link(self.clock, RATE, self.idle.append)

    def normal(self, name: str, size: float, at: float) -> None:
        self.clock.at(at, lambda now: self.link.normal(size, now, lambda end: self.ended.append((name, end))))

    def shadow(self, name: str, size: float, at: float) -> None:
        self.clock.at(at, lambda now: self.link.shadow(size, now, lambda end: self.ended.append((name, end))))

    def run(self) -> None:
        self.clock.run(lambda: False)


def test_normal_transfers_take_their_turn_at_the_full_rate() -> None:
    log = Log()
    log.normal("one", 200, 0.0)
    log.normal("two", 100, 0.5)
    log.normal("late", 100, 10.0)
    log.run()
    assert log.ended == [("one", 2.0), ("two", 3.0), ("late", 11.0)]
    assert (log.link.normal_bytes, log.link.shadow_bytes) == (400, 0)


def test_a_normal_transfer_waits_for_the_chunk_in_flight_and_no_longer() -> None:
    log = Log()
    log.shadow("chunk", 100, 0.0)
    log.normal("call", 100, 0.25)
    log.run()
    assert log.ended == [("chunk", 1.0), ("call", 2.0)]
    # Between the two nothing could start.
    assert log.idle == [2.0]


@pytest.mark.parametrize("busy_with", ["normal", "shadow"])
def test_no_chunk_starts_beside_another_transfer(busy_with: str) -> None:
    log = Log()
    getattr(log, busy_with)("first", 100, 0.0)
    log.shadow("chunk", 100, 0.5)
    with pytest.raises(ValueError, match="takes no shadow chunk"):
        log.run()


def test_the_link_is_open_only_while_nothing_moves() -> None:
    log = Log()
    seen: list[bool] = []
    assert log.link.open
    log.normal("one", 100, 0.0)
    log.normal("two", 100, 0.0)
    for at in (0.5, 1.5, 2.5):
        log.clock.at(at, lambda now: seen.append(log.link.open))
    log.run()
    assert seen == [False, False, True]
    assert log.idle == [2.0]


def test_a_transfer_of_nothing_takes_no_time() -> None:
    log = Log()
    log.normal("nothing", 0, 3.0)
    log.run()
    assert log.ended == [("nothing", 3.0)]
