"""One decode instance's inbound link for code that runs on an event loop: gate, pace and ledger in one place."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from transfer.gate import GateState, LinkGate
from transfer.ledger import LinkLedger
from transfer.pacing import ShadowPacer


class Slot:
    """What a transfer has moved: set `bytes` before it ends."""

    def __init__(self) -> None:
        self.bytes = 0


class Link:
    """Normal transfers pass at once; shadow chunks wait, in order, until the gate is open and the pace allows it."""

    def __init__(self, clock: Callable[[], float], pacer: ShadowPacer | None = None) -> None:
        self.gate = LinkGate()
        self.ledger = LinkLedger(self.gate, clock())
        self._clock = clock
        self._pacer = pacer
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @contextmanager
    def normal(self) -> Iterator[Slot]:
        slot = Slot()
        self._change(self.gate.begin_normal)
        try:
            yield slot
        finally:
            self._change(self.gate.end_normal)
            self.ledger.carried(normal=slot.bytes)

    @asynccontextmanager
    async def shadow(self) -> AsyncIterator[Slot]:
        """Room for one chunk. Stay inside until the push has *drained*: what is in flight is on the link."""
        async with self._turn:
            if self._pacer is not None:
                await self._pacer.wait()
            while self.gate.state is not GateState.OPEN:
                await self._changed.wait()
            self._change(self.gate.begin_shadow)
        slot = Slot()
        try:
            yield slot
        finally:
            self._change(self.gate.end_shadow)
            self.ledger.carried(shadow=slot.bytes)
            if self._pacer is not None:
                self._pacer.moved(slot.bytes)

    def pause(self, paused: bool) -> None:
        """Whether shadow chunks are held back altogether; one in flight ends."""
        self.gate.paused = paused
        self._wake()

    def _change(self, change: Callable[[], None]) -> None:
        self.ledger.settle(self._clock())
        change()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
