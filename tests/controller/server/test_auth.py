"""Scopes of bearer tokens over real gRPC, and their rotation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc, placement_pb2_grpc
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.common.config import ConfigError
from tests.credentials import write

OK = grpc.StatusCode.OK
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
SCOPES = ("admin", "gateway", "instance")
Metadata = tuple[tuple[str, str], ...]
Call = Callable[[grpc.aio.Channel, Metadata], Awaitable[object]]


async def admin(channel: grpc.aio.Channel, metadata: Metadata) -> object:
    return await admin_pb2_grpc.AdminServiceStub(channel).ListModels(admin_pb2.ListModelsRequest(), metadata=metadata)


async def placement_watch(channel: grpc.aio.Channel, metadata: Metadata) -> object:
    call = placement_pb2_grpc.PlacementServiceStub(channel).WatchCluster(pb.WatchClusterRequest(), metadata=metadata)
    if await call.read() is grpc.aio.EOF:
        raise await failure(call)
    return call.cancel()


async def placement(channel: grpc.aio.Channel, metadata: Metadata) -> object:
    request = pb.EndCallRequest(call_id="nobody's")
    try:
        return await placement_pb2_grpc.PlacementServiceStub(channel).EndCall(request, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return error


async def placement_upload(channel: grpc.aio.Channel, metadata: Metadata) -> object:
    # Nothing is sent: a refusal must not wait for it.
    call: Any = placement_pb2_grpc.PlacementServiceStub(channel).ReportProgress(metadata=metadata)  # type: ignore[call-arg]
    if metadata == bearer("good-gateway") or metadata == bearer("good-admin"):
        await call.done_writing()
    return await call


async def instance(channel: grpc.aio.Channel, metadata: Metadata) -> object:
    hello = engine_pb2.Hello(
        ref=common_pb2.InstanceRef(name="i", incarnation="1"),
        role=common_pb2.ROLE_PREFILL,
        model="m",
        url="http://i",
        block_size=16,
    )
    call = engine_pb2_grpc.EngineServiceStub(channel).Attach(metadata=metadata)  # type: ignore[call-arg]
    await call.write(engine_pb2.AttachRequest(hello=hello))
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise await failure(call)
    return call.cancel()


async def reflect(channel: grpc.aio.Channel, metadata: Metadata) -> object:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    return [answer async for answer in stub.ServerReflectionInfo(iter([request]), metadata=metadata)]


async def health(channel: grpc.aio.Channel, metadata: Metadata) -> object:
    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), metadata=metadata)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


async def outcome(call: Call, channel: grpc.aio.Channel, metadata: Metadata) -> tuple[grpc.StatusCode, str]:
    """The status, and ErrorInfo's reason."""
    try:
        await call(channel, metadata)
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)
        info = error_details_pb2.ErrorInfo()
        assert status is not None
        assert any(detail.Unpack(info) for detail in status.details)
        assert info.domain == "pdshadow.v1"
        said = str(error.details()) + str(error.trailing_metadata())
        assert "good-" not in said
        assert "bad-token" not in said
        return error.code(), info.reason.removeprefix("REJECTION_REASON_")
    return OK, ""


def config(folder: Path, *scopes: str) -> ControllerConfig:
    files = {f"{scope}_token_file": write(folder / scope, f"good-{scope}\n") for scope in scopes}
    return ControllerConfig.model_validate(
        {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "grace_seconds": 0, "auth": files}
    )


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        Controller(config(tmp_path, *SCOPES)).running() as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        yield channel


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (admin, {"admin"}),
        (placement_watch, {"admin", "gateway"}),
        (reflect, {"admin"}),
        (placement, {"admin", "gateway"}),
        (placement_upload, {"admin", "gateway"}),
        (instance, {"admin", "instance"}),
        (health, {*SCOPES, "none", "unknown"}),
    ],
)
async def test_each_service_takes_its_own_scope_and_the_admins(
    channel: grpc.aio.Channel, call: Call, allowed: set[str]
) -> None:
    for scope in SCOPES:
        expected = (OK, "") if scope in allowed else (DENIED, "TOKEN_SCOPE")
        assert await outcome(call, channel, bearer(f"good-{scope}")) == expected, scope
    for metadata, expected in (
        ((), (UNAUTHENTICATED, "TOKEN_MISSING")),
        ((("authorization", "Basic Z29vZA=="),), (UNAUTHENTICATED, "TOKEN_MISSING")),
        (bearer("bad-token"), (UNAUTHENTICATED, "TOKEN_UNKNOWN")),
    ):
        assert await outcome(call, channel, metadata) == ((OK, "") if "none" in allowed else expected)


async def test_a_scope_without_a_file_asks_for_no_token(tmp_path: Path) -> None:
    async with (
        Controller(config(tmp_path, "gateway")).running() as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        assert await outcome(admin, channel, ()) == (OK, "")
        assert await outcome(instance, channel, bearer("bad-token")) == (OK, "")
        assert await outcome(placement, channel, ()) == (UNAUTHENTICATED, "TOKEN_MISSING")


async def test_tokens_rotate_without_a_restart_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    async with (
        Controller(config(tmp_path, *SCOPES)).running() as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
        aiohttp.ClientSession() as http,
    ):
        write(tmp_path / "admin", "next\ngood-admin\n")
        assert [await outcome(admin, channel, bearer(t)) for t in ("good-admin", "next")] == [(OK, "")] * 2
        write(tmp_path / "admin", "next\n")
        assert await outcome(admin, channel, bearer("good-admin")) == (UNAUTHENTICATED, "TOKEN_UNKNOWN")
        (tmp_path / "admin").unlink()
        assert await outcome(admin, channel, bearer("next")) == (OK, "")
        async with http.get(f"http://127.0.0.1:{controller.metrics_port}/metrics") as response:
            metrics = await response.text()
    assert 'stale_credentials_total{field="auth.admin_token_file"} 1.0' in metrics
    assert 'refused_rpcs_total{reason="token_unknown"} 1.0' in metrics


async def test_a_missing_token_file_stops_the_start(tmp_path: Path) -> None:
    given = config(tmp_path, *SCOPES)
    (tmp_path / "instance").unlink()
    with pytest.raises(ConfigError, match=r"auth\.instance_token_file: .*instance: No such file or directory"):
        async with Controller(given).running():
            pass


async def test_rpcs_open_at_once_are_capped() -> None:
    given = ControllerConfig.model_validate({"listen": "127.0.0.1:0", "grace_seconds": 0, "limits": {"max_rpcs": 2}})
    async with (
        Controller(given).running() as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        streams = [
            placement_pb2_grpc.PlacementServiceStub(channel).WatchCluster(pb.WatchClusterRequest()) for _ in "12"
        ]
        for stream in streams:
            await stream.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel, ())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
