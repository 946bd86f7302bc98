"""Blocks promised to senders: who may still write which blocks, and when they may be used again. Sans-I/O.

A transport cannot be fenced: releasing a transfer does not cancel it, and deregistered memory can still be written. So
blocks of a reservation are given back only when every part's sender has said that nothing is in flight any more
(`DONE` or `DRAINED`) or its process is gone, and after a failure what was on its way has had time to land. What
fails is reported at once and in bounded time; its blocks follow when they are safe. A sender that hangs holds its
blocks until it wakes or dies: that is the price of one-sided writes.

Every reservation has an epoch, a number this receiver never uses twice; notes that carry another incarnation or a
closed epoch change nothing.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from transfer.allocation import BlockPool, Blocks
from transfer.wire import NUMBER_MOST, Kind, Note

SETTLE_SECONDS = 1.0


class Sender(NamedTuple):
    """A peer's process; one started anew under the same name has a higher incarnation."""

    name: str
    incarnation: int


class FailReason(Enum):
    DEADLINE = "deadline"
    SENDER_FAILED = "sender_failed"
    SENDER_LOST = "sender_lost"
    CANCELLED = "cancelled"


class Completed(NamedTuple):
    """Every part has arrived; the blocks are the owner's, who frees them in the pool."""

    epoch: int
    blocks: Blocks


class Failed(NamedTuple):
    """The reservation will not complete; its blocks stay reserved until `Freed`."""

    epoch: int
    reason: FailReason


class Freed(NamedTuple):
    """The blocks of a failed reservation are in the pool again."""

    epoch: int
    blocks: int


Effect = Completed | Failed | Freed


class _Reservation:
    def __init__(self, blocks: Blocks, parts: Sequence[Sender], deadline: float) -> None:
        self.blocks = blocks
        self.parts = parts
        self.deadline = deadline
        self.open_parts = set(range(len(parts)))
        self.failed: FailReason | None = None
        self.safe_at = float("-inf")


class Reservations:
    """The reservations of one receiver. `now` is any clock in seconds, the same one everywhere."""

    def __init__(
        self, pool: BlockPool, incarnation: int, *, most: int = 1024, settle_seconds: float = SETTLE_SECONDS
    ) -> None:
        if most < 1:
            raise ValueError(f"most: must be at least 1, is {most}")
        if not 0 <= incarnation <= NUMBER_MOST:
            raise ValueError(f"incarnation: {incarnation} is not in 0…2^64-1")
        if settle_seconds < 0:
            raise ValueError(f"settle_seconds: must not be negative, is {settle_seconds}")
        self.pool = pool
        self.incarnation = incarnation
        self.most = most
        self.settle_seconds = settle_seconds
        self.fenced = 0
        """Notes that were late, from strangers or about nothing known."""
        self._held: dict[int, _Reservation] = {}
        self._epochs = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_blocks(self) -> int:
        return sum(len(reservation.blocks) for reservation in self._held.values())

    @property
    def awaited(self) -> bool:
        """Whether a reservation may still complete."""
        return any(reservation.failed is None for reservation in self._held.values())

    def reserve(self, blocks: int, parts: Sequence[Sender], deadline: float) -> tuple[int, Blocks] | None:
        """Reserve `blocks` for a chunk that arrives in `parts`, part `i` from `parts[i]`; (epoch, blocks).

        None when the pool lacks them or `most` reservations are held. After `deadline` the reservation has failed.
        """
        if not parts:
            raise ValueError("parts: a chunk comes from at least one sender")
        if len(self._held) >= self.most:
            return None
        taken = self.pool.allocate(blocks)
        if taken is None:
            return None
        self._epochs += 1
        self._held[self._epochs] = _Reservation(taken, tuple(parts), deadline)
        return self._epochs, taken

    def note(self, sender: str, note: Note, now: float) -> list[Effect]:
        """Take in what `sender` says. Notes about nothing of its own are counted in `fenced`."""
        reservation = self._held.get(note.epoch)
        if (
            note.kind not in (Kind.DONE, Kind.DRAINED)
            or note.receiver != self.incarnation
            or reservation is None
            or note.part not in reservation.open_parts
            or reservation.parts[note.part].name != sender
        ):
            self.fenced += 1
            return []
        reservation.open_parts.discard(note.part)
        effects: list[Effect] = []
        if note.kind is Kind.DRAINED:
            # A sender drains an error by closing its connection; what had left it by then may still be on its way.
            reservation.safe_at = max(reservation.safe_at, now + self.settle_seconds)
            effects += self._fail(note.epoch, FailReason.SENDER_FAILED)
        return effects + self._close(note.epoch, now)

    def cancel(self, epoch: int, now: float) -> list[Effect]:
        """The owner no longer wants the chunk. Unknown epochs are over already."""
        return [*self._fail(epoch, FailReason.CANCELLED), *self._close(epoch, now)] if epoch in self._held else []

    def sender_gone(self, sender: Sender, now: float) -> list[Effect]:
        """The process behind `sender` has ended, or one of a higher incarnation has taken its name."""
        effects: list[Effect] = []
        for epoch, reservation in list(self._held.items()):
            gone = {
                part
                for part in reservation.open_parts
                if reservation.parts[part].name == sender.name
                and reservation.parts[part].incarnation <= sender.incarnation
            }
            if gone:
                reservation.open_parts -= gone
                reservation.safe_at = max(reservation.safe_at, now + self.settle_seconds)
                effects += self._fail(epoch, FailReason.SENDER_LOST)
                effects += self._close(epoch, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """What time alone brings: deadlines, and blocks that have settled."""
        effects: list[Effect] = []
        for epoch, reservation in list(self._held.items()):
            if now >= reservation.deadline:
                effects += self._fail(epoch, FailReason.DEADLINE)
            effects += self._close(epoch, now)
        return effects

    def senders_of(self, epoch: int) -> dict[int, Sender]:
        """Parts still open and whose they are."""
        reservation = self._held.get(epoch)
        return {} if reservation is None else {part: reservation.parts[part] for part in reservation.open_parts}

    def _fail(self, epoch: int, reason: FailReason) -> list[Effect]:
        reservation = self._held[epoch]
        if reservation.failed is not None:
            return []
        reservation.failed = reason
        return [Failed(epoch, reason)]

    def _close(self, epoch: int, now: float) -> list[Effect]:
        reservation = self._held[epoch]
        if reservation.open_parts or now < reservation.safe_at:
            return []
        del self._held[epoch]
        if reservation.failed is None:
            return [Completed(epoch, reservation.blocks)]
        self.pool.free(reservation.blocks)
        return [Freed(epoch, len(reservation.blocks))]
