"""Virtual time: what is due next."""

import heapq
from collections.abc import Callable


class Clock:
    """Runs callbacks in order of time, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._asked = 0

    def at(self, time: float, call: Callable[[float], None]) -> None:
        """Have `call` run at `time`, which is not in the past."""
        self._asked += 1
        heapq.heappush(self._due, (time, self._asked, call))

    def run(self, until: Callable[[], bool]) -> None:
        """Run until nothing is due or, looked at after every event, `until` holds."""
        due = self._due
        while due and not until():
            self.now, _, call = heapq.heappop(due)
            self.events += 1
            call(self.now)
