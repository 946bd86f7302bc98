"""Transports that copy within this process: what NIXL does, at once, and nothing else."""

import ctypes
from collections.abc import Sequence

import numpy as np

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
    TransportError,
)


class Network:
    """Who can be reached under which name."""

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}


class MemoryTransport:
    def __init__(self, name: str, network: Network) -> None:
        self._name = name
        self._network = network
        network.transports[name] = self
        self._inbox: list[Message] = []
        self._peers: dict[str, MemoryTransport] = {}
        self._registrations: set[int] = set()
        self._lists: dict[int, tuple[Rows, str | None]] = {}
        self._transfers: set[int] = set()
        self._handles = 0

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> bytes:
        return self._name.encode()

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    def register(self, regions: Sequence[Region]) -> Registration:
        handle = self._handle()
        self._registrations.add(handle)
        return Registration(handle)

    def deregister(self, registration: Registration) -> None:
        self._registrations.remove(registration)

    def connect(self, name: str, metadata: bytes) -> None:
        if name in self._peers or metadata != name.encode():
            raise TransportError(f"cannot connect {name}")
        self._peers[name] = self._network.transports[name]

    def disconnect(self, name: str) -> None:
        self._peers.pop(name, None)

    def _peer(self, name: str) -> "MemoryTransport":
        peer = self._peers[name]
        if self._network.transports.get(name) is not peer:
            raise PeerLostError(f"{name} is gone")
        return peer

    def prepare(self, rows: Rows, peer: str | None = None) -> DescriptorList:
        handle = self._handle()
        self._lists[handle] = (rows, peer)
        return DescriptorList(handle)

    def release_list(self, descriptors: DescriptorList) -> None:
        del self._lists[descriptors]

    def _addresses(self, descriptors: DescriptorList, indices: Indices) -> list[tuple[int, int]]:
        rows = self._lists[descriptors][0].astype(np.int64)
        flat = np.concatenate([row[0] + np.arange(row[4]) * row[3] for row in rows])
        return [(int(flat[index]), int(rows[0][1])) for index in indices]

    def post(
        self,
        operation: Operation,
        local: tuple[DescriptorList, Indices],
        remote: tuple[DescriptorList, Indices],
    ) -> tuple[Transfer, bool]:
        peer = self._lists[remote[0]][1]
        assert peer is not None
        self._peer(peer)
        handle = self._handle()
        self._transfers.add(handle)
        for (own, size), (theirs, _) in zip(self._addresses(*local), self._addresses(*remote), strict=True):
            source, target = (own, theirs) if operation is Operation.WRITE else (theirs, own)
            ctypes.memmove(target, source, size)
        return Transfer(handle), True

    def poll(self, transfer: Transfer) -> bool:
        return transfer in self._transfers

    def release(self, transfer: Transfer) -> None:
        self._transfers.remove(transfer)

    def send(self, peer: str, body: bytes) -> None:
        self._peer(peer)._inbox.append(Message(self._name, body))

    def receive(self) -> list[Message]:
        arrived, self._inbox = self._inbox, []
        return arrived

    def held(self) -> Held:
        return Held(len(self._registrations), len(self._lists), len(self._transfers), len(self._peers))

    def close(self) -> None:
        self._registrations.clear()
        self._lists.clear()
        self._transfers.clear()
        self._peers.clear()
        if self._network.transports.get(self._name) is self:
            del self._network.transports[self._name]
