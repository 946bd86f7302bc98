"""The sending side: pushes chunks over a transport, a short post at a time, and says when memory is its owner's again.

Runs on one thread and never waits: `step` does what can be done now and says when to come again. Time comes from the
clock it was given. Every push ends twice:

- with an outcome, by its deadline at the latest, whatever the peer does (a hung peer never makes a transport fail);
- *drained*: nothing of it is in flight, its memory may be used again and the receiver has been told. After a failure
  this may come late; while it is outstanding its peer takes no other push.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from transfer.descriptors import Batch, ChunkPlan
from transfer.layouts import KvPool
from transfer.reservations import Sender
from transfer.transport.base import (
    DescriptorList,
    Operation,
    PeerLostError,
    Region,
    Transfer,
    Transport,
    TransportError,
)
from transfer.wire import NUMBER_MOST, Kind, Note

_CLOSED_EPOCHS = 4096
_PIECE_SIZES = 16
_UNSENT_NOTES = 4096


class PeerOffer(NamedTuple):
    """What a peer must know to write into, or read from, an instance's pool."""

    name: str
    incarnation: int
    metadata: bytes
    pool: KvPool


class Push(NamedTuple):
    """One part of a chunk. `incarnation`, `epoch` and `part` are those of the receiver's reservation.

    A `plan`'s source is our pool for a WRITE and the peer's for a READ. `deadline` is on the courier's clock; a
    `normal` push posts before any shadow one.
    """

    peer: str
    incarnation: int
    epoch: int
    part: int
    plan: ChunkPlan
    deadline: float
    normal: bool = False
    operation: Operation = Operation.WRITE

    def check(self) -> None:
        """Raises ValueError for numbers that no note can carry."""
        for name in ("incarnation", "epoch", "part"):
            if not 0 <= getattr(self, name) <= NUMBER_MOST:
                raise ValueError(f"{name}: {getattr(self, name)} is not in 0…2^64-1")


class PushReason(Enum):
    DONE = "done"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    PEER_LOST = "peer_lost"
    PEER_STALLED = "peer_stalled"
    """An earlier push to the peer has ended and not drained."""
    PEER_UNKNOWN = "peer_unknown"
    """No peer of this name and incarnation is connected."""
    EPOCH_CLOSED = "epoch_closed"
    """The reservation has been used, refused or taken back."""
    EPOCH_BUSY = "epoch_busy"
    """The same part of the same reservation is being pushed."""
    QUEUE_FULL = "queue_full"
    TRANSPORT_ERROR = "transport_error"


class PushOutcome(NamedTuple):
    """`bytes` are those known to be in place, `seconds` run from the call of `push`, `detail` is the transport's."""

    reason: PushReason
    bytes: int = 0
    posts: int = 0
    seconds: float = 0.0
    detail: str = ""


class Drained(Enum):
    """How a push stopped using memory."""

    TOLD = "told"
    """The receiver has been told."""
    NEVER_BEGAN = "never_began"
    """The push was refused; nothing was posted."""
    PEER_GONE = "peer_gone"
    """The connection is closed, there is nobody to tell."""
    ABANDONED = "abandoned"
    """The courier was closed first: a hung peer's transfers were given up, their bytes may still move."""


class _Peer:
    def __init__(self, offer: PeerOffer) -> None:
        self.offer = offer
        self.lists: dict[int, DescriptorList] = {}
        self.unsent: deque[bytes] = deque(maxlen=_UNSENT_NOTES)


class _Sending:
    def __init__(
        self,
        push: Push,
        started: float,
        on_end: Callable[[PushOutcome], None],
        on_drained: Callable[[Drained], None],
    ) -> None:
        self.push = push
        self.started = started
        self.on_end = on_end
        self.on_drained = on_drained
        self.batches: Iterator[Batch] = push.plan.batches()
        self.next: Batch | None = next(self.batches, None)
        self.in_flight: dict[Transfer, int] = {}
        self.bytes = 0
        self.posts = 0
        self.ended = False


