"""What this machine can do without any library: the denominators of the benchmark's ratios."""

import ctypes
import socket
import time

import numpy as np
import numpy.typing as npt

from transfer.descriptors import ChunkPlan, addresses
from transfer.layouts import KvPool

VECTORS_PER_CALL = 64
_LIBC = ctypes.CDLL(None, use_errno=True)


def merged(plan: ChunkPlan, source: KvPool, target: KvPool) -> npt.NDArray[np.uint64]:
    """The plan's runs as rows of (source address, target address, bytes)."""
    origin = addresses(source, plan.source, plan.piece)
    destination = addresses(target, plan.target, plan.piece)
    joined = (np.diff(origin) == plan.piece.bytes) & (np.diff(destination) == plan.piece.bytes)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    lengths = np.diff(np.concatenate((starts, [len(origin)]))) * plan.piece.bytes
    return np.stack((origin[starts], destination[starts], lengths), axis=1).astype(np.uint64)


def single_copy(pid: int, runs: npt.NDArray[np.uint64], *, write: bool = True) -> float:
    """Seconds in which the kernel copies `runs` between this process and `pid`, with nobody's help.

    Raises OSError where the kernel forbids it (other user, other container).
    """
    call = _LIBC.process_vm_writev if write else _LIBC.process_vm_readv
    call.restype = ctypes.c_ssize_t
    local = np.ascontiguousarray(runs[:, [0, 2]])
    remote = np.ascontiguousarray(runs[:, [1, 2]])
    started = time.perf_counter()
    for begin in range(0, len(runs), VECTORS_PER_CALL):
        count = min(VECTORS_PER_CALL, len(runs) - begin)
        here = ctypes.c_void_p(local.ctypes.data + begin * 16)
        there = ctypes.c_void_p(remote.ctypes.data + begin * 16)
        moved = call(pid, here, ctypes.c_ulong(count), there, ctypes.c_ulong(count), ctypes.c_ulong(0))
        if moved != int(runs[begin : begin + count, 2].sum()):
            raise OSError(ctypes.get_errno(), f"process_vm_{'writev' if write else 'readv'} moved {moved} bytes")
    return time.perf_counter() - started


def send_all(address: tuple[str, int], data: npt.NDArray[np.uint8]) -> float:
    """Send `data` over TCP; CLOCK_MONOTONIC when the first byte was handed over."""
    with socket.create_connection(address) as stream:
        started = time.monotonic()
        stream.sendall(data.data)
    return started


def receive_all(listener: socket.socket, into: npt.NDArray[np.uint8]) -> float:
    """Receive as many bytes as `into` holds; CLOCK_MONOTONIC when the last was there."""
    stream, _ = listener.accept()
    with stream:
        view, filled = into.data, 0
        while filled < len(into):
            count = stream.recv_into(view[filled:])
            if not count:
                raise ConnectionResetError("the sender ended early")
            filled += count
    return time.monotonic()
