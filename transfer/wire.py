"""What sender and receiver of a chunk tell each other: 30 bytes on the transport's own message channel.

A sender says of its part of a reservation that every byte is in place (`DONE`) or that it failed and nothing is in
flight any more (`DRAINED`). A receiver takes a reservation back (`CANCEL`) or asks whether the sender lives (`PROBE`).
"""

import struct
from enum import IntEnum
from typing import NamedTuple

_FORM = struct.Struct("!4sBBQQQ")
_MAGIC = b"PDS1"
NUMBER_MOST = 2**64 - 1


class Kind(IntEnum):
    DONE = 1
    DRAINED = 2
    CANCEL = 3


class Note(NamedTuple):
    """`receiver` is the incarnation that made the reservation, `epoch` its number there, `part` the sender's share."""

    kind: Kind
    receiver: int
    epoch: int
    part: int

    def encode(self) -> bytes:
        return _FORM.pack(_MAGIC, 1, self.kind, self.receiver, self.epoch, self.part)

    @classmethod
    def decode(cls, body: bytes) -> "Note | None":
        """None for what is no note, or one of a version or kind that is not known."""
        if len(body) != _FORM.size:
            return None
        magic, version, kind, receiver, epoch, part = _FORM.unpack(body)
        if magic != _MAGIC or version != 1 or kind not in set(Kind):
            return None
        return cls(Kind(kind), receiver, epoch, part)
