"""Runs emulated engines, one or many in this process, until SIGTERM or SIGINT."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

from pd_shadow.common.logs import get_logger
from pd_shadow.engine.emulated.config import EmulatedEngines
from pd_shadow.engine.emulated.engine import Engine

log = get_logger("emulated")


@contextlib.asynccontextmanager
async def running(config: EmulatedEngines) -> AsyncIterator[list[Engine]]:
    """All engines, serving inside the block. Raises OSError when one cannot listen."""
    engines: list[Engine] = []
    try:
        for one in config.all():
            engine = Engine(one, config.attach)
            await engine.start()
            engines.append(engine)
        yield engines
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


async def serve(config: EmulatedEngines) -> None:
    """Serve until a signal asks to stop; requests in flight get a second to end. Raises OSError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as engines:
        for engine in engines:
            log.info(
                "engine_serving",
                engine=engine.config.name,
                model=engine.config.served_name,
                role=engine.config.role.value,
                url=engine.url,
                speed=engine.config.speed,
                kv_transfer=engine.mover.name,
            )
        await stop.wait()
