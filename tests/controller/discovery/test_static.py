"""Static discovery against a scripted server that talks like vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from controller.config import ControllerConfig
from controller.core.instance import Facts, LoadReport
from controller.core.registry import Declared
from controller.discovery import vllm_metrics
from controller.discovery.static import StaticDiscovery
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.api.v1.engine_pb2 import Load

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


@pytest.fixture
async def engine() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    runner = web.AppRunner(fake.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def plane(engine: FakeVllm) -> AsyncIterator[Plane]:
    config = ControllerConfig.model_validate(
        {
            "discovery": {
                "static": [{"name": "p0", "model": "m", "role": "prefill", "url": engine.url}],
                "poll_interval_seconds": 0.01,
                "suspect_after_misses": 1,
            }
        }
    )
    found = Plane(config)
    task = asyncio.create_task(StaticDiscovery(config.discovery, found).run())
    yield found
    task.cancel()


async def state_becomes(plane: Plane, state: pb.InstanceState.ValueType) -> None:
    while (instance := plane.cluster.registry.named("p0")) is None or instance.state != state:
        await plane.changes()


async def test_a_healthy_engine_is_ready_with_its_facts(engine: FakeVllm, plane: Plane) -> None:
    await state_becomes(plane, pb.INSTANCE_STATE_READY)
    instance = plane.cluster.registry.named("p0")
    assert instance is not None
    assert instance.ref == ("p0", "1700000000.50")
    assert (instance.facts.block_size, instance.facts.hash_algorithm) == (128, "sha256")
    assert instance.facts.max_context_tokens == 16384
    assert (instance.load.running, instance.load.waiting, instance.load.kv_usage) == (2, 1, 0.25)
    assert (instance.load.failed_transfers, instance.load.expired_exports) == (3, 0)
    assert instance.request_level


@pytest.mark.parametrize(
    ("role", "value"),
    [("prefill", pb.ROLE_PREFILL), ("decode", pb.ROLE_DECODE), ("colocated", pb.ROLE_COLOCATED)],
)
async def test_an_instance_has_the_role_it_was_given(role: str, value: pb.Role.ValueType) -> None:
    config = ControllerConfig.model_validate(
        {"discovery": {"static": [{"name": "i", "model": "m", "role": role, "url": "http://127.0.0.1:9"}]}}
    )
    plane = Plane(config)
    task = asyncio.create_task(StaticDiscovery(config.discovery, plane).run())
    # Discovery declares everything before it waits for the first time.
    await asyncio.sleep(0)
    task.cancel()
    (declared,) = plane.cluster.registry.declared()
    assert declared.role == value


async def test_a_restart_is_a_new_incarnation(engine: FakeVllm, plane: Plane) -> None:
    await state_becomes(plane, pb.INSTANCE_STATE_READY)
    first = plane.cluster.registry.named("p0")
    engine.start += 60
    while plane.cluster.registry.named("p0") is first:
        await plane.changes()
    assert first is not None
    assert first.state == pb.INSTANCE_STATE_GONE


async def test_an_unhealthy_engine_becomes_suspect_and_recovers(engine: FakeVllm, plane: Plane) -> None:
    await state_becomes(plane, pb.INSTANCE_STATE_READY)
    engine.health = 503
    await state_becomes(plane, pb.INSTANCE_STATE_SUSPECT)
    engine.health = 200
    await state_becomes(plane, pb.INSTANCE_STATE_READY)


async def test_an_engine_that_also_attaches_is_one_instance_and_its_own_word_counts(
    engine: FakeVllm, plane: Plane
) -> None:
    await state_becomes(plane, pb.INSTANCE_STATE_READY)
    discovered = plane.cluster.registry.named("p0")
    named = Declared("p0", "m", pb.ROLE_PREFILL, engine.url)
    attachment = plane.attach(named, Facts("1700000000.50", 128, "sha256", 16384), [])
    with plane.turn() as (cluster, now):
        cluster.heartbeat(now, attachment.ref, attachment.stream, LoadReport(plugin=Load()))
    # The second look from now on starts when what the first one saw is told.
    for _ in range(2):
        engine.looked.clear()
        await engine.looked.wait()
    (instance,) = plane.cluster.registry
    assert instance is discovered
    assert not instance.request_level
    assert (instance.load.running, instance.foreign_requests, instance.load.failed_transfers) == (0, 0, 3)
    engine.health = 503
    for _ in range(2):
        engine.looked.clear()
        await engine.looked.wait()
    assert instance.ready
    plane.detach(attachment)
    assert not instance.ready
    engine.health = 200
    await state_becomes(plane, pb.INSTANCE_STATE_READY)
    assert plane.cluster.registry.named("p0") is instance
    assert (instance.request_level, instance.load.running) == (False, 2)


async def test_an_engine_that_serves_another_model_is_not_taken(engine: FakeVllm) -> None:
    engine.served = "other"
    config = ControllerConfig.model_validate(
        {"discovery": {"static": [{"name": "p0", "model": "m", "role": "prefill", "url": engine.url}]}}
    )
    plane = Plane(config)
    discovery = StaticDiscovery(config.discovery, plane)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ValueError, match="serves other, not 'm' as configured"):
            await discovery.look(http, config.discovery.static[0], {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "vllm:num_requests_running is missing"),
        (METRICS.format(start=1).replace('block_size="128"', 'block_size="None"'), "no numeric block_size"),
        ("<html>", "is this a vLLM server"),
    ],
)
def test_pages_of_something_else_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_metrics.parse(text)
