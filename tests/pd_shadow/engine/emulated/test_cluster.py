"""Emulated engines under the real controller and the real gateway, in one process."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import grpc.aio
import pytest

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pd_shadow.common.config import parse
from pd_shadow.engine.emulated.config import EmulatedEngines
from pd_shadow.engine.emulated.engine import Engine
from pd_shadow.engine.emulated.serve import running
from pd_shadow.gateway.app import Gateway
from pd_shadow.gateway.config import GatewayConfig

SPEED = 20.0
CONTROL = {
    "listen": "127.0.0.1:0",
    "discovery": {"poll_interval_seconds": 0.1, "gone_after_seconds": 2.0},
    "log_level": "error",
}


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """The first true value; the test's timeout is the limit."""
    while not (value := await condition()):  # noqa: ASYNC110 - the state of another component
        await asyncio.sleep(0.02)
    return value


def engines(roles: dict[str, int], models: tuple[str, ...] = ("a", "b"), **more: Any) -> dict[str, Any]:
    common = {"model": "L3.1-8B", "speed": SPEED, "port": 0, "kv_tokens": 65_536, **more}
    return {
        "engines": [
            {**common, "name": f"{model}-{role}", "served_model_name": model, "role": role, "replicas": count}
            for model in models
            for role, count in roles.items()
        ]
    }


class System:
    """What an agent and an operator see."""

    def __init__(self, url: str, http: aiohttp.ClientSession, admin: Any, engines: list[Engine]) -> None:
        self.url = url
        self.http = http
        self.admin = admin
        self.engines = {engine.config.name: engine for engine in engines}

    async def instances(self, state: int = common_pb2.INSTANCE_STATE_READY) -> list[Any]:
        answer = await self.admin.ListInstances(admin_pb2.ListInstancesRequest(page_size=1000))
        return [instance for instance in answer.instances if instance.state == state]

    async def chat(self, model: str, messages: list[dict[str, str]], session: str = "") -> Any:
        headers = {"X-Session-ID": session} if session else {}
        body = {"model": model, "messages": messages, "max_tokens": 8, "return_token_ids": True}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            payload = json.loads(await answer.read())
            assert answer.status == 200, payload
            return payload

    async def ledger(self) -> Any:
        return await self.admin.GetLedger(admin_pb2.GetLedgerRequest())

    async def warm(self, model: str) -> bool:
        """Whether the model's D holds the context of the one session."""
        jobs = await self.admin.ListShadowJobs(admin_pb2.ListShadowJobsRequest(model=model))
        return any(job.reason == common_pb2.SHADOW_REASON_WARM for job in jobs.jobs)

    async def quiet(self) -> Any:
        async def nothing_in_flight() -> Any:
            ledger = await self.ledger()
            return ledger if ledger.in_flight == admin_pb2.InFlight() else None

        return await until(nothing_in_flight)


@contextlib.asynccontextmanager
async def system(given: dict[str, Any]) -> AsyncIterator[System]:
    async with contextlib.AsyncExitStack() as stack:
        controller = await stack.enter_async_context(Controller(parse(ControllerConfig, CONTROL)).running())
        address = f"127.0.0.1:{controller.port}"
        started = await stack.enter_async_context(running(parse(EmulatedEngines, {**given, "controller": address})))
        gateway = Gateway(parse(GatewayConfig, {"controller": address, "listen": "127.0.0.1:0"}))
        url = await gateway.start()
        stack.push_async_callback(gateway.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        whole = System(url, http, admin_pb2_grpc.AdminServiceStub(channel), started)

        async def known() -> bool:
            async with http.get(f"{url}/v1/models") as answer:
                models = {entry["id"] for entry in (await answer.json())["data"]}
            return len(await whole.instances()) == len(started) and len(models) > 0

        await until(known)
        yield whole


@pytest.mark.timeout(60)
async def test_a_session_that_switches_is_warm_and_hears_what_it_would_have_heard_cold() -> None:
    def history(answers: list[str]) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": "read this " * 3000}]
        for answer in answers:
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and now? " * 20}]
        return messages

    async with system(engines({"prefill": 1, "decode": 1})) as live:
        said: list[str] = []
        for model, other in (("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")):
            answer = await live.chat(model, history(said), "agent")
            said.append(answer["choices"][0]["message"]["content"])
            await until(lambda other=other: live.warm(other))  # type: ignore[misc]
        switch = answer["usage"]
        assert switch["prompt_tokens_details"]["cached_tokens"] > 0.9 * switch["prompt_tokens"]
        ledger = await live.quiet()
        shadow = ledger.shadow
        assert shadow.prefilled_tokens > 7000
        assert shadow.hit_tokens + shadow.wasted_tokens + shadow.resident_tokens == shadow.prefilled_tokens
        assert shadow.pushed_tokens > 7000
        assert (ledger.calls.handed_off, ledger.calls.recomputed) == (4, 0)
        transcript = list(said)
    # The same calls on engines that never saw the session.
    for number, model in enumerate(("a", "b", "a", "b")):
        async with system(engines({"colocated": 1}, models=(model,))) as fresh:
            answer = await fresh.chat(model, history(transcript[:number]))
            assert answer["choices"][0]["message"]["content"] == transcript[number]


@pytest.mark.timeout(60)
async def test_a_p_that_dies_costs_its_calls_a_recomputation_and_nothing_else() -> None:
    messages = [{"role": "user", "content": "word " * 2000}]
    async with system(engines({"prefill": 1, "decode": 1}, models=("a",))) as live:
        first = await live.chat("a", messages)
        await live.engines["a-prefill-0"].close()
        second = await live.chat("a", messages)
        assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]

        async def gone() -> bool:
            return [instance.role for instance in await live.instances()] == [common_pb2.ROLE_DECODE]

        await until(gone)
        third = await live.chat("a", messages)
        assert third["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        ledger = await live.quiet()
        assert ledger.calls.handed_off >= 1
        assert ledger.calls.handed_off + ledger.calls.recomputed == 3


@pytest.mark.timeout(120)
async def test_64_engines_of_4_models_start_and_attach() -> None:
    models = ("a", "b", "c", "d")
    async with system(engines({"prefill": 12, "decode": 4}, models=models, kv_tokens=16_384)) as live:
        ready = await live.instances()
        assert len(ready) == 64
        assert not any(instance.request_level for instance in ready)
        roles = [(instance.model, instance.role) for instance in ready]
        for model in models:
            assert roles.count((model, common_pb2.ROLE_PREFILL)) == 12
            assert roles.count((model, common_pb2.ROLE_DECODE)) == 4
        answers = await asyncio.gather(
            *(live.chat(model, [{"role": "user", "content": "hello"}], f"s-{model}") for model in models)
        )
        assert all(answer["usage"]["completion_tokens"] == 8 for answer in answers)
        assert (await live.quiet()).calls.handed_off == 4
