"""The courier's thread, and the way to it from an event loop. The loop never waits for a post: it is told."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from transfer.courier import Courier, Drained, Push, PushOutcome, PushReason
from transfer.transport.base import TransportError

Result = TypeVar("Result")


class Ticket(NamedTuple):
    """The two ends of a push; neither future is ever given an exception. Cancelling them cancels nothing."""

    outcome: "asyncio.Future[PushOutcome]"
    drained: "asyncio.Future[Drained]"


class CourierThread:
    """Runs one courier. Start with `start`, end with `close`; both from an event loop."""

    def __init__(self, open_courier: Callable[[], Courier], *, close_seconds: float = 2.0) -> None:
        """`open_courier` runs on the thread: a transport belongs to the thread that made it."""
        self._open_courier = open_courier
        self._close_seconds = close_seconds
        self._commands: queue.SimpleQueue[Callable[[Courier | None], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    async def start(self) -> None:
        """Raises what `open_courier` raises."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(loop, ready), name="courier", daemon=True)
        self._thread.start()
        await ready

    async def call(self, work: Callable[[Courier], Result]) -> Result:
        """Run `work` on the thread. Raises what it raises, and TransportError when the courier has ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def run(courier: Courier | None) -> None:
            try:
                if courier is None:
                    raise TransportError(f"the courier has ended: {self._failure or 'closed'}")
                result = work(courier)
            except Exception as error:
                _tell(loop, future, error=error)
            else:
                _tell(loop, future, result)

        self._submit(run)
        return await future

    def push(self, push: Push) -> Ticket:
        """Send a part of a chunk; TRANSPORT_ERROR and ABANDONED after the courier has ended.

        Raises ValueError as `Push.check` does.
        """
        push.check()
        loop = asyncio.get_running_loop()
        ticket = Ticket(loop.create_future(), loop.create_future())

        def begin(courier: Courier | None) -> None:
            if courier is None:
                detail = f"the courier has ended: {self._failure or 'closed'}"
                _tell(loop, ticket.outcome, PushOutcome(PushReason.TRANSPORT_ERROR, detail=detail))
                _tell(loop, ticket.drained, Drained.ABANDONED)
                return
            courier.push(
                push,
                lambda outcome: _tell(loop, ticket.outcome, outcome),
                lambda drained: _tell(loop, ticket.drained, drained),
            )

        self._submit(begin)
        return ticket

    async def close(self) -> None:
        """Cancel every push, wait for `close_seconds` at most until they have drained, and release everything."""
        if self._thread is None:
            return
        with self._lock:
            self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _submit(self, command: Callable[[Courier | None], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._commands.put(command)
                return
        command(None)

    def _run(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[None]") -> None:
        try:
            courier = self._open_courier()
        except Exception as error:
            self._failure = error
            self._refuse_the_rest()
            _tell(loop, ready, error=error)
            return
        _tell(loop, ready, None)
        try:
            self._serve(courier)
            courier.cancel_all()
            give_up = time.monotonic() + self._close_seconds
            while courier.pushes and time.monotonic() < give_up:
                time.sleep(courier.step())
        except Exception as error:
            self._failure = error
        finally:
            # Pushes end before the thread does, also when a step has failed in a way nobody thought of.
            with contextlib.suppress(TransportError):
                courier.close()
            self._refuse_the_rest()

    def _serve(self, courier: Courier) -> None:
        wait = 0.0
        while True:
            try:
                command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            except queue.Empty:
                wait = courier.step()
                continue
            if command is None:
                return
            command(courier)
            wait = 0.0

    def _refuse_the_rest(self) -> None:
        with self._lock:
            self._ended.set()
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command(None)


def _tell(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[Result]",
    result: Result | None = None,
    error: Exception | None = None,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    # A loop that has closed meanwhile has nobody left to tell.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)
