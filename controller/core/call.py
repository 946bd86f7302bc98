"""One call in flight: what it holds, and what its end gives back."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.placement import Placed
from controller.core.session import Digest, SessionKey
from pd_shadow.api.v1 import placement_pb2 as pb


@dataclass(eq=False, slots=True)
class Call:
    """A call from BeginCall to EndCall.

    It holds a prefill slot until its KV starts to move, the link until its first token, a decode slot until its end.
    On a colocated instance, which is then both `prefill` and `decode`, nothing moves: it holds the prefill slot until
    its first token, or until its end if it does not stream.
    """

    call_id: str
    gateway_id: str
    session: SessionKey | None
    model: str
    prefill: Placed | None
    decode: Placed
    prompt_tokens: int
    uncached_tokens: int
    expected_warm_tokens: int
    is_switch: bool
    digests: tuple[Digest, ...]
    begun: float
    phase: pb.CallPhase.ValueType = pb.CALL_PHASE_UNSPECIFIED
    prefilled_at: float | None = None

    @property
    def colocated(self) -> bool:
        return self.decode.instance.colocated

    def reserve(self) -> None:
        """Take the slots of the first phase."""
        if self.prefill is not None:
            instance = self.prefill.instance
            instance.prefill_calls[self.call_id] = self.uncached_tokens
            instance.note_own_requests()
        self.decode.instance.decode_calls.add(self.call_id)
        self.decode.instance.note_own_requests()

    def advance(self, now: float, phase: pb.CallPhase.ValueType) -> None:
        """Move on to a later phase; an earlier or equal one changes nothing."""
        if phase <= self.phase:
            return
        if self.phase == pb.CALL_PHASE_TRANSFER:
            self._end_transfer(now)
        self.phase = phase
        self._release_prefill()
        # The first sign that the prompt is computed: its KV moves, or on a colocated instance the first token is out.
        if self.prefill is not None and (self.colocated or phase == pb.CALL_PHASE_TRANSFER):
            self.prefilled_at = now
        if phase == pb.CALL_PHASE_TRANSFER and self._moves_kv:
            self.decode.instance.settled_gate(now).begin_normal()

    def release(self, now: float) -> None:
        """Give everything back, in whatever phase the call ended."""
        self._release_prefill()
        if self.phase == pb.CALL_PHASE_TRANSFER:
            self._end_transfer(now)
        self.phase = pb.CALL_PHASE_DECODE
        self.decode.instance.decode_calls.discard(self.call_id)

    @property
    def _moves_kv(self) -> bool:
        return self.prefill is not None and not self.colocated

    def _release_prefill(self) -> None:
        if self.prefill is not None:
            self.prefill.instance.prefill_calls.pop(self.call_id, None)

    def _end_transfer(self, now: float) -> None:
        if self._moves_kv:
            self.decode.instance.settled_gate(now).end_normal()
