"""Runs a gateway until SIGTERM or SIGINT."""

import asyncio
import signal

from pd_shadow.gateway.app import Gateway
from pd_shadow.gateway.config import GatewayConfig


async def serve(config: GatewayConfig) -> None:
    """Serve until a signal asks to stop; returns when running calls have ended. Raises OSError if it cannot bind."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config)
    try:
        await gateway.start()
        await stop.wait()
    finally:
        await gateway.stop()
