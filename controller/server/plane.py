"""The running control plane: one core, a clock, and the queues its effects go to.

Everything that touches the core happens in `turn`, without an await inside: decisions are atomic.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from controller.config import ControllerConfig
from controller.core.cluster import Cluster
from controller.core.effects import DropSession, Effect, Event
from controller.core.rejection import RejectedError
from controller.server import convert
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.common.logs import get_logger

# A dispatcher or watcher this far behind is cut off; it reconnects and starts afresh.
QUEUE_LIMIT = 10_000

log = get_logger("controller")


class Subscription:
    """One shadow stream of one gateway."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self._queue: asyncio.Queue[pb.WatchShadowWorkResponse | None] = asyncio.Queue(QUEUE_LIMIT)

    def offer(self, message: pb.WatchShadowWorkResponse) -> bool:
        """Queue a message; False when the dispatcher is too far behind."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True

    def close(self) -> None:
        """End the stream once what is queued has gone out."""
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[pb.WatchShadowWorkResponse]:
        while (message := await self._queue.get()) is not None:
            yield message


class Plane:
    """The core and its surroundings."""

    def __init__(self, config: ControllerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Events carry the core's clock; operators want the wall's.
        self._wall_offset = time.time() - clock()
        self.cluster = Cluster(config, epoch=f"{time.time_ns():x}")
        self.closing = False
        self._subscriptions: dict[str, Subscription] = {}
        self._changed = asyncio.Event()
        self._last_event = 0

    def now(self) -> float:
        return self._clock()

    def wall(self, core_time: float) -> float:
        """Seconds since the epoch for a time of the core's clock."""
        return core_time + self._wall_offset

    @contextlib.contextmanager
    def turn(self) -> Iterator[tuple[Cluster, float]]:
        """One decision: the core and the time; its effects go out at the end, also when it refused."""
        try:
            yield self.cluster, self._clock()
        finally:
            self._flush()

    def subscribe(self, gateway_id: str) -> Subscription:
        """Open a gateway's shadow stream; an older stream of the same gateway ends. Raises RejectedError."""
        limit = self.cluster.config.limits.max_streams
        if gateway_id not in self._subscriptions and len(self._subscriptions) >= limit:
            raise RejectedError(
                common.REJECTION_REASON_TOO_MANY_STREAMS, f"{limit} streams are open, all limits.max_streams allows"
            )
        old = self._subscriptions.get(gateway_id)
        if old is not None:
            old.close()
        subscription = self._subscriptions[gateway_id] = Subscription(gateway_id)
        with self.turn() as (cluster, now):
            cluster.dispatcher_connected(now, gateway_id)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """A stream ended; only the gateway's latest one counts."""
        if self._subscriptions.get(subscription.gateway_id) is subscription:
            del self._subscriptions[subscription.gateway_id]
            with self.turn() as (cluster, now):
                cluster.dispatcher_left(now, subscription.gateway_id)

    async def changes(self) -> None:
        """Wait until instances changed or events came."""
        changed = self._changed
        await changed.wait()

    def close(self) -> None:
        """End every stream: gateways and watchers reconnect elsewhere or later."""
        self.closing = True
        for subscription in self._subscriptions.values():
            subscription.close()
        self._wake()

    def _flush(self) -> None:
        for effect in self.cluster.take_effects():
            self._route(effect)
        events = self.cluster.events(self._last_event)
        if events:
            self._last_event = events[-1].sequence
            for event in events:
                self._log(event)
            self._wake()

    def _route(self, effect: Effect) -> None:
        subscription = self._subscriptions.get(effect.gateway_id)
        if subscription is None:
            return
        if not subscription.offer(convert.work(effect)) and not isinstance(effect, DropSession):
            log.warning("dispatcher_too_slow", gateway=effect.gateway_id, queued=QUEUE_LIMIT)
            subscription.close()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @staticmethod
    def _log(event: Event) -> None:
        log.info(convert.event_name(event.kind), subject=event.subject, reason=event.reason, detail=event.message)
