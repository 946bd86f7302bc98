"""The gateway's HTTP server: routes, request checks, lifecycle."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pd_shadow.api.v1 import common_pb2
from pd_shadow.common.address import is_loopback, join_address, split_address
from pd_shadow.common.controller_access import ControllerAccess
from pd_shadow.common.credential_files import CredentialError
from pd_shadow.common.logs import get_logger
from pd_shadow.common.reasons import label
from pd_shadow.common.tls import ssl_server_context
from pd_shadow.common.tracing import Tracing, open_tracing
from pd_shadow.gateway.api_keys import ApiKeys
from pd_shadow.gateway.call import Call, Services
from pd_shadow.gateway.call_traces import CallTraces
from pd_shadow.gateway.cluster import ClusterView
from pd_shadow.gateway.config import GatewayConfig
from pd_shadow.gateway.controller_client import ControllerClient
from pd_shadow.gateway.digest import TokenRatios
from pd_shadow.gateway.dispatcher import Dispatcher
from pd_shadow.gateway.engine_client import EngineClient
from pd_shadow.gateway.identity import authenticate, identify
from pd_shadow.gateway.legs import Endpoint
from pd_shadow.gateway.metrics import Metrics
from pd_shadow.gateway.openai_errors import ApiError, missing_model

log = get_logger("gateway.app")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Headers of up to this many bytes are parsed, so that the gateway's own rules answer instead of the parser's.
_MAX_HEADER_BYTES = 64 * 1024
_LAST_REPORTS_SECONDS = 3.0


class Gateway:
    """One gateway; `start` binds the port, `stop` lets running calls end.

    Raises CredentialError when a certificate, token or key file is unusable.
    """

    def __init__(self, config: GatewayConfig, tracing: Tracing | None = None) -> None:
        """`tracing` None: as configured."""
        self.config = config
        self._tracing = open_tracing(config.tracing, "pd-shadow-gateway") if tracing is None else tracing
        traces = CallTraces(self._tracing, config.caps.sessions)
        self.metrics = Metrics()
        self.cluster = ClusterView(config.default_block_size)
        self.engines = EngineClient(config.deadlines)
        self._tls = ssl_server_context(config.tls, field="tls", on_stale=self._stale) if config.tls else None
        self._keys = ApiKeys(config.api_keys_file, on_stale=self._stale) if config.api_keys_file else None
        access = ControllerAccess(
            config.controller, config.controller_tls, config.controller_token_file, on_stale=self._stale
        )
        self.controller = ControllerClient(access, f"gateway-{uuid.uuid4().hex}", config.deadlines, self.metrics)
        self.dispatcher = Dispatcher(config, self.engines, self.controller, self.cluster, self.metrics, traces)
        self._services = Services(
            config,
            self.engines,
            self.controller,
            self.cluster,
            self.dispatcher,
            self.metrics,
            TokenRatios(),
            traces,
            set(),
        )
        self._started_at = int(time.time())
        self._in_flight = 0
        self._draining = False
        self._runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,
            shutdown_timeout=config.deadlines.shutdown_grace,
            access_log=None,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )

    async def start(self) -> str:
        """Connect, bind and serve; returns the base URL (the port is chosen if the configuration says 0)."""
        self.controller.start(
            lambda view: self.cluster.update(view.instances), self.dispatcher.on_work, self.dispatcher.on_work_lost
        )
        await self._runner.setup()
        host, port = split_address(self.config.listen)
        await web.TCPSite(self._runner, host or None, port, ssl_context=self._tls).start()
        bound = self._runner.addresses[0]
        scheme = "https" if self._tls else "http"
        url = f"{scheme}://{join_address(bound[0], bound[1])}"
        self._warn_about_open_doors()
        log.info("gateway_ready", url=url, controller=self.config.controller, gateway_id=self.controller.gateway_id)
        return url

    async def stop(self) -> None:
        """Take no new calls, let running ones end within the grace period, cancel the rest, say goodbye."""
        self._draining = True
        await self._runner.cleanup()
        await self.dispatcher.close()
        if self._services.background:
            await asyncio.wait(set(self._services.background), timeout=_LAST_REPORTS_SECONDS)
        await self.controller.close()
        await self.engines.close()
        await asyncio.to_thread(self._tracing.close)
        log.info("gateway_stopped")

    @property
    def ready(self) -> bool:
        """Whether calls can be served now."""
        return not self._draining and bool(self.cluster.ready_models())

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self.config.caps.body_bytes, middlewares=[_openai_errors])
        for endpoint in Endpoint:
            app.router.add_post(endpoint.value, self._generating(endpoint))
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    def _generating(self, endpoint: Endpoint) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            call: Call | None = None
            model, outcome = "unknown", "rejected"
            if self._in_flight >= self.config.caps.in_flight_calls:
                self._count(model, endpoint, "overloaded")
                raise ApiError(429, "Too many calls are in flight.", code="too_many_calls", retry_after=1)
            self._in_flight += 1
            self.metrics.in_flight.set(self._in_flight)
            try:
                # Before the body: strangers are not worth its memory.
                tenant = authenticate(request.headers, self._keys)
                body = await self._read(request)
                identity = identify(request.headers, body, tenant)
                model = self.cluster.model_label(body["model"])
                call = Call(self._services, endpoint, body, identity)
                response = await call.run(request)
            except ApiError as error:
                outcome = "rejected" if error.status in (400, 401, 403, 404, 413, 422) else "unplaced"
                raise
            except (asyncio.CancelledError, ConnectionResetError):
                outcome = label(common_pb2.CallOutcome.DESCRIPTOR, common_pb2.CALL_OUTCOME_CLIENT_GONE)
                raise
            finally:
                if call is not None and call.outcome is not None:
                    outcome = label(common_pb2.CallOutcome.DESCRIPTOR, call.outcome)
                self._count(model, endpoint, outcome)
                self._in_flight -= 1
                self.metrics.in_flight.set(self._in_flight)
            return response

        return handle

    def _count(self, model: str, endpoint: Endpoint, outcome: str) -> None:
        self.metrics.requests.labels(model, endpoint.label, outcome).inc()

    async def _read(self, request: web.Request) -> dict[str, Any]:
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            most = self.config.caps.body_bytes
            raise ApiError(413, f"The request body exceeds {most} bytes.", code="body_too_large") from error
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"The request body is not JSON: {error}.", code="invalid_json") from error
        if not isinstance(body, dict):
            raise ApiError(400, "The request body must be a JSON object.", code="invalid_json")
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise missing_model(self.cluster.models)
        return body

    async def _list_models(self, request: web.Request) -> web.Response:
        authenticate(request.headers, self._keys)
        models = [
            {
                "id": model,
                "object": "model",
                "created": self._started_at,
                "owned_by": "pd-shadow",
                "max_model_len": context or None,
            }
            for model, context in self.cluster.ready_models().items()
        ]
        return web.Response(body=orjson.dumps({"object": "list", "data": models}), content_type="application/json")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(text="ready\n") if self.ready else web.Response(status=503, text="not ready\n")

    def _stale(self, error: CredentialError) -> None:
        self.metrics.stale_credentials.labels(error.field).inc()
        log.warning("credential_not_reloaded", why=str(error), kept="the older one")

    def _warn_about_open_doors(self) -> None:
        config = self.config
        if not is_loopback(config.listen):
            if config.tls is None:
                log.warning("plain_text", listen=config.listen, fix="set tls.cert_file and tls.key_file")
            if config.api_keys_file is None:
                log.warning("no_api_keys_asked", listen=config.listen, fix="set api_keys_file")
        if config.controller_token_file and config.controller_tls is None and not is_loopback(config.controller):
            log.warning("token_in_plain_text", controller=config.controller, fix="set controller_tls")

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error, expected or not, in OpenAI's shape."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        failure = ApiError(error.status, f"{error.reason}: {request.method} {request.path}", code="http_error")
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("request_crashed", path=request.path)
        failure = ApiError(500, "The gateway failed on this request.", code="internal_error")
    headers = failure.headers()
    return web.Response(status=failure.status, body=failure.body(), content_type="application/json", headers=headers)
