"""The other process: a receiver with its own pool, steered over a pipe. It ends with the pipe."""

import multiprocessing
import os
import resource
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transfer.allocation import BlockPool, Blocks
from transfer.bench.limits import receive_all, send_all
from transfer.bench.memory import Buffer
from transfer.courier import Courier, PeerOffer
from transfer.layouts import KvLayout, KvPool
from transfer.receiver import Receiver
from transfer.reservations import Completed, Effect, Reservations, Sender
from transfer.transport.base import Held, Region, TransportError
from transfer.transport.nixl import NixlSettings, NixlTransport

START_SECONDS = 60.0
ANSWER_SECONDS = 30.0


class PoolShape(NamedTuple):
    layout: KvLayout
    blocks: int
    block_major: bool = False
    huge_pages: bool = True

    def pool(self, base: int) -> KvPool:
        make = KvPool.block_major if self.block_major else KvPool.plane_major
        return make(self.layout, 0, self.blocks, base)

    @property
    def bytes(self) -> int:
        return self.blocks * self.layout.block_bytes


class Seen(NamedTuple):
    """An effect and when the receiver saw it, on CLOCK_MONOTONIC, which both processes share."""

    at: float
    effect: Effect


class Usage(NamedTuple):
    cpu_seconds: float
    resident_bytes: int
    descriptors: int
    held: Held


def usage(held: Held) -> Usage:
    """What this process has used and holds."""
    times = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Usage(
        times.ru_utime + times.ru_stime, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), held
    )


def open_courier(
    name: str, incarnation: int, shape: PoolShape, buffer: Buffer, settings: NixlSettings
) -> tuple[NixlTransport, Courier]:
    """A courier over NIXL whose pool is `buffer`."""
    transport = NixlTransport(name, settings)
    regions = [Region(buffer.address, buffer.size)]
    return transport, Courier(transport, shape.pool(buffer.address), regions, incarnation, time.monotonic)


class _Child:
    def __init__(self, name: str, incarnation: int, shape: PoolShape, settings: NixlSettings) -> None:
        self.name, self.shape, self.settings = name, shape, settings
        self.buffer = Buffer(shape.bytes, huge_pages=shape.huge_pages)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.seen: list[Seen] = []
        self.open(incarnation)

    def open(self, incarnation: int) -> None:
        self.transport, self.courier = open_courier(self.name, incarnation, self.shape, self.buffer, self.settings)
        self.reservations = Reservations(BlockPool(self.shape.blocks), incarnation)
        self.receiver = Receiver(
            self.courier,
            self.reservations,
            time.monotonic,
            lambda effect: self.seen.append(Seen(time.monotonic(), effect)),
        )

    def answer(self, verb: str, *arguments: Any) -> Any:
        match verb:
            case "connect":
                return self.courier.connect(*arguments)
            case "restart":
                self.courier.close()
                self.seen.clear()
                return self.open(*arguments)
            case "offer":
                return self.courier.offer()
            case "reserve":
                return self.receiver.reserve(*arguments)
            case "cancel":
                return self.receiver.cancel(*arguments)
            case "take":
                seen, self.seen = self.seen, []
                return seen
            case "free":
                return self.reservations.pool.free(*arguments)
            case "fill":
                return self.buffer.fill(*arguments)
            case "read":
                offset, length = arguments
                return self.buffer.array[offset : offset + length].copy()
            case "address":
                return self.buffer.address
            case "listen":
                self.listener.listen(1)
                return self.listener.getsockname()
            case "receive":
                (length,) = arguments
                return receive_all(self.listener, self.buffer.array[:length])
            case "held_blocks":
                return self.reservations.held_blocks
            case "usage":
                return usage(self.transport.held())
        raise ValueError(f"verb: {verb} is not known")


def _serve(pipe: Connection, name: str, incarnation: int, shape: PoolShape, settings: NixlSettings) -> None:
    # An interrupt at the terminal is the parent's to handle; it ends this process with the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = _Child(name, incarnation, shape, settings)
    except TransportError as error:
        pipe.send(error)
        return
    pipe.send(None)
    try:
        while True:
            if not pipe.poll(child.courier.step()):
                continue
            try:
                answer = child.answer(*pipe.recv())
            except (TransportError, ValueError, OSError) as error:
                answer = error
            pipe.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        child.courier.close()


class Peer:
    """A receiver in a process of its own. A context manager: the process is gone afterwards, also if it hangs."""

    def __init__(self, name: str, incarnation: int, shape: PoolShape, settings: NixlSettings | None = None) -> None:
        """Raises TransportError when the transport does not start there, TimeoutError when nothing does."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.name, self.incarnation, self.shape = name, incarnation, shape
        self._process = context.Process(
            target=_serve, args=(theirs, name, incarnation, shape, settings or NixlSettings()), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self._received(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        if pid is None:
            raise RuntimeError("the peer has not started")
        return pid

    def _received(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"{self.name} has not answered for {seconds:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._received(ANSWER_SECONDS)

    def offer(self) -> PeerOffer:
        offer: PeerOffer = self._ask("offer")
        return offer

    def connect(self, offer: PeerOffer) -> None:
        self._ask("connect", offer)

    def restart(self) -> None:
        """End the receiver and start it again under its name, in the same process: far quicker than a new one."""
        self.incarnation += 1
        self._ask("restart", self.incarnation)

    def reserve(self, blocks: int, parts: Sequence[Sender], seconds: float) -> tuple[int, Blocks] | None:
        reserved: tuple[int, Blocks] | None = self._ask("reserve", blocks, parts, seconds)
        return reserved

    def cancel(self, epoch: int) -> None:
        self._ask("cancel", epoch)

    def take(self) -> list[Seen]:
        """Effects since the last call."""
        seen: list[Seen] = self._ask("take")
        return seen

    def free(self, blocks: Blocks) -> None:
        self._ask("free", blocks)

    def fill(self, seed: int) -> None:
        self._ask("fill", seed)

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        held: npt.NDArray[np.uint8] = self._ask("read", offset, length)
        return held

    def address(self) -> int:
        return int(self._ask("address"))

    def raw_tcp(self, data: npt.NDArray[np.uint8]) -> float:
        """Seconds in which `data` reaches the peer's memory over a plain TCP stream."""
        address = self._ask("listen")
        self._pipe.send(("receive", len(data)))
        started = send_all(address, data)
        return float(self._received(ANSWER_SECONDS)) - started

    def held_blocks(self) -> int:
        return int(self._ask("held_blocks"))

    def usage(self) -> Usage:
        used: Usage = self._ask("usage")
        return used

    def freeze(self) -> None:
        """Stop the process without ending it."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(0.0 if self._process.exitcode is not None else 2.0)
        if self._process.is_alive():
            self.kill()
        self._process.close()


def completed(seen: Sequence[Seen]) -> list[tuple[float, Completed]]:
    return [(at, effect) for at, effect in seen if isinstance(effect, Completed)]
