"""One cluster of real vLLM engines with real NIXL for the whole folder, and a fresh control plane per test.

A module whose tests run on other engines has a `cluster` fixture of its own, in module scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2, placement_pb2_grpc
from pd_shadow.demo.cluster import Cluster, ControlPlane, Mode
from pd_shadow.policy.approach import DEFAULT

# Polls of state that has no event of its own.
POLL_SECONDS = 0.05


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    # Stock engines: the request-level path. Colocated ones have the plugin.
    async with running_cluster(tmp_path_factory.mktemp("cluster"), Mode.DISAGGREGATED, stock=True) as running:
        yield running


@contextlib.asynccontextmanager
async def running_cluster(run_dir: Path, mode: Mode, *, stock: bool) -> AsyncIterator[Cluster]:
    """Engines of a mode, and no trace of them afterwards."""
    # Built models are the same for every run of this version: all clusters share them.
    models = Path(tempfile.gettempdir()) / "pd-shadow-e2e-models"
    async with Cluster(run_dir, models, mode=mode, stock=stock) as running:
        yield running
    shutil.rmtree(run_dir, ignore_errors=True)


@dataclass
class System:
    """A gateway, a controller and the engines behind them, as a client and an operator see them."""

    cluster: Cluster
    plane: ControlPlane
    http: aiohttp.ClientSession
    admin: admin_pb2_grpc.AdminServiceStub
    placement: placement_pb2_grpc.PlacementServiceStub

    async def chat(
        self, model: str, messages: list[dict[str, str]], session: str | None = None, **more: object
    ) -> dict:  # type: ignore[type-arg]
        """A whole answer; fails the test unless the status is 200."""
        status, body = await self.raw_chat({"model": model, "messages": messages, **more}, session)
        assert status == 200, body
        return body

    async def raw_chat(self, body: object, session: str | None = None) -> tuple[int, dict[str, Any]]:
        headers = {} if session is None else {"X-Session-ID": session}
        defaults = {"max_tokens": 4, "temperature": 0}
        payload = {**defaults, **body} if isinstance(body, dict) else body
        async with self.http.post(
            f"{self.plane.gateway_url}/v1/chat/completions", json=payload, headers=headers
        ) as response:
            return response.status, await response.json()

    async def ledger(self) -> admin_pb2.GetLedgerResponse:
        return await self.admin.GetLedger(admin_pb2.GetLedgerRequest())

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Return when the condition holds; the test's own timeout is the limit."""
        while not await condition():  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(POLL_SECONDS)

    async def quiet(self) -> admin_pb2.GetLedgerResponse:
        """The ledger once nothing is in flight any more."""

        async def nothing_in_flight() -> bool:
            return (await self.ledger()).in_flight == admin_pb2.InFlight()

        await self.until(nothing_in_flight)
        return await self.ledger()

    @contextlib.asynccontextmanager
    async def killed(self, name: str) -> AsyncIterator[None]:
        """Kill -9 an engine; it is back, under the same name and addresses, after the block."""
        await self.cluster.kill_engine(name)
        try:
            yield
        finally:
            await self.cluster.restart_engine(name)

    async def ready(self, name: str, *, not_incarnation: str = "") -> str:
        """The instance's incarnation once it is READY, in another life than the one named."""

        async def is_ready() -> bool:
            answer = await self.admin.ListInstances(admin_pb2.ListInstancesRequest())
            return any(
                i.endpoint.ref.name == name
                and i.state == common_pb2.INSTANCE_STATE_READY
                and i.endpoint.ref.incarnation != not_incarnation
                for i in answer.instances
            )

        await self.until(is_ready)
        found = await self.admin.GetInstance(admin_pb2.GetInstanceRequest(name=name))
        return found.instance.endpoint.ref.incarnation

    async def warm(self, model: str, session: str) -> admin_pb2.ShadowJob:
        """The session's shadow job on the model once it is warm."""
        found: list[admin_pb2.ShadowJob] = []

        async def is_warm() -> bool:
            jobs = await self.admin.ListShadowJobs(admin_pb2.ListShadowJobsRequest(model=model))
            found[:] = [
                job
                for job in jobs.jobs
                if job.session.session_id == session
                and job.reason == common_pb2.SHADOW_REASON_WARM
                # Of an instance that is gone nothing is left, whatever was last said of the job.
                and job.prefill_tokens > 0
            ]
            return bool(found)

        await self.until(is_warm)
        return found[0]


@pytest_asyncio.fixture(loop_scope="session")
async def system(cluster: Cluster) -> AsyncIterator[System]:
    async with (
        cluster.control_plane(DEFAULT, "test") as plane,
        aiohttp.ClientSession() as http,
        grpc.aio.insecure_channel(plane.controller_address) as channel,
    ):
        yield System(
            cluster,
            plane,
            http,
            admin_pb2_grpc.AdminServiceStub(channel),
            placement_pb2_grpc.PlacementServiceStub(channel),
        )
