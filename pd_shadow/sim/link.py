"""The inbound side of one decode instance: normal transfers in order of arrival, shadow chunks in the gaps.

The gate is the product's (transfer/gate.py). One transfer has the whole bandwidth: a normal one that arrives during a
shadow chunk follows it, which is the worst the rule allows.
"""

from collections.abc import Callable

from pd_shadow.sim.clock import Clock
from transfer.gate import GateState, LinkGate


class Link:
    """`idle` is called whenever a shadow chunk may start."""

    def __init__(self, clock: Clock, bytes_per_second: float, idle: Callable[[float], None]) -> None:
        self.gate = LinkGate()
        self.normal_bytes = 0.0
        self.shadow_bytes = 0.0
        self._clock = clock
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._idle = idle

    @property
    def open(self) -> bool:
        """Whether a shadow chunk may start now."""
        return self.gate.state is GateState.OPEN

    def normal(self, size: float, now: float, done: Callable[[float], None]) -> None:
        """Move bytes of a call; `done` when they are there."""
        self.gate.begin_normal()
        self.normal_bytes += size
        self._free_at = max(now, self._free_at) + size / self._rate

        def end(at: float) -> None:
            self.gate.end_normal()
            done(at)
            if self.open:
                self._idle(at)

        self._clock.at(self._free_at, end)

    def shadow(self, size: float, now: float, done: Callable[[float], None]) -> None:
        """Move a shadow chunk; raises ValueError unless the link is open."""
        self.gate.begin_shadow()
        self.shadow_bytes += size
        self._free_at = now + size / self._rate

        def end(at: float) -> None:
            self.gate.end_shadow()
            done(at)
            if self.open:
                self._idle(at)

        self._clock.at(self._free_at, end)
