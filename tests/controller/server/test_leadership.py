"""Controllers that elect a leader: what the others answer, and what changes hands."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from controller.config import ControllerConfig
from controller.server.app import LIVENESS, READINESS, Controller, StartError
from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc, placement_pb2_grpc
from pd_shadow.api.v1 import placement_pb2 as pb
from tests.controller.discovery.fake_vllm import serving
from tests.controller.kubernetes.api_server import ApiServer, pod

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LEASE = "pd-shadow-controller"
OTHER = {"holderIdentity": "other", "leaseDurationSeconds": 15}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    found = ApiServer()
    await found.start()
    yield found
    await found.stop()


@contextlib.asynccontextmanager
async def candidate(server: ApiServer) -> AsyncIterator[tuple[Controller, grpc.aio.Channel]]:
    config = ControllerConfig.model_validate(
        {
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "grace_seconds": 0,
            "discovery": {
                "kubernetes": {"enabled": True, "api_server": server.url, "namespaces": ["ns"]},
                "poll_interval_seconds": 0.01,
            },
            "election": {"enabled": True, "namespace": "ns", "identity": "me", "retry_period_seconds": 0.02},
        }
    )
    async with (
        Controller(config).running() as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        yield running, channel


async def leads(server: ApiServer, channel: grpc.aio.Channel) -> None:
    """Wait until the controller of the channel is ready."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
    while (await watch.read()).status != SERVING:
        pass
    watch.cancel()


def check_refusal(error: grpc.aio.AioRpcError) -> None:
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in rpc_status.from_call(error).details:
        detail.Unpack(info)
        detail.Unpack(retry)
    assert info.reason == "REJECTION_REASON_NOT_LEADER"
    assert retry.retry_delay.seconds > 0


async def leader_metric(controller: Controller) -> str:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{controller.metrics_port}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    return next(line for line in lines if line.startswith("pd_shadow_controller_leader "))


async def test_a_controller_that_does_not_lead_is_live_and_refuses_gateways_and_engines(server: ApiServer) -> None:
    server.put_lease(LEASE, OTHER)
    async with serving("127.0.0.2") as engine, candidate(server) as (controller, channel):
        server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
        health = health_pb2_grpc.HealthStub(channel)
        for service, status in (
            ("", SERVING),
            (LIVENESS, SERVING),
            (READINESS, NOT_SERVING),
            ("pdshadow.v1.PlacementService", NOT_SERVING),
            ("pdshadow.v1.EngineService", NOT_SERVING),
            ("pdshadow.v1.AdminService", SERVING),
        ):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == status
        placement = placement_pb2_grpc.PlacementServiceStub(channel)
        for call in (
            placement.BeginCall(pb.BeginCallRequest(gateway_id="gw", model="m")),
            placement.WatchCluster(pb.WatchClusterRequest()).read(),
            placement.ReportProgress(iter([])),
            engine_pb2_grpc.EngineServiceStub(channel).Attach(iter([engine_pb2.AttachRequest()])).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            check_refusal(caught.value)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/pdshadow.v1.PlacementService/Nope")(b"")
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert await leader_metric(controller) == "pd_shadow_controller_leader 0.0"
        # It watches engines all the same, and operators see them.
        while (instance := controller.plane.cluster.registry.named("a")) is None or not instance.ready:
            await controller.plane.changes()
        listed = await admin_pb2_grpc.AdminServiceStub(channel).ListInstances(admin_pb2.ListInstancesRequest())
        assert [i.endpoint.ref.name for i in listed.instances] == ["a"]
        server.put_lease(LEASE, {**OTHER, "holderIdentity": ""})
        await leads(server, channel)
        assert await leader_metric(controller) == "pd_shadow_controller_leader 1.0"
        assert len((await placement.WatchCluster(pb.WatchClusterRequest()).read()).instances) == 1
    assert server.leases["ns", LEASE]["spec"]["holderIdentity"] == ""


async def test_a_leader_that_steps_down_ends_streams_calls_and_connections_and_can_lead_again(
    server: ApiServer,
) -> None:
    async with serving("127.0.0.2") as engine, candidate(server) as (controller, channel):
        server.put_pod(pod("a", ip="127.0.0.2", port=engine.port, role="colocated"))
        await leads(server, channel)
        while not controller.plane.cluster.registry.ready("m", common_pb2.ROLE_COLOCATED):
            await controller.plane.changes()
        placement = placement_pb2_grpc.PlacementServiceStub(channel)
        await placement.BeginCall(pb.BeginCallRequest(gateway_id="gw", model="m", prompt_tokens=10))
        work = placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="gw"))
        await work.initial_metadata()
        cluster = placement.WatchCluster(pb.WatchClusterRequest())
        await cluster.read()
        progress = placement.ReportProgress()
        await progress.write(pb.ReportProgressRequest())
        readiness = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        await readiness.read()
        server.put_lease(LEASE, OTHER)
        assert (await readiness.read()).status == NOT_SERVING
        assert await work.read() is grpc.aio.EOF
        # Until the connection ends: a gateway that keeps it would never find the leader.
        with pytest.raises((grpc.aio.AioRpcError, grpc.aio.UsageError)):
            await progress
        ended = controller.plane.cluster.call_ledger.outcomes
        assert ended["m", common_pb2.CALL_OUTCOME_GATEWAY_LOST] == 1
        assert not controller.plane.cluster.calls
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await placement.BeginCall(pb.BeginCallRequest(gateway_id="gw", model="m"), wait_for_ready=True)
        check_refusal(caught.value)
        server.put_lease(LEASE, {**OTHER, "holderIdentity": ""})
        await leads(server, channel)
        begun = await placement.BeginCall(pb.BeginCallRequest(gateway_id="gw", model="m"))
        assert begun.decode.instance.ref.name == "a"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"discovery": {"kubernetes": {"enabled": True}}}, "api_server: this process runs outside a Kubernetes"),
        ({"election": {"enabled": True}}, "api_server: this process runs outside a Kubernetes"),
        (
            {"discovery": {"kubernetes": {"enabled": True, "api_server": "http://127.0.0.1:1"}}},
            "discovery.kubernetes.namespaces: this process is in no namespace",
        ),
    ],
)
async def test_kubernetes_where_there_is_none_stops_the_start(
    config: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartError, match=says):
        async with Controller(ControllerConfig.model_validate({"listen": "127.0.0.1:0", **config})).running():
            pass
