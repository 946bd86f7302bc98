"""A server that talks like vLLM, as far as discovery looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web

METRICS = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {start}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="128",engine="0",prefix_caching_hash_algo="sha256"}} 1.0
# TYPE vllm:nixl_num_failed_transfers counter
vllm:nixl_num_failed_transfers_total{{engine="0",model_name="m"}} 3.0
vllm:nixl_num_failed_transfers_created{{engine="0",model_name="m"}} 1.7e+09
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.001"}} 0.0
"""


@dataclass
class FakeVllm:
    """Answers /health, /metrics and /v1/models as told."""

    url: str = ""
    port: int = 0
    start: float = 1_700_000_000.5
    health: int = 200
    served: str = "m"
    looked: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        async def health(_: web.Request) -> web.Response:
            self.looked.set()
            return web.Response(status=self.health)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=METRICS.format(start=self.start))

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": self.served, "max_model_len": 16384}]})

        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/v1/models", models)
        return app


@contextlib.asynccontextmanager
async def serving(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[FakeVllm]:
    """One that listens inside the block."""
    fake = FakeVllm()
    runner = web.AppRunner(fake.app())
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    fake.port = runner.addresses[0][1]
    fake.url = f"http://{host}:{fake.port}"
    try:
        yield fake
    finally:
        await runner.cleanup()
