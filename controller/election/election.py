"""Leader election over one Lease, after client-go's leaderelection; no I/O: time and records come in, records go out.

Clocks of controllers are never compared. A candidate waits until it has seen a record unchanged for the record's whole
duration on its own clock. A leader counts from before it sent its last successful write, which nobody saw earlier, and
steps down `renew_deadline_seconds` later; that is less than the duration, so two never lead at once.
"""

from __future__ import annotations

from typing import NamedTuple

from controller.config import ElectionConfig

# A leader that leaves writes a record that ends at once; an API server takes no duration below this.
_RELEASED_SECONDS = 1


class Record(NamedTuple):
    """What a Lease says. The times are the API's text, as their writer's wall clock had it."""

    holder: str = ""
    duration_seconds: int = 0
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0


class Election:
    """One candidate's view."""

    def __init__(self, config: ElectionConfig, identity: str) -> None:
        self.identity = identity
        self._config = config
        self._observed: Record | None = None
        self._observed_at = 0.0
        # When the last successful write was sent, while leading.
        self._renewed_at: float | None = None

    @property
    def step_down_at(self) -> float | None:
        """When leadership ends unless it is renewed; None while not leading."""
        return None if self._renewed_at is None else self._renewed_at + self._config.renew_deadline_seconds

    @property
    def holder(self) -> str:
        """Who leads as far as was seen; empty for nobody."""
        return self._observed.holder if self._observed is not None else ""

    def leading(self, now: float) -> bool:
        """Whether this candidate leads; by the clock, so that a process that stood still knows."""
        return self.step_down_at is not None and now < self.step_down_at

    def claim(self, now: float, seen: Record | None, wall: str) -> Record | None:
        """What to write upon a Lease just read (None: there is none); None while another one holds it.

        `wall` is the time for the record, as the API writes times.
        """
        if seen is None:
            return Record(self.identity, self._config.lease_duration_seconds, wall, wall, 0)
        if seen != self._observed:
            self._observed, self._observed_at = seen, now
        if seen.holder == self.identity:
            return seen._replace(duration_seconds=self._config.lease_duration_seconds, renewed=wall)
        # Somebody else took it: whatever this candidate was, it leads no longer.
        self._renewed_at = None
        if seen.holder and now < self._observed_at + seen.duration_seconds:
            return None
        return Record(self.identity, self._config.lease_duration_seconds, wall, wall, seen.transitions + 1)

    def written(self, sent_at: float, record: Record) -> None:
        """The API server took the record that was sent at `sent_at`."""
        self._observed, self._observed_at = record, sent_at
        self._renewed_at = sent_at

    def step_down(self) -> None:
        """Lead no longer, until a later claim succeeds."""
        self._renewed_at = None

    def release(self, seen: Record, wall: str) -> Record | None:
        """What to write on leaving, so that others need not wait; None where the Lease is another one's."""
        self._renewed_at = None
        if seen.holder != self.identity:
            return None
        return Record("", _RELEASED_SECONDS, wall, wall, seen.transitions)
