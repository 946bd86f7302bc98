"""An operator's cap on shadow bandwidth, kept between chunks and not within them.

A chunk moves at the speed of the link and the link rests after it: a chunk that was slowed down instead would be in
the way of normal transfers for longer.
"""

from asyncio_throttle.throttler import Throttler


class ShadowPacer:
    """Averages `bytes_per_second` over chunks of any size. One chunk at a time: the link's gate sees to it."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second: must be above 0, is {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        # One start per period; the period is what the chunk before is worth.
        self._throttler = Throttler(rate_limit=1, period=0.0)

    async def wait(self) -> None:
        """Until the next chunk may start; it counts as started when this returns."""
        async with self._throttler:
            self._throttler.period = 0.0

    def moved(self, count: int) -> None:
        """The chunk that was started has moved `count` bytes."""
        self._throttler.period = count / self.bytes_per_second
