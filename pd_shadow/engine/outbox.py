"""What the engine says about sessions, until the reporter's thread has sent it."""

import threading
from collections import OrderedDict
from typing import NamedTuple

PENDING = 4096
"""Sessions with news that wait to be sent; of more, the oldest news are forgotten and a call is colder than thought."""
RESIDENT = 2048
"""Sessions whose coverage is remembered for the next Hello, the latest ones: what a gRPC message easily holds."""


class Coverage(NamedTuple):
    """Tokens of a session's context that the engine holds, and whether it gave up some since the last word."""

    session: str
    tokens: int
    evicted: bool


class News(NamedTuple):
    """Everything since the last time: a cleared cache comes before the coverage."""

    cache_reset: bool
    coverage: list[Coverage]


class Outbox:
    """The newest coverage of a session wins. Bounded and thread-safe; the lock is never held for longer than a swap."""

    def __init__(self, pending: int = PENDING, resident: int = RESIDENT) -> None:
        self._lock = threading.Lock()
        self._most_pending = pending
        self._most_resident = resident
        self._pending: dict[str, Coverage] = {}
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._cache_reset = False
        self.forgotten = 0

    def put(self, session: str, tokens: int, *, evicted: bool) -> None:
        """The engine now holds `tokens` of a session's context."""
        with self._lock:
            before = self._pending.pop(session, None)
            # An eviction that was not told yet must be: progress alone never makes the controller believe less.
            self._pending[session] = Coverage(session, tokens, evicted or (before is not None and before.evicted))
            if len(self._pending) > self._most_pending:
                del self._pending[next(iter(self._pending))]
                self.forgotten += 1
            self._resident.pop(session, None)
            if tokens:
                self._resident[session] = tokens
                if len(self._resident) > self._most_resident:
                    self._resident.popitem(last=False)

    def reset(self) -> None:
        """The engine's cache was cleared: nothing said before holds any more."""
        with self._lock:
            self._cache_reset = True
            self._pending = {}
            self._resident = OrderedDict()

    def take(self) -> News:
        """What is to be sent; each word is handed out once."""
        with self._lock:
            news, self._cache_reset = (self._cache_reset, self._pending), False
            self._pending = {}
        return News(news[0], list(news[1].values()))

    def resident(self) -> dict[str, int]:
        """Last known coverage in tokens by session, oldest word first."""
        with self._lock:
            return dict(self._resident)