class Courier:
    """Owns a transport, this instance's pool on it, and the pushes in progress."""

    def __init__(
        self,
        transport: Transport,
        pool: KvPool,
        regions: Sequence[Region],
        incarnation: int,
        clock: Callable[[], float],
        *,
        depth: int = 4,
        poll_seconds: float = 0.0005,
        idle_seconds: float = 0.02,
        most_pushes: int = 256,
    ) -> None:
        """Registers `regions`, which hold the pool. `depth` is the number of posts of a push in flight at a time."""
        for name, value in (("depth", depth), ("most_pushes", most_pushes)):
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, is {value}")
        self.pool = pool
        self.incarnation = incarnation
        self.on_note: Callable[[str, Note], None] = lambda _sender, _note: None
        """Called with every DONE and DRAINED that arrives."""
        self.on_peer_gone: Callable[[Sender], None] = lambda _sender: None
        """Called when a peer's process is known to be gone: connection lost, or replaced by a newer incarnation."""
        self.on_step: Callable[[], None] = lambda: None
        """Called in every step."""
        self.expects_notes: Callable[[], bool] = lambda: False
        """Whether notes are awaited: then they are looked for every `poll_seconds` instead of `idle_seconds`."""
        self.unknown_messages = 0
        self._transport = transport
        self._clock = clock
        self._depth = depth
        self._poll_seconds = poll_seconds
        self._idle_seconds = idle_seconds
        self._most_pushes = most_pushes
        self._lists: dict[int, DescriptorList] = {}
        self._peers: dict[str, _Peer] = {}
        self._sendings: list[_Sending] = []
        self._unreleased: list[Transfer] = []
        self._closed: OrderedDict[tuple[str, int, int, int], None] = OrderedDict()
        try:
            self._transport.register(regions)
        except TransportError:
            self._transport.close()
            raise

    def offer(self) -> PeerOffer:
        return PeerOffer(self._transport.name, self.incarnation, self._transport.metadata(), self.pool)

    def connect(self, offer: PeerOffer) -> None:
        """Know a peer, or know it anew: a higher incarnation replaces the one before, whose pushes end as lost.

        Raises TransportError for an incarnation older than the one known; the same one again changes nothing.
        """
        known = self._peers.get(offer.name)
        if known is not None:
            if offer.incarnation == known.offer.incarnation:
                return
            if offer.incarnation < known.offer.incarnation:
                raise TransportError(
                    f"incarnation: {offer.name} is known as {known.offer.incarnation}, not as the older "
                    f"{offer.incarnation}"
                )
            self._lose(offer.name, "replaced by a newer incarnation", gone=True)
        self._transport.connect(offer.name, offer.metadata)
        self._peers[offer.name] = _Peer(offer)

    def forget(self, name: str) -> None:
        """Close the connection to a peer; pushes to it end as lost. Unknown names are forgotten already.

        Its process may live on and write: blocks reserved for it stay so until it is connected again and answers.
        """
        self._lose(name, "forgotten", gone=False)

    def peers(self) -> dict[str, int]:
        """Names and incarnations."""
        return {name: peer.offer.incarnation for name, peer in self._peers.items()}

    @property
    def pushes(self) -> int:
        """Pushes that have not drained."""
        return len(self._sendings)

    def push(self, push: Push, on_end: Callable[[PushOutcome], None], on_drained: Callable[[Drained], None]) -> None:
        """Send a part of a chunk. Both callbacks are called once, from here or from `step`.

        Raises ValueError as `Push.check` does.
        """
        push.check()
        refusal = self._refusal(push)
        if refusal is not None:
            on_end(PushOutcome(refusal))
            if refusal not in (PushReason.EPOCH_BUSY, PushReason.PEER_UNKNOWN):
                self._close_epoch(push.peer, push.incarnation, push.epoch, push.part)
                self._tell(push, Kind.DRAINED)
            on_drained(Drained.NEVER_BEGAN)
            return
        self._sendings.append(_Sending(push, self._clock(), on_end, on_drained))

    def cancel(self, peer: str, epoch: int, part: int) -> None:
        """Post no more of a push; it ends now and drains when its posts have."""
        for sending in self._sendings:
            if (sending.push.peer, sending.push.epoch, sending.push.part) == (peer, epoch, part):
                self._end(sending, PushReason.CANCELLED)

    def send(self, peer: str, note: Note) -> bool:
        """False when the peer is not connected (any more)."""
        known = self._peers.get(peer)
        if known is None:
            return False
        known.unsent.append(note.encode())
        self._flush(known)
        return peer in self._peers

    def step(self) -> float:
        """Do what can be done now; the seconds after which to call again."""
        self._receive()
        self.on_step()
        for known in list(self._peers.values()):
            self._flush(known)
        self._release_late()
        posted = False
        for sending in list(self._sendings):
            self._look_after(sending)
        normal = any(sending.push.normal and not sending.ended for sending in self._sendings)
        for sending in list(self._sendings):
            if not normal or sending.push.normal:
                posted = self._post_next(sending) or posted
        for sending in list(self._sendings):
            self._finish(sending)
        if posted:
            return 0.0
        # What has ended and not drained may stay so for as long as its peer hangs: no reason to hurry.
        waiting = any(not sending.ended for sending in self._sendings)
        return self._poll_seconds if waiting or self.expects_notes() else self._idle_seconds

    def close(self) -> None:
        """Give everything back at once. What has not drained is `ABANDONED`; cancel and step first to avoid that."""
        for sending in list(self._sendings):
            self._end(sending, PushReason.CANCELLED)
            self._sendings.remove(sending)
            sending.on_drained(Drained.ABANDONED)
        self._peers.clear()
        self._transport.close()

    def cancel_all(self) -> None:
        for sending in list(self._sendings):
            self._end(sending, PushReason.CANCELLED)

    def _refusal(self, push: Push) -> PushReason | None:
        peer = self._peers.get(push.peer)
        if peer is None or peer.offer.incarnation != push.incarnation:
            return PushReason.PEER_UNKNOWN
        if any(sending.push[:4] == push[:4] for sending in self._sendings):
            return PushReason.EPOCH_BUSY
        if (push.peer, push.incarnation, push.epoch, push.part) in self._closed:
            return PushReason.EPOCH_CLOSED
        if any(sending.push.peer == push.peer and sending.ended for sending in self._sendings):
            return PushReason.PEER_STALLED
        if len(self._sendings) >= self._most_pushes:
            return PushReason.QUEUE_FULL
        return None

    def _receive(self) -> None:
        with contextlib.suppress(TransportError):
            for message in self._transport.receive():
                note = Note.decode(message.body)
                if note is None:
                    self.unknown_messages += 1
                elif note.kind is Kind.CANCEL:
                    self._cancelled(message.peer, note)
                else:
                    self.on_note(message.peer, note)

    def _cancelled(self, peer: str, note: Note) -> None:
        self._close_epoch(peer, note.receiver, note.epoch, note.part)
        for sending in self._sendings:
            push = sending.push
            if (push.peer, push.incarnation, push.epoch, push.part) == (peer, note.receiver, note.epoch, note.part):
                self._end(sending, PushReason.CANCELLED)
                return
        known = self._peers.get(peer)
        if known is not None and known.offer.incarnation == note.receiver:
            self.send(peer, note._replace(kind=Kind.DRAINED))

    def _close_epoch(self, peer: str, incarnation: int, epoch: int, part: int) -> None:
        self._closed[peer, incarnation, epoch, part] = None
        if len(self._closed) > _CLOSED_EPOCHS:
            self._closed.popitem(last=False)

    def _look_after(self, sending: _Sending) -> None:
        if sending not in self._sendings:
            return
        if not sending.ended and self._clock() >= sending.push.deadline:
            self._end(sending, PushReason.DEADLINE)
        for transfer in list(sending.in_flight):
            try:
                over = self._transport.poll(transfer)
            except PeerLostError as error:
                self._lose(sending.push.peer, str(error), gone=True)
                return
            except TransportError as error:
                self._reconnect(sending.push.peer, str(error))
                return
            if over:
                self._arrived(sending, transfer, sending.in_flight[transfer])

    def _post_next(self, sending: _Sending) -> bool:
        batch = sending.next
        if batch is None or sending.ended or sending not in self._sendings or len(sending.in_flight) >= self._depth:
            return False
        push = sending.push
        try:
            own, theirs = self._lists_for(push)
            if push.operation is Operation.WRITE:
                transfer, over = self._transport.post(push.operation, (own, batch.source), (theirs, batch.target))
            else:
                transfer, over = self._transport.post(push.operation, (own, batch.target), (theirs, batch.source))
        except PeerLostError as error:
            self._lose(push.peer, str(error), gone=True)
            return False
        except TransportError as error:
            self._reconnect(push.peer, str(error))
            return False
        size = len(batch.source) * push.plan.piece.bytes
        sending.posts += 1
        sending.in_flight[transfer] = size
        sending.next = next(sending.batches, None)
        if over:
            self._arrived(sending, transfer, size)
        return True

    def _finish(self, sending: _Sending) -> None:
        """When nothing is in flight and nothing left to post: tell the receiver, then the owner."""
        if sending not in self._sendings or sending.in_flight or (sending.next is not None and not sending.ended):
            return
        kind = Kind.DRAINED if sending.ended else Kind.DONE
        push = sending.push
        self._close_epoch(push.peer, push.incarnation, push.epoch, push.part)
        self._tell(push, kind)
        if sending not in self._sendings:
            return
        self._end(sending, PushReason.DONE)
        self._sendings.remove(sending)
        sending.on_drained(Drained.TOLD)

    def _tell(self, push: Push, kind: Kind) -> None:
        self.send(push.peer, Note(kind, push.incarnation, push.epoch, push.part))

    def _flush(self, known: _Peer) -> None:
        while known.unsent:
            try:
                self._transport.send(known.offer.name, known.unsent[0])
            except PeerLostError as error:
                self._lose(known.offer.name, str(error), gone=True)
                return
            except TransportError:
                # A receiver that does not hear of it would hold its blocks for ever: try again with the next step.
                return
            known.unsent.popleft()

    def _end(self, sending: _Sending, reason: PushReason, detail: str = "") -> None:
        if sending.ended:
            return
        sending.ended = True
        seconds = self._clock() - sending.started
        sending.on_end(PushOutcome(reason, sending.bytes, sending.posts, seconds, detail))

    def _arrived(self, sending: _Sending, transfer: Transfer, size: int) -> None:
        del sending.in_flight[transfer]
        sending.bytes += size
        self._release(transfer)

    def _release(self, transfer: Transfer) -> None:
        try:
            self._transport.release(transfer)
        except TransportError:
            self._unreleased.append(transfer)

    def _release_late(self) -> None:
        late, self._unreleased = self._unreleased, []
        for transfer in late:
            self._release(transfer)

    def _lists_for(self, push: Push) -> tuple[DescriptorList, DescriptorList]:
        size = push.plan.piece.bytes
        known = self._peers[push.peer]
        return (
            self._prepared(self._lists, size, self.pool, None),
            self._prepared(known.lists, size, known.offer.pool, push.peer),
        )

    def _prepared(self, lists: dict[int, DescriptorList], size: int, pool: KvPool, peer: str | None) -> DescriptorList:
        if size not in lists:
            if len(lists) >= _PIECE_SIZES:
                raise TransportError(f"more than {_PIECE_SIZES} sizes of pieces are in use")
            lists[size] = self._transport.prepare(pool.rows(size), peer)
        return lists[size]

    def _lose(self, name: str, detail: str, *, gone: bool) -> None:
        """End everything that concerns a peer; `gone` says that its process has ended."""
        known = self._peers.get(name)
        if known is None:
            return
        lost = self._disconnect(known)
        for sending in lost:
            self._end(sending, PushReason.PEER_LOST, detail)
            sending.on_drained(Drained.PEER_GONE)
        if gone:
            self.on_peer_gone(Sender(name, known.offer.incarnation))

    def _reconnect(self, name: str, detail: str) -> None:
        """After an error nobody knows what is still in flight: only closing the connection makes sure."""
        known = self._peers[name]
        failed = self._disconnect(known)
        with contextlib.suppress(TransportError):
            self._transport.connect(name, known.offer.metadata)
            self._peers[name] = _Peer(known.offer)
        for sending in failed:
            push = sending.push
            self._close_epoch(push.peer, push.incarnation, push.epoch, push.part)
            self._end(sending, PushReason.TRANSPORT_ERROR, detail)
            self._tell(push, Kind.DRAINED)
            sending.on_drained(Drained.TOLD if name in self._peers else Drained.PEER_GONE)

    def _disconnect(self, known: _Peer) -> list[_Sending]:
        name = known.offer.name
        del self._peers[name]
        lost = [sending for sending in self._sendings if sending.push.peer == name]
        for sending in lost:
            self._sendings.remove(sending)
            for transfer in sending.in_flight:
                self._release(transfer)
        for descriptors in known.lists.values():
            with contextlib.suppress(TransportError):
                self._transport.release_list(descriptors)
        with contextlib.suppress(TransportError):
            self._transport.disconnect(name)
        return lost
