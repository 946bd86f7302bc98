"""The receiving side: reservations kept true by what senders say, and by asking those that say nothing."""

from collections.abc import Callable, Sequence

from transfer.allocation import Blocks
from transfer.courier import Courier
from transfer.reservations import Effect, Failed, Reservations, Sender
from transfer.wire import Kind, Note

ASK_SECONDS = 0.5
ASK_MOST_SECONDS = 16.0


class Receiver:
    """Part of a courier, whose steps drive it; effects go to `on_effect`, on the courier's thread.

    A reservation that fails is cancelled at its senders, and again at growing intervals until each has answered that it
    has drained or turns out to be gone.
    """

    def __init__(
        self,
        courier: Courier,
        reservations: Reservations,
        clock: Callable[[], float],
        on_effect: Callable[[Effect], None],
        *,
        ask_seconds: float = ASK_SECONDS,
    ) -> None:
        self.reservations = reservations
        self._courier = courier
        self._clock = clock
        self._on_effect = on_effect
        self._ask_seconds = ask_seconds
        self._asks: dict[int, tuple[float, float]] = {}
        courier.on_note = self._noted
        courier.on_peer_gone = self._gone
        courier.on_step = self._step
        courier.expects_notes = lambda: reservations.awaited

    def reserve(self, blocks: int, parts: Sequence[Sender], seconds: float) -> tuple[int, Blocks] | None:
        """As `Reservations.reserve`, for `seconds` from now. None also when a sender is not connected as named."""
        peers = self._courier.peers()
        if any(peers.get(sender.name) != sender.incarnation for sender in parts):
            return None
        return self.reservations.reserve(blocks, parts, self._clock() + seconds)

    def cancel(self, epoch: int) -> None:
        self._take(self.reservations.cancel(epoch, self._clock()))

    def _step(self) -> None:
        now = self._clock()
        self._take(self.reservations.tick(now))
        for epoch, (due, interval) in list(self._asks.items()):
            if now >= due:
                self._ask(epoch)
                if epoch in self._asks:
                    self._asks[epoch] = (now + interval, min(2 * interval, ASK_MOST_SECONDS))

    def _noted(self, sender: str, note: Note) -> None:
        self._take(self.reservations.note(sender, note, self._clock()))

    def _gone(self, sender: Sender) -> None:
        self._take(self.reservations.sender_gone(sender, self._clock()))

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Failed):
                self._asks[effect.epoch] = (self._clock(), self._ask_seconds)
            self._on_effect(effect)

    def _ask(self, epoch: int) -> None:
        senders = self.reservations.senders_of(epoch)
        if not senders:
            del self._asks[epoch]
        for part, sender in senders.items():
            self._courier.send(sender.name, Note(Kind.CANCEL, self.reservations.incarnation, epoch, part))
