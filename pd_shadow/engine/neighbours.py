"""Engines that share an accelerator tell each other, through shared memory, that they have normal work.

An iteration controller sees its own engine only. Where several engines share a device (MPS, time slicing, a rig's CPU),
shadow work of one is paid for by its neighbours' normal traffic; a look at their marks takes a microsecond, a round
trip to the controller a thousand times that.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from pathlib import Path

SLOTS = 64
STALE_SECONDS = 5.0
"""A mark this old is that of a process that died at work."""
_SLOT = struct.Struct("=qd")
DEFAULT_FOLDER = Path("/dev/shm")


class NeighboursFullError(RuntimeError):
    """More processes share the hardware than the board has slots for."""


class Neighbours:
    """One process's slot on the board of a piece of hardware, and a view of the others'.

    Times are seconds of the system-wide monotonic clock. Raises NeighboursFullError when all slots are taken by living
    processes, OSError when the board cannot be made.
    """

    def __init__(self, hardware: str, folder: Path = DEFAULT_FOLDER, pid: int | None = None) -> None:
        # A name of fixed length and harmless characters, whatever the operator wrote.
        digest = hashlib.sha256(hardware.encode()).hexdigest()[:16]
        self._pid = os.getpid() if pid is None else pid
        self._file = (folder / f"pd-shadow-hardware-{digest}").open("a+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._file.truncate(SLOTS * _SLOT.size)
            self._board = mmap.mmap(self._file.fileno(), SLOTS * _SLOT.size)
            self._slot = self._free_slot()
            self._write(0.0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def mark(self, now: float, *, busy: bool) -> None:
        """Say whether this process has normal work; a busy one says it again with every iteration."""
        self._write(now if busy else 0.0)

    def busy(self, now: float) -> bool:
        """Whether another process on this hardware has normal work."""
        for slot in range(SLOTS):
            if slot != self._slot:
                pid, marked = _SLOT.unpack_from(self._board, slot * _SLOT.size)
                if pid and now - marked < STALE_SECONDS:
                    return True
        return False

    def close(self) -> None:
        """Give the slot back."""
        _SLOT.pack_into(self._board, self._slot * _SLOT.size, 0, 0.0)
        self._board.close()
        self._file.close()

    def _write(self, marked: float) -> None:
        _SLOT.pack_into(self._board, self._slot * _SLOT.size, self._pid, marked)

    def _free_slot(self) -> int:
        for slot in range(SLOTS):
            pid, _ = _SLOT.unpack_from(self._board, slot * _SLOT.size)
            if not pid or not _alive(pid):
                return slot
        raise NeighboursFullError(f"{SLOTS} processes share this hardware already")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
