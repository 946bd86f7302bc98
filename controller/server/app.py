"""The controller process: gRPC server, discovery, clock ticks and the metrics endpoint, from start to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from controller.config import ControllerConfig
from controller.discovery.kubernetes import KubernetesDiscovery
from controller.discovery.static import StaticDiscovery
from controller.election.elector import Elector
from controller.kubernetes.access import Access, AccessError
from controller.metrics import AccessMetrics, registry_for
from controller.server.admin import AdminServicer
from controller.server.auth import Auth, AuthInterceptor
from controller.server.engine import EngineServicer
from controller.server.leadership import LED_SERVICES, LeadershipInterceptor
from controller.server.placement import PlacementServicer
from controller.server.plane import Plane
from pd_shadow.api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    engine_pb2,
    engine_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from pd_shadow.common.address import is_loopback, split_address
from pd_shadow.common.credential_files import CredentialError
from pd_shadow.common.grpc_options import SERVER_OPTIONS
from pd_shadow.common.logs import get_logger
from pd_shadow.common.tls import grpc_server_credentials
from pd_shadow.common.tracing import Tracing, open_tracing

TICK_SECONDS = 0.1
# grpc.health.v1 service names: one for "restart me", one for "send me no new work".
LIVENESS = "liveness"
READINESS = "readiness"
# How long an RPC that has begun may go on once this controller leads no longer.
STEP_DOWN_GRACE_SECONDS = 1.0

log = get_logger("controller")


class StartError(Exception):
    """The controller cannot start; the message says what to change."""


class Controller:
    """One controller process, also usable in tests: `async with Controller(config).running() as controller`."""

    def __init__(
        self,
        config: ControllerConfig,
        tracing: Tracing | None = None,
        placement: Callable[[Plane, Tracing], PlacementServicer] = PlacementServicer,
    ) -> None:
        """`tracing` None: as configured; raises ConfigError when the packages for it are missing."""
        self.config = config
        self._placement = placement
        self.plane = Plane(config)
        self._tracing = open_tracing(config.tracing, "pd-shadow-controller") if tracing is None else tracing
        self.port = 0
        self.metrics_port = 0
        # Ends only by cancellation; any other end is a failure of the process.
        self._background: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None
        self._elector: Elector | None = None
        self._pods: KubernetesDiscovery | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._access = AccessMetrics()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Controller]:
        """Serve inside the block; drain and stop at its end.

        Raises StartError when an address is taken, or when Kubernetes is configured and not there, and CredentialError
        when a certificate or token file is unusable.
        """
        self._reach_kubernetes()
        self._server = await self._start_grpc(self.config.listen)
        metrics = await self._start_metrics()
        background = self._background = asyncio.create_task(self._work())
        await self._set_health(READINESS, serving=self.plane.leading())
        log.info("controller_serving", listen=self.config.listen, port=self.port)
        try:
            yield self
        finally:
            # Readiness first, so that nobody comes; then the streams end, so that everybody can go.
            await self._set_health(READINESS, serving=False)
            self.plane.close()
            background.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await background
            await self._server.stop(self.config.grace_seconds)
            if metrics is not None:
                await metrics.cleanup()
            await asyncio.to_thread(self._tracing.close)
            log.info("controller_stopped")

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT, or until a background task fails."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with self.running():
            stopped = asyncio.create_task(stop.wait())
            watched = [stopped] if self._background is None else [stopped, self._background]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick(), name="tick")
            tasks.create_task(StaticDiscovery(self.config.discovery, self.plane).run(), name="discovery")
            if self._pods is not None:
                tasks.create_task(self._pods.run(), name="kubernetes discovery")
            if self._elector is not None:
                tasks.create_task(self._elector.run(), name="election")

    def _reach_kubernetes(self) -> None:
        discovery, election = self.config.discovery, self.config.election
        if not (discovery.kubernetes.enabled or election.enabled):
            return
        try:
            access = Access.find(discovery.kubernetes, os.environ)
            if discovery.kubernetes.enabled:
                self._pods = KubernetesDiscovery(discovery, access, self.plane)
            if election.enabled:
                self._elector = Elector(election, access, self._lead)
                self.plane.leading = self._elector.leading
        except AccessError as error:
            raise StartError(str(error)) from error

    async def _lead(self, leading: bool) -> None:
        """Begin to lead, or step down; instances are watched either way, so that a new leader knows them."""
        if self.plane.closing or self._server is None:
            return
        for service in (READINESS, *LED_SERVICES):
            await self._set_health(service, serving=leading)
        if not leading:
            self.plane.step_down()
            # Connections stay with the process they were made to; only their end sends clients to the leader.
            await self._server.stop(STEP_DOWN_GRACE_SECONDS)
            self._server = await self._start_grpc(f"{self.config.listen.rsplit(':', 1)[0]}:{self.port}")

    async def _tick(self) -> None:
        while True:
            with self.plane.turn() as (cluster, now):
                cluster.tick(now)
            await asyncio.sleep(TICK_SECONDS)

    async def _start_grpc(self, listen: str) -> grpc.aio.Server:
        tls = self.config.tls
        credentials = grpc_server_credentials(tls, field="tls", on_stale=self._stale) if tls else None
        auth = Auth(self.config.auth, on_stale=self._stale)
        server = grpc.aio.server(
            interceptors=[
                AuthInterceptor(auth, lambda reason: self._access.refused.labels(reason).inc()),
                LeadershipInterceptor(self.plane),
            ],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=self.config.limits.max_rpcs,
        )
        placement_pb2_grpc.add_PlacementServiceServicer_to_server(self._placement(self.plane, self._tracing), server)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(EngineServicer(self.plane), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.plane), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        services = [
            descriptor.services_by_name[name].full_name
            for descriptor, name in (
                (placement_pb2.DESCRIPTOR, "PlacementService"),
                (engine_pb2.DESCRIPTOR, "EngineService"),
                (admin_pb2.DESCRIPTOR, "AdminService"),
                (health_pb2.DESCRIPTOR, "Health"),
            )
        ]
        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)
        for service in ("", LIVENESS, *services):
            await self._set_health(service, serving=self.plane.leading() or service not in LED_SERVICES)
        try:
            if credentials is None:
                self.port = server.add_insecure_port(listen)
            else:
                self.port = server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise StartError(f"listen: cannot bind {listen}; is another controller running?") from error
        await server.start()
        if not is_loopback(self.config.listen):
            if credentials is None:
                log.warning("plain_text", listen=self.config.listen, fix="set tls.cert_file and tls.key_file")
            for scope in auth.open_scopes:
                log.warning("no_tokens_asked", scope=scope.value, fix=f"set auth.{scope}_token_file")
        return server

    def _stale(self, error: CredentialError) -> None:
        self._access.stale_credentials.labels(error.field).inc()
        log.warning("credential_not_reloaded", why=str(error), kept="the older one")

    async def _start_metrics(self) -> web.AppRunner | None:
        if self.config.metrics_listen is None:
            return None
        registry = registry_for(self.plane, self._access)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, port = split_address(self.config.metrics_listen)
        site = web.TCPSite(runner, host or None, port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise StartError(f"metrics_listen: cannot bind {self.config.metrics_listen}: {error.strerror}") from error
        self.metrics_port = runner.addresses[0][1]
        return runner

    async def _set_health(self, service: str, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)
