"""A transport that fails on purpose, for tests of everything above it.

Faults are given per step and take effect once each, in order; a lost peer and a hung one stay so until healed.
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from transfer.transport.base import (
    DescriptorList,
    Held,
    Indices,
    Message,
    Operation,
    PeerLostError,
    Region,
    Registration,
    Rows,
    Transfer,
    Transport,
    TransportError,
)


class Step(Enum):
    REGISTER = "register"
    CONNECT = "connect"
    PREPARE = "prepare"
    POST = "post"
    POLL = "poll"
    RELEASE = "release"
    SEND = "send"
    RECEIVE = "receive"


class Fault(Enum):
    ERROR = "error"
    """The step raises TransportError."""
    DROP = "drop"
    """A message is lost on its way."""
    DELAY = "delay"
    """A transfer stays in flight, or a message stays behind, for `polls` more calls."""
    PARTIAL = "partial"
    """A post moves the first half and then fails."""
    PEER_LOST = "peer_lost"
    """The step, and every later one that talks to the peer, raises PeerLostError."""
    HANG = "hang"
    """Transfers to the peer stay in flight until `heal`, although their bytes may land."""


class _Planned(NamedTuple):
    fault: Fault
    polls: int


class FaultyTransport:
    """`inner` with faults. Transfers are attributed to the peer whose list was prepared."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._planned: dict[Step, deque[_Planned]] = {step: deque() for step in Step}
        self._lost: set[str] = set()
        self._hung: set[str] = set()
        self._list_peer: dict[DescriptorList, str] = {}
        self._transfer_peer: dict[Transfer, str] = {}
        self._delays: dict[Transfer, int] = {}
        self._broken: set[Transfer] = set()
        self._late: deque[tuple[int, Message]] = deque()

    def plan(self, step: Step, fault: Fault, *, after: int = 0, polls: int = 3) -> None:
        """Let the next `step` but `after` fail so. Raises ValueError for a fault that the step cannot have."""
        allowed = {
            Fault.ERROR: set(Step),
            Fault.DROP: {Step.SEND, Step.RECEIVE},
            Fault.DELAY: {Step.POST, Step.RECEIVE},
            Fault.PARTIAL: {Step.POST},
            Fault.PEER_LOST: {Step.CONNECT, Step.PREPARE, Step.POST, Step.POLL, Step.SEND},
            Fault.HANG: {Step.POST},
        }
        if step not in allowed[fault]:
            raise ValueError(f"step: {step.value} cannot {fault.value}")
        steps = self._planned[step]
        steps.extend([_Planned(Fault.DELAY, 0)] * after)
        steps.append(_Planned(fault, polls))

    def heal(self) -> None:
        """Hung peers move again. Lost ones are found again by `connect`."""
        self._hung.clear()

    def _meet(self, step: Step, peer: str | None = None) -> _Planned | None:
        if peer in self._lost:
            raise PeerLostError(f"{peer} is lost")
        if not self._planned[step]:
            return None
        planned = self._planned[step].popleft()
        if planned.fault is Fault.ERROR:
            raise TransportError(f"{step.value} failed")
        if planned.fault is Fault.PEER_LOST and peer is not None:
            self._lost.add(peer)
            raise PeerLostError(f"{peer} was lost at {step.value}")
        if planned.fault is Fault.HANG and peer is not None:
            self._hung.add(peer)
        return planned

    @property
    def name(self) -> str:
        return self._inner.name

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def register(self, regions: Sequence[Region]) -> Registration:
        self._meet(Step.REGISTER)
        return self._inner.register(regions)

    def deregister(self, registration: Registration) -> None:
        self._inner.deregister(registration)

    def connect(self, name: str, metadata: bytes) -> None:
        self._lost.discard(name)
        self._meet(Step.CONNECT, name)
        self._inner.connect(name, metadata)

    def disconnect(self, name: str) -> None:
        self._hung.discard(name)
        self._inner.disconnect(name)

    def prepare(self, rows: Rows, peer: str | None = None) -> DescriptorList:
        self._meet(Step.PREPARE, peer)
        handle = self._inner.prepare(rows, peer)
        if peer is not None:
            self._list_peer[handle] = peer
        return handle

    def release_list(self, descriptors: DescriptorList) -> None:
        self._list_peer.pop(descriptors, None)
        self._inner.release_list(descriptors)

    def post(
        self,
        operation: Operation,
        local: tuple[DescriptorList, Indices],
        remote: tuple[DescriptorList, Indices],
    ) -> tuple[Transfer, bool]:
        peer = self._list_peer[remote[0]]
        planned = self._meet(Step.POST, peer)
        fault = planned.fault if planned is not None else None
        if fault is Fault.PARTIAL:
            half = max(1, len(local[1]) // 2)
            local, remote = (local[0], local[1][:half]), (remote[0], remote[1][:half])
        transfer, over = self._inner.post(operation, local, remote)
        self._transfer_peer[transfer] = peer
        if fault is Fault.PARTIAL:
            self._broken.add(transfer)
            return transfer, False
        if planned is not None and fault is Fault.DELAY and planned.polls:
            self._delays[transfer] = planned.polls
            return transfer, False
        return transfer, over and peer not in self._hung

    def poll(self, transfer: Transfer) -> bool:
        peer = self._transfer_peer[transfer]
        self._meet(Step.POLL, peer)
        if peer in self._hung:
            return False
        if transfer in self._broken:
            raise TransportError("the transfer failed half-way")
        if self._delays.get(transfer, 0):
            self._delays[transfer] -= 1
            return False
        return self._inner.poll(transfer)

    def release(self, transfer: Transfer) -> None:
        self._meet(Step.RELEASE)
        self._inner.release(transfer)
        self._transfer_peer.pop(transfer, None)
        self._delays.pop(transfer, None)
        self._broken.discard(transfer)

    def send(self, peer: str, body: bytes) -> None:
        planned = self._meet(Step.SEND, peer)
        if planned is None or planned.fault is not Fault.DROP:
            self._inner.send(peer, body)

    def receive(self) -> list[Message]:
        arrived = self._inner.receive()
        ready = [message for polls, message in self._late if polls <= 1]
        self._late = deque((polls - 1, message) for polls, message in self._late if polls > 1)
        for message in arrived:
            planned = self._meet(Step.RECEIVE)
            if planned is not None and planned.fault is Fault.DROP:
                continue
            if planned is not None and planned.fault is Fault.DELAY and planned.polls:
                self._late.append((planned.polls, message))
            else:
                ready.append(message)
        return ready

    def held(self) -> Held:
        return self._inner.held()

    def close(self) -> None:
        self._inner.close()
