"""How KV comes from P to D: behind one interface, so that real transports can take the timed link's place."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp
import orjson

from pd_shadow.engine.emulated.block_pool import Content
from pd_shadow.engine.emulated.clock import EngineClock
from pd_shadow.engine.emulated.handoff import RemoteKv

READ_PATH = "/emulated/kv/read"
LAY_PATH = "/emulated/kv/lay"
READ_SECONDS = 5.0
"""Real time that P may take to answer what is in its blocks."""


class TransferFailedError(Exception):
    """The KV did not come: P is gone, or holds it no longer. `status` is P's HTTP status, where it is what failed."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


class Mover(Protocol):
    """How one instance gets KV from others, and gives it to them."""

    name: str
    """What moves the KV, as /version and the demo tell it."""

    async def start(self) -> None:
        """Get ready. Raises OSError when that fails."""
        ...

    async def pull(self, source: RemoteKv, remote: Sequence[int], blocks: Sequence[int], size: int) -> list[Content]:
        """Read the source's blocks `remote` into our `blocks`, and tell it that it may let go of all it holds.

        They are `size` bytes of KV altogether; without blocks it only tells. Raises TransferFailedError.
        """
        ...

    def lay(self, blocks: Sequence[int], contents: Sequence[Content]) -> dict[str, Any] | None:
        """Put the KV of our blocks where others can read it, and say how; None from one that moves no bytes."""
        ...

    async def close(self) -> None: ...


def nixl_name(divisor: int) -> str:
    """What a mover over NIXL is called."""
    return f"NIXL over UCX, 1/{divisor} of the KV's bytes, in the time of the timed link model"


class TimedLink:
    """One transfer after the other at a fixed rate; no byte of KV moves, only what its blocks hold is asked for."""

    name = "timed link model"

    def __init__(self, clock: EngineClock, bytes_per_second: float) -> None:
        self._clock = clock
        self._rate = bytes_per_second
        # Engine time at which the link has moved all it was asked for.
        self._free_at = 0.0
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        return

    async def pull(self, source: RemoteKv, remote: Sequence[int], blocks: Sequence[int], size: int) -> list[Content]:
        if remote:
            await self._clock.sleep_until(self.occupy(size))
        answer = await self.ask(source, READ_PATH, remote)
        try:
            contents = [bytes.fromhex(each) for each in answer["contents"]]
        except (ValueError, KeyError, TypeError) as error:
            raise TransferFailedError(type(error).__name__) from error
        if len(contents) != len(remote):
            raise TransferFailedError("P sent other blocks than were asked for")
        return contents

    def lay(self, blocks: Sequence[int], contents: Sequence[Content]) -> dict[str, Any] | None:
        return None

    def occupy(self, size: int) -> float:
        """The engine time at which so many bytes more will have passed."""
        self._free_at = max(self._clock.now(), self._free_at) + size / self._rate
        return self._free_at

    async def ask(self, source: RemoteKv, path: str, blocks: Sequence[int]) -> dict[str, Any]:
        """What P answers about blocks it holds for us. Raises TransferFailedError."""
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_SECONDS))
        url = f"http://{source.host}:{source.port}{path}"
        body = orjson.dumps({"request_id": source.request_id, "blocks": list(blocks)})
        try:
            async with self._http.post(url, data=body) as answer:
                if answer.status != 200:
                    raise TransferFailedError(f"P answered {answer.status}", answer.status)
                said = orjson.loads(await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise TransferFailedError(type(error).__name__) from error
        if not isinstance(said, dict):
            raise TransferFailedError("P answered something else")
        return said

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            # aiohttp closes sockets in the loop's next turn.
            await asyncio.sleep(0)
