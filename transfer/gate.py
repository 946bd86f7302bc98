"""The link gate: shadow chunks move only while a link carries no normal transfer.

Two rules (paper section 3.5):

- A shadow chunk starts only on an idle link, one at a time.
- A normal transfer never waits: it may meet the one chunk already in flight, and no other starts beside it.
"""

from enum import Enum


class GateState(Enum):
    """Whether a link takes a shadow chunk now; the names are those of the API's GateReason."""

    OPEN = "open"
    NORMAL_TRANSFER = "normal_transfer"
    SHADOW_IN_FLIGHT = "shadow_in_flight"
    PAUSED = "paused"


class LinkGate:
    """The inbound side of one decode instance."""

    def __init__(self) -> None:
        self.normal_transfers = 0
        self.shadow_chunks = 0
        self.paused = False

    @property
    def state(self) -> GateState:
        if self.paused:
            return GateState.PAUSED
        if self.normal_transfers:
            return GateState.NORMAL_TRANSFER
        if self.shadow_chunks:
            return GateState.SHADOW_IN_FLIGHT
        return GateState.OPEN

    def begin_normal(self) -> None:
        self.normal_transfers += 1

    def end_normal(self) -> None:
        if not self.normal_transfers:
            raise ValueError("no normal transfer is in flight")
        self.normal_transfers -= 1

    def begin_shadow(self) -> None:
        """Reserve the link for one chunk; raises ValueError unless the gate is open."""
        if self.state is not GateState.OPEN:
            raise ValueError(f"the link takes no shadow chunk: {self.state.value}")
        self.shadow_chunks += 1

    def end_shadow(self) -> None:
        if not self.shadow_chunks:
            raise ValueError("no shadow chunk is in flight")
        self.shadow_chunks -= 1
