"""Static discovery against a scripted server that talks like vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from controller.config import ControllerConfig
from controller.core.instance import Facts, LoadReport
from controller.core.registry import Declared
from controller.discovery import vllm_metrics
from controller.discovery.engine_watch import EngineWatch
from controller.discovery.static import StaticDiscovery
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.api.v1.engine_pb2 import Load
from tests.controller.discovery.fake_vllm import METRICS, FakeVllm, serving


@pytest.fixture
async def engine() -> AsyncIterator[FakeVllm]:
    async with serving() as fake:
        yield fake


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
    plane = Plane(ControllerConfig())
    declared = Declared("p0", "m", pb.ROLE_PREFILL, engine.url)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ValueError, match="serves other, not 'm' as configured"):
            await EngineWatch(http, plane, 1.0, declared).look()


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
