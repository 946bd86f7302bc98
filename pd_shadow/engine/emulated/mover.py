"""How KV comes from P to D: behind one interface, so that real transports can take the timed link's place."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import aiohttp
import orjson

from pd_shadow.engine.emulated.block_pool import Content
from pd_shadow.engine.emulated.clock import EngineClock
from pd_shadow.engine.emulated.handoff import RemoteKv

READ_PATH = "/emulated/kv/read"
READ_SECONDS = 5.0
"""Real time that P may take to answer what is in its blocks."""


class TransferFailedError(Exception):
    """The KV did not come: P is gone, or holds it no longer."""


class Mover(Protocol):
    """The inbound side of one instance."""

    name: str
    """What moves the KV, as /version and the demo tell it."""

    async def pull(self, source: RemoteKv, blocks: Sequence[int], size: int) -> list[Content]:
        """Read `blocks` of the source, `size` bytes of KV altogether, and tell it that it may let go of all it holds.

        Without blocks it only tells. Raises TransferFailedError.
        """
        ...

    async def close(self) -> None: ...


class TimedLink:
    """One transfer after the other at a fixed rate; no byte of KV moves, only what its blocks hold is asked for."""

    name = "timed link model"

    def __init__(self, clock: EngineClock, bytes_per_second: float) -> None:
        self._clock = clock
        self._rate = bytes_per_second
        # Engine time at which the link has moved all it was asked for.
        self._free_at = 0.0
        self._http: aiohttp.ClientSession | None = None

    async def pull(self, source: RemoteKv, blocks: Sequence[int], size: int) -> list[Content]:
        if blocks:
            self._free_at = max(self._clock.now(), self._free_at) + size / self._rate
            await self._clock.sleep_until(self._free_at)
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_SECONDS))
        url = f"http://{source.host}:{source.port}{READ_PATH}"
        body = orjson.dumps({"request_id": source.request_id, "blocks": list(blocks)})
        try:
            async with self._http.post(url, data=body) as answer:
                if answer.status != 200:
                    raise TransferFailedError(f"P answered {answer.status}")
                contents = [bytes.fromhex(each) for each in orjson.loads(await answer.read())["contents"]]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise TransferFailedError(type(error).__name__) from error
        if len(contents) != len(blocks):
            raise TransferFailedError("P sent other blocks than were asked for")
        return contents

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            # aiohttp closes sockets in the loop's next turn.
            await asyncio.sleep(0)
