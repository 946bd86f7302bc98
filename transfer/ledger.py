"""Seconds and bytes a link has carried, by kind."""

from transfer.gate import LinkGate


class LinkLedger:
    """Integrates a gate's state over time. Seconds are those of the clock passed in."""

    def __init__(self, gate: LinkGate, now: float) -> None:
        self._gate = gate
        self._since = now
        self.normal_seconds = 0.0
        self.shadow_seconds = 0.0
        self.idle_seconds = 0.0
        self.normal_bytes = 0
        self.shadow_bytes = 0

    def settle(self, now: float) -> None:
        """Book the time since the last call under the state the gate has had; call it before every change of state."""
        elapsed = max(0.0, now - self._since)
        self._since = now
        if self._gate.normal_transfers:
            self.normal_seconds += elapsed
        elif self._gate.shadow_chunks:
            self.shadow_seconds += elapsed
        else:
            self.idle_seconds += elapsed

    def carried(self, *, normal: int = 0, shadow: int = 0) -> None:
        """Book bytes that have arrived. Raises ValueError when there are fewer than none."""
        for name, count in (("normal", normal), ("shadow", shadow)):
            if count < 0:
                raise ValueError(f"{name}: bytes cannot be negative, are {count}")
        self.normal_bytes += normal
        self.shadow_bytes += shadow
