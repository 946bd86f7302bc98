"""The network between nodes: messages that are late, lost, doubled or out of order, streams that break, partitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.controller.campaign.clock import Clock

Do = Callable[[], None]
OnEnd = Callable[["Stream"], None]


@dataclass
class Weather:
    """Shares of messages, and the mean seconds one takes."""

    lost: float = 0.0
    doubled: float = 0.0
    seconds: float = 0.005


class Stream:
    """Two nodes' long RPC: in order both ways until it breaks. Each end learns of the break by itself, some time later,
    and takes what is still on its way until then.
    """

    def __init__(self, network: Network, ends: tuple[str, str], on_end: tuple[OnEnd, OnEnd]) -> None:
        self.ends = ends
        self.broken = False
        self._network = network
        self._on_end = on_end
        self._closed = [False, False]
        self._last = [0.0, 0.0]

    def send(self, to: int, do: Do) -> None:
        """From the other end to end `to`; nothing arrives that is sent once the stream is broken."""
        if self.broken or self._closed[1 - to]:
            return
        clock = self._network.clock
        self._last[to] = max(self._last[to], clock.now + self._network.seconds())
        clock.after(self._last[to] - clock.now, lambda: None if self._closed[to] else do())

    def close(self, end: int) -> None:
        """One end ends it properly: it hears no more, and the other end learns of it."""
        if not self._closed[end]:
            self._closed[end] = True
            self.break_up()

    def break_up(self) -> None:
        """Break it; a dead node's end is told too, and has to know that it is dead."""
        if self.broken:
            return
        self.broken = True
        self._network.streams.remove(self)
        for end in (0, 1):
            self._network.clock.after(self._network.noticing(), lambda end=end: self._notice(end))  # type: ignore[misc]

    def _notice(self, end: int) -> None:
        if not self._closed[end]:
            self._closed[end] = True
            self._on_end[end](self)


class Network:
    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        self.weather = Weather()
        # In the order of their opening, so that every replay breaks them in the same order.
        self.streams: list[Stream] = []
        self._random = random
        self._cut: set[tuple[str, str]] = set()

    def reaches(self, a: str, b: str) -> bool:
        return (min(a, b), max(a, b)) not in self._cut

    def cut(self, a: str, b: str) -> None:
        self._cut.add((min(a, b), max(a, b)))
        for stream in [s for s in self.streams if set(s.ends) == {a, b}]:
            stream.break_up()

    def join(self, a: str, b: str) -> None:
        self._cut.discard((min(a, b), max(a, b)))

    def join_all(self) -> None:
        self._cut.clear()

    def kill(self, node: str) -> None:
        """A process ended: its streams break."""
        for stream in [s for s in self.streams if node in s.ends]:
            stream.break_up()

    def seconds(self) -> float:
        return self._random.expovariate(1.0 / self.weather.seconds)

    def noticing(self) -> float:
        """Seconds until an end notices a break: at once, or after a timeout."""
        return self.seconds() if self._random.random() < 0.7 else self._random.uniform(0.5, 4.0)

    def send(self, a: str, b: str, do: Do) -> None:
        """A message of its own; it may come late, twice or never."""
        random, weather = self._random, self.weather
        for _ in range(2 if random.random() < weather.doubled else 1):
            if random.random() >= weather.lost:
                self.clock.after(self.seconds(), lambda: do() if self.reaches(a, b) else None)

    def open(self, ends: tuple[str, str], on_end: tuple[OnEnd, OnEnd]) -> Stream:
        stream = Stream(self, ends, on_end)
        self.streams.append(stream)
        return stream
