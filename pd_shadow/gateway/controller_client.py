"""gRPC to the controller: placements by unary calls, everything else by streams that reconnect by themselves."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from pd_shadow.api.v1 import common_pb2, placement_pb2
from pd_shadow.api.v1.placement_pb2_grpc import PlacementServiceStub
from pd_shadow.common.controller_access import ControllerAccess
from pd_shadow.common.logs import get_logger
from pd_shadow.gateway.config import Deadlines
from pd_shadow.gateway.metrics import Metrics

if TYPE_CHECKING:
    from pd_shadow.api.v1.placement_pb2_grpc import PlacementServiceAsyncStub

log = get_logger("gateway.controller_client")

T = TypeVar("T")

_FIRST_BACKOFF = 0.1
_MAX_BACKOFF = 2.0
_QUEUE = 10_000
_REPORT_SECONDS = 2.0
_REPORT_ATTEMPTS = 3
# After a call waited for nothing, the next ones do not wait at all for this long.
_AWAY_SECONDS = 1.0


class ControllerUnreachableError(Exception):
    """The controller did not answer in time, or there is no way to it."""


@dataclass(eq=False)
class _Link:
    """One channel, made with one set of certificates."""

    credentials: grpc.ChannelCredentials | None
    channel: grpc.aio.Channel
    stub: "PlacementServiceAsyncStub"
    rpcs: int = 0


class ControllerClient:
    """The gateway's side of PlacementService; `start` needs a running loop, `close` ends every stream."""

    def __init__(self, access: ControllerAccess, gateway_id: str, deadlines: Deadlines, metrics: Metrics) -> None:
        self.gateway_id = gateway_id
        self._access = access
        # Channels that are open: the last one takes new RPCs, the others finish what they have.
        self._links: list[_Link] = []
        self._deadlines = deadlines
        self._metrics = metrics
        self._progress: asyncio.Queue[placement_pb2.ReportProgressRequest] = asyncio.Queue(_QUEUE)
        self._reports: asyncio.Queue[placement_pb2.ReportShadowWorkRequest] = asyncio.Queue(_QUEUE)
        self._unsent: placement_pb2.ReportProgressRequest | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._away_until = 0.0

    def start(
        self,
        on_cluster: Callable[[placement_pb2.WatchClusterResponse], None],
        on_work: Callable[[placement_pb2.WatchShadowWorkResponse], None],
        on_work_lost: Callable[[], None],
    ) -> None:
        """Open the streams; the callbacks run in the loop and must not block."""

        async def watch_cluster() -> None:
            with self._link() as stub:
                request = placement_pb2.WatchClusterRequest()
                async for view in stub.WatchCluster(request, metadata=self._access.metadata()):
                    on_cluster(view)

        async def watch_work() -> None:
            request = placement_pb2.WatchShadowWorkRequest(gateway_id=self.gateway_id)
            try:
                with self._link() as stub:
                    async for work in stub.WatchShadowWork(request, metadata=self._access.metadata()):
                        on_work(work)
            finally:
                on_work_lost()

        for name, stream in (
            ("cluster", watch_cluster),
            ("shadow_work", watch_work),
            ("progress", self._send_progress),
        ):
            self._spawn(_forever(name, stream))
        self._spawn(self._send_reports())

    async def close(self) -> None:
        """End all streams and channels."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in [*self._links]:
            await link.channel.close(None)

    async def begin(
        self, request: placement_pb2.BeginCallRequest, trace: Mapping[str, str]
    ) -> placement_pb2.BeginCallResponse:
        """Place a call; `trace` are the headers of the span that the controller's belongs to.

        Raises ControllerUnreachableError when no answer comes within the deadline, AioRpcError for a refusal. A
        placement that comes too late, or after the caller left, is ended at once: its load would stay reserved.
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            raise ControllerUnreachableError("no answer a moment ago")
        task = self._spawn(self._begin(request, trace))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._deadlines.begin_call)
        except asyncio.CancelledError:
            task.add_done_callback(self._end_late)
            raise
        if not done:
            task.add_done_callback(self._end_late)
            self._away_until = loop.time() + _AWAY_SECONDS
            raise ControllerUnreachableError(f"no answer within {self._deadlines.begin_call:g} s")
        self._away_until = 0.0
        return task.result()

    async def end(self, request: placement_pb2.EndCallRequest) -> placement_pb2.EndCallResponse:
        """End a call, once: a second attempt could meet a controller that counted the first. Empty on failure."""
        try:
            with self._link() as stub:
                return await stub.EndCall(request, timeout=self._deadlines.end_call, metadata=self._access.metadata())
        except grpc.aio.AioRpcError as error:
            self._metrics.lost_reports.labels("end_call").inc()
            log.warning("end_call_failed", call_id=request.call_id, code=error.code().name)
            return placement_pb2.EndCallResponse()

    def progress(self, request: placement_pb2.ReportProgressRequest) -> None:
        """Report a call's phase; dropped when too many wait, as the call's end tells everything."""
        _offer(self._progress, request)

    def report(self, request: placement_pb2.ReportShadowWorkRequest) -> None:
        """Report shadow work, in order."""
        if not _offer(self._reports, request):
            self._metrics.lost_reports.labels("shadow_work").inc()

    async def _begin(
        self, request: placement_pb2.BeginCallRequest, trace: Mapping[str, str]
    ) -> placement_pb2.BeginCallResponse:
        with self._link() as stub:
            return await stub.BeginCall(
                request,
                timeout=10 * self._deadlines.begin_call,
                metadata=(*self._access.metadata(), *trace.items()),
            )

    @contextlib.contextmanager
    def _link(self) -> Iterator["PlacementServiceAsyncStub"]:
        """A stub for one RPC. Certificates that changed get a new channel; RPCs on an older one are left to end."""
        credentials = self._access.credentials()
        if not self._links or self._links[-1].credentials is not credentials:
            channel = self._access.aio_channel(credentials)
            self._links.append(_Link(credentials, channel, PlacementServiceStub(channel)))
            self._close_idle()
        link = self._links[-1]
        link.rpcs += 1
        try:
            yield link.stub
        finally:
            link.rpcs -= 1
            self._close_idle()

    def _close_idle(self) -> None:
        idle = [link for link in self._links[:-1] if not link.rpcs]
        for link in idle:
            self._links.remove(link)
            self._spawn(link.channel.close(None))

    def _end_late(self, task: "asyncio.Task[placement_pb2.BeginCallResponse]") -> None:
        if task.cancelled() or task.exception() is not None:
            return
        request = placement_pb2.EndCallRequest(
            call_id=task.result().call_id,
            outcome=common_pb2.CALL_OUTCOME_CLIENT_GONE,
            handoff=common_pb2.HANDOFF_NONE,
        )
        self._spawn(self.end(request))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_progress(self) -> None:
        with self._link() as stub:
            # Without an iterator, requests are written one by one; the generated stub does not know this form.
            call = stub.ReportProgress(metadata=self._access.metadata())  # type: ignore[call-arg]
            while True:
                if self._unsent is None:
                    self._unsent = await self._progress.get()
                await call.write(self._unsent)
                self._unsent = None

    async def _send_reports(self) -> None:
        while True:
            request = await self._reports.get()
            for attempt in range(_REPORT_ATTEMPTS):
                try:
                    with self._link() as stub:
                        await stub.ReportShadowWork(
                            request, timeout=_REPORT_SECONDS, wait_for_ready=True, metadata=self._access.metadata()
                        )
                    break
                except grpc.aio.AioRpcError as error:
                    log.info("shadow_report_failed", code=error.code().name, attempt=attempt + 1)
            else:
                self._metrics.lost_reports.labels("shadow_work").inc()


async def _forever(name: str, stream: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a stream again whenever it ends, with backoff while it does not last."""
    backoff, lost = _FIRST_BACKOFF, False
    loop = asyncio.get_running_loop()
    while True:
        started, why = loop.time(), "ended"
        try:
            await stream()
        except grpc.aio.AioRpcError as error:
            why = error.code().name
        except asyncio.InvalidStateError:
            why = "finished"
        if loop.time() - started > _MAX_BACKOFF:
            backoff, lost = _FIRST_BACKOFF, False
        if not lost:
            log.warning("controller_stream_lost", stream=name, why=why)
            lost = True
        await asyncio.sleep(backoff)
        backoff = min(2 * backoff, _MAX_BACKOFF)


def _offer(queue: "asyncio.Queue[T]", item: T) -> bool:
    try:
        queue.put_nowait(item)
    except asyncio.QueueFull:
        return False
    return True
