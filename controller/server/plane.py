"""The running control plane: one core, a clock, and the queues its effects go to.

Everything that touches the core happens in `turn`, without an await inside: decisions are atomic.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from controller.config import ControllerConfig
from controller.core.cluster import Cluster
from controller.core.effects import DropSession, EngineEffect, Event, GatewayEffect
from controller.core.instance import Facts, InstanceRef
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from controller.server import convert
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import engine_pb2 as engine
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.common.logs import get_logger

# A dispatcher, engine or watcher this far behind is cut off; it reconnects and starts afresh.
QUEUE_LIMIT = 10_000

log = get_logger("controller")

M = TypeVar("M")


class Outgoing(Generic[M]):
    """What goes out on one long stream."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | None] = asyncio.Queue(QUEUE_LIMIT)
        self._closed = False

    def offer(self, message: M) -> bool:
        """Queue a message; False when the other side is too far behind, or the stream ends already."""
        if self._closed:
            return False
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True

    def close(self) -> None:
        """End the stream once what is queued has gone out."""
        self._closed = True
        with contextlib.suppress(asyncio.QueueFull):
            # Only to wake a reader that waits; one with a full queue does not.
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[M]:
        while not (self._closed and self._queue.empty()):
            message = await self._queue.get()
            if message is not None:
                yield message


class Subscription(Outgoing[pb.WatchShadowWorkResponse]):
    """One shadow stream of one gateway."""

    def __init__(self, gateway_id: str) -> None:
        super().__init__()
        self.gateway_id = gateway_id


class Attachment(Outgoing[engine.AttachResponse]):
    """One stream of one instance."""

    def __init__(self, ref: InstanceRef, stream: int) -> None:
        super().__init__()
        self.ref = ref
        self.stream = stream


class Plane:
    """The core and its surroundings."""

    def __init__(self, config: ControllerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Events carry the core's clock; operators want the wall's.
        self._wall_offset = time.time() - clock()
        self.cluster = Cluster(config, epoch=f"{time.time_ns():x}")
        self.closing = False
        # Whether this controller leads; always, unless controllers elect one.
        self.leading: Callable[[], bool] = lambda: True
        self._subscriptions: dict[str, Subscription] = {}
        self._attachments: dict[str, Attachment] = {}
        self._watchers = 0
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()
        self._last_event = 0
        self.started = clock()

    @property
    def active(self) -> bool:
        """Whether gateways and engines are served."""
        return self.leading() and not self.closing

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
        self._check_limit(gateway_id, self._subscriptions)
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

    def attach(self, named: Declared, facts: Facts, resident: Sequence[tuple[SessionKey, int]]) -> Attachment:
        """Open an instance's stream, a Welcome first in it; an older one of that name ends. Raises RejectedError."""
        self._check_limit(named.name, self._attachments)
        with self.turn() as (cluster, now):
            stream = cluster.attach(now, named, facts, resident)
            old = self._attachments.get(named.name)
            if old is not None:
                old.close()
            attachment = Attachment(InstanceRef(named.name, facts.incarnation), stream)
            self._attachments[named.name] = attachment
            # Before the turn ends, and with it come directives.
            interval = cluster.config.discovery.poll_interval_seconds
            attachment.offer(engine.AttachResponse(welcome=engine.Welcome(load_interval_seconds=interval)))
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """An instance's stream ended; only its latest one counts."""
        if self._attachments.get(attachment.ref.name) is attachment:
            del self._attachments[attachment.ref.name]
        with self.turn() as (cluster, now):
            cluster.detach(now, attachment.ref, attachment.stream)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """One more operator's stream inside the block. Raises RejectedError when there are too many."""
        limit = self.cluster.config.limits.max_streams
        if self._watchers >= limit:
            raise _too_many_streams(limit)
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the end of all streams."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    async def changes(self) -> None:
        """Wait until instances changed or events came."""
        changed = self._changed
        await changed.wait()

    def close(self) -> None:
        """End every stream: gateways and watchers reconnect elsewhere or later."""
        self.closing = True
        self._closed.set()
        self._end_streams()

    def step_down(self) -> None:
        """Another controller leads: end every stream, and give up the calls, whose end the other one is told of."""
        self._end_streams()
        with self.turn() as (cluster, now):
            cluster.give_up_calls(now)

    def _end_streams(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.close()
        for attachment in self._attachments.values():
            attachment.close()
        self._wake()

    def _flush(self) -> None:
        for effect in self.cluster.take_effects():
            if isinstance(effect, GatewayEffect):
                self._direct_gateway(effect)
            else:
                self._direct_engine(effect)
        events = self.cluster.events(self._last_event)
        if events:
            self._last_event = events[-1].sequence
            for event in events:
                self._log(event)
            self._wake()

    def _check_limit(self, name: str, streams: Mapping[str, object]) -> None:
        limit = self.cluster.config.limits.max_streams
        if name not in streams and len(streams) >= limit:
            raise _too_many_streams(limit)

    def _direct_engine(self, effect: EngineEffect) -> None:
        attachment = self._attachments.get(effect.instance.name)
        if attachment is None or attachment.ref != effect.instance:
            return
        if not attachment.offer(convert.directive(effect)):
            log.warning("engine_too_slow", instance=effect.instance.name, queued=QUEUE_LIMIT)
            attachment.close()

    def _direct_gateway(self, effect: GatewayEffect) -> None:
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


def _too_many_streams(limit: int) -> RejectedError:
    return RejectedError(
        common.REJECTION_REASON_TOO_MANY_STREAMS, f"{limit} streams are open, all limits.max_streams allows"
    )
