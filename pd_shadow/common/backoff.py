"""How long to wait before the next try."""

import random
from collections.abc import Callable


class Backoff:
    """Doubles from `first` to `most` seconds until `reset`; each wait is cut by a random part of up to a half, so that
    processes that lost the same server do not all come back at once. `rng` gives 0 to 1."""

    def __init__(self, first: float = 0.2, most: float = 10.0, rng: Callable[[], float] = random.random) -> None:
        self._first = first
        self._most = most
        self._rng = rng
        self._following = first

    def next(self) -> float:
        """Seconds to wait now."""
        seconds, self._following = self._following, min(2 * self._following, self._most)
        return self.jitter(seconds)

    def jitter(self, seconds: float) -> float:
        """A wait of this length, cut at random."""
        return seconds * (1 - self._rng() / 2)

    def reset(self) -> None:
        """A try went well."""
        self._following = self._first
