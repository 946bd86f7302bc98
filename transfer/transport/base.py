"""What the rest of `transfer` asks of a transport: registered memory, descriptor lists, one-sided transfers, messages.

Every call belongs to one thread (`courier_thread.py` owns it) and may hold that thread: on one host the copy happens
inside `post`. Handles are plain numbers that are valid until they are released; releasing a transfer is *not* a
cancel, bytes still in flight may land afterwards.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

Registration = NewType("Registration", int)
DescriptorList = NewType("DescriptorList", int)
Transfer = NewType("Transfer", int)
Indices = npt.NDArray[np.int32]
"""Positions in a descriptor list."""
Rows = npt.NDArray[np.uint64]
"""Shape (n, 5): address, length, device, stride, count; a row is `count` descriptors of `length` bytes."""


class Memory(Enum):
    DRAM = "DRAM"
    VRAM = "VRAM"


class Operation(Enum):
    WRITE = "WRITE"
    READ = "READ"


class Region(NamedTuple):
    """Memory to register: bytes [address, address + length) of a device."""

    address: int
    length: int
    device: int = 0


class Message(NamedTuple):
    """A short text from a peer; `peer` is the name of its transport."""

    peer: str
    body: bytes


class Held(NamedTuple):
    """What a transport has not released yet."""

    registrations: int = 0
    lists: int = 0
    transfers: int = 0
    peers: int = 0


class TransportError(Exception):
    """The transport refused or failed an operation; the peer may be well."""


class PeerLostError(TransportError):
    """The peer's process or connection is gone: nothing posted to it will finish, nothing more is read or written."""


class Transport(Protocol):
    """Raises TransportError from every method; PeerLostError from those that talk to a peer."""

    @property
    def name(self) -> str:
        """Under which peers know this transport."""

    def metadata(self) -> bytes:
        """What a peer needs to `connect`; taken after `register`, whose regions it names."""

    def register(self, regions: Sequence[Region]) -> Registration: ...

    def deregister(self, registration: Registration) -> None:
        """Not a fence: a peer that knows the region may still write it."""

    def connect(self, name: str, metadata: bytes) -> None:
        """Raises TransportError if the metadata is another peer's or one of this name is connected."""

    def disconnect(self, name: str) -> None:
        """Forget the peer; lists prepared for it must not be used again. Unknown names are ignored."""

    def prepare(self, rows: Rows, peer: str | None = None) -> DescriptorList:
        """A list of memory of `peer`, or of our own when None."""

    def release_list(self, descriptors: DescriptorList) -> None: ...

    def post(
        self,
        operation: Operation,
        local: tuple[DescriptorList, Indices],
        remote: tuple[DescriptorList, Indices],
    ) -> tuple[Transfer, bool]:
        """Start a transfer; True when it is already over. Runs that are consecutive on both sides move as one."""

    def poll(self, transfer: Transfer) -> bool:
        """Whether the transfer is over, all its bytes in place."""

    def release(self, transfer: Transfer) -> None: ...

    def send(self, peer: str, body: bytes) -> None: ...

    def receive(self) -> list[Message]:
        """Messages that came since the last call."""

    def held(self) -> Held: ...

    def close(self) -> None:
        """Release everything, in the order that the transport needs. May be called twice."""
