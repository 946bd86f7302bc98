"""The engine's time: the machine's monotonic clock, or a multiple of it."""

import asyncio
import time


class EngineClock:
    """Seconds of engine time; `speed` of them pass in one real second."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed

    def now(self) -> float:
        return time.monotonic() * self.speed

    async def sleep_until(self, when: float) -> None:
        """Wait until that engine time; lets others run even when it is over already."""
        await asyncio.sleep(max(0.0, (when - self.now()) / self.speed))
