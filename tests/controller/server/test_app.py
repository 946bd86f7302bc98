"""The controller over real gRPC: health, refusals with details, streams, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from controller.config import ControllerConfig
from controller.core.effects import Limits
from controller.core.instance import Instance, LoadReport
from controller.core.registry import Declared
from controller.core.session import SessionKey
from controller.server.app import LIVENESS, READINESS, Controller
from controller.server.plane import QUEUE_LIMIT, Plane
from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc, placement_pb2_grpc
from pd_shadow.api.v1 import placement_pb2 as pb
from tests.controller.support import facts

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SESSION = common_pb2.SessionKey(session_id="s")


def add_instance(plane: Plane, name: str, model: str, role: common_pb2.Role.ValueType, url: str = "") -> None:
    with plane.turn() as (cluster, now):
        cluster.declare(Declared(name, model, role, url or f"http://{name}"))
        cluster.observe(now, name, facts(), LoadReport())


@pytest.fixture
async def controller() -> AsyncIterator[Controller]:
    config = ControllerConfig(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", grace_seconds=0)
    async with Controller(config).running() as running:
        for model in "ab":
            add_instance(running.plane, f"{model}-p0", model, common_pb2.ROLE_PREFILL)
            add_instance(running.plane, f"{model}-d0", model, common_pb2.ROLE_DECODE)
        yield running


@pytest.fixture
async def channel(controller: Controller) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as open_channel:
        yield open_channel


def begin(model: str = "a", **more: object) -> pb.BeginCallRequest:
    return pb.BeginCallRequest(**{"gateway_id": "gw", "model": model, "prompt_tokens": 1000, **more})  # type: ignore[arg-type]


def details(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str]]:
    """ErrorInfo's reason and BadRequest's violations."""
    status = rpc_status.from_call(error)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
    return info.reason, {v.field: v.description for v in bad.field_violations}


async def test_a_call_from_begin_to_end(channel: grpc.aio.Channel) -> None:
    placement = placement_pb2_grpc.PlacementServiceStub(channel)
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    begun = await placement.BeginCall(begin(session=SESSION, task="math"))
    assert begun.prefill.instance.url == "http://a-p0"
    assert begun.decode.reason == common_pb2.PLACEMENT_REASON_FIRST_CALL
    assert [(t.model, t.renderer.url, t.block_size) for t in begun.shadow_targets] == [("b", "http://b-p0", 128)]
    ledger = await admin.GetLedger(admin_pb2.GetLedgerRequest())
    assert (ledger.in_flight.calls, ledger.in_flight.pending_prefill_tokens) == (1, 1000)
    stream = placement.ReportProgress()
    await stream.write(pb.ReportProgressRequest(call_id="nobody's", phase=pb.CALL_PHASE_TRANSFER))
    await stream.write(pb.ReportProgressRequest(call_id=begun.call_id, phase=pb.CALL_PHASE_TRANSFER))
    await stream.done_writing()
    await stream
    links = await admin.ListLinks(admin_pb2.ListLinksRequest())
    assert [link.gate for link in links.links] == [common_pb2.GATE_REASON_NORMAL_TRANSFER, common_pb2.GATE_REASON_OPEN]
    ended = await placement.EndCall(
        pb.EndCallRequest(
            call_id=begun.call_id,
            outcome=common_pb2.CALL_OUTCOME_COMPLETED,
            handoff=common_pb2.HANDOFF_HANDED_OFF,
            prompt_tokens=1000,
            completion_tokens=30,
        )
    )
    assert [t.model for t in ended.shadow_targets] == ["b"]
    ledger = await admin.GetLedger(admin_pb2.GetLedgerRequest())
    assert ledger.in_flight == admin_pb2.InFlight()
    assert (ledger.calls.calls, ledger.calls.handed_off) == (1, 1)
    session = (await admin.GetSession(admin_pb2.GetSessionRequest(session=SESSION))).session
    assert [(b.model, b.prefill.name, b.prefill_tokens) for b in session.bindings] == [("a", "a-p0", 896), ("b", "", 0)]
    warmth = await placement.GetWarmth(pb.GetWarmthRequest(session=SESSION))
    assert warmth.current_model == "a"
    assert {m.model: m.prefill_tokens for m in warmth.models} == {"a": 896, "b": 0}


async def test_a_pair_whose_transfers_keep_failing_is_shown_with_its_link(channel: grpc.aio.Channel) -> None:
    placement = placement_pb2_grpc.PlacementServiceStub(channel)
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    for failures in (1, 2, 3):
        begun = await placement.BeginCall(begin(session=SESSION))
        await placement.EndCall(
            pb.EndCallRequest(
                call_id=begun.call_id,
                outcome=common_pb2.CALL_OUTCOME_COMPLETED,
                handoff=common_pb2.HANDOFF_RECOMPUTED,
                recompute_reason=common_pb2.RECOMPUTE_REASON_TRANSFER_FAILED,
                prompt_tokens=1000,
                completion_tokens=30,
            )
        )
        links = (await admin.ListLinks(admin_pb2.ListLinksRequest())).links
        (pair,) = next(link.failing for link in links if link.decode.name == "a-d0")
        assert (pair.prefill.name, pair.failures) == ("a-p0", failures)
        closed = failures == 3
        assert pair.state == (common_pb2.LINK_STATE_QUARANTINED if closed else common_pb2.LINK_STATE_FAILING)
        assert pair.HasField("until") == closed
    events = (await admin.ListEvents(admin_pb2.ListEventsRequest())).events
    assert [(e.subject, e.reason) for e in events if e.kind == admin_pb2.EVENT_KIND_LINK] == [
        ("a-p0/a-d0", "quarantined")
    ]


@pytest.mark.parametrize(
    ("request_", "code", "reason", "field"),
    [
        (begin("zzz"), grpc.StatusCode.NOT_FOUND, "REJECTION_REASON_UNKNOWN_MODEL", "model"),
        (begin(""), grpc.StatusCode.INVALID_ARGUMENT, "REJECTION_REASON_INVALID_FIELD", "model"),
        (begin(gateway_id=""), grpc.StatusCode.INVALID_ARGUMENT, "REJECTION_REASON_INVALID_FIELD", "gateway_id"),
        (
            begin(session=common_pb2.SessionKey(session_id="x" * 5000)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "REJECTION_REASON_INVALID_FIELD",
            "session.session_id",
        ),
        (
            begin(session=common_pb2.SessionKey(session_id="a\x00b")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "REJECTION_REASON_INVALID_FIELD",
            "session.session_id",
        ),
        (
            begin(messages=[pb.MessageDigest(rolling_hash=b"short")]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "REJECTION_REASON_INVALID_FIELD",
            "messages[0].rolling_hash",
        ),
        (
            begin(
                messages=[
                    pb.MessageDigest(rolling_hash=b"x" * 16, running_tokens=9),
                    pb.MessageDigest(rolling_hash=b"y" * 16, running_tokens=8),
                ]
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "REJECTION_REASON_INVALID_FIELD",
            "messages[1].running_tokens",
        ),
        (
            begin(messages=[pb.MessageDigest(rolling_hash=b"x" * 16)] * 4097),
            grpc.StatusCode.INVALID_ARGUMENT,
            "REJECTION_REASON_INVALID_FIELD",
            "messages",
        ),
    ],
)
async def test_bad_calls_are_refused_with_the_field(
    channel: grpc.aio.Channel, request_: pb.BeginCallRequest, code: grpc.StatusCode, reason: str, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await placement_pb2_grpc.PlacementServiceStub(channel).BeginCall(request_)
    assert caught.value.code() == code
    found, violations = details(caught.value)
    assert found == reason
    assert list(violations) == [field]
    ledger = await admin_pb2_grpc.AdminServiceStub(channel).GetLedger(admin_pb2.GetLedgerRequest())
    assert ledger.in_flight == admin_pb2.InFlight()


async def test_a_message_beyond_the_limit_is_refused_before_it_is_read(channel: grpc.aio.Channel) -> None:
    messages = [pb.MessageDigest(rolling_hash=b"x" * 32)] * 150_000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await placement_pb2_grpc.PlacementServiceStub(channel).BeginCall(begin(messages=messages))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_dispatcher_gets_its_legs_and_its_end_is_noticed(
    controller: Controller, channel: grpc.aio.Channel
) -> None:
    placement = placement_pb2_grpc.PlacementServiceStub(channel)
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    watch = placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="gw"))
    await watch.initial_metadata()
    await placement.BeginCall(begin(session=SESSION))
    rendered = pb.ContextRendered(session=SESSION, model="b", revision=1, tokens=5000)
    await placement.ReportShadowWork(pb.ReportShadowWorkRequest(gateway_id="gw", context_rendered=rendered))
    leg = (await watch.read()).leg_start
    assert (leg.kind, leg.upto_tokens, leg.revision, leg.instance.url) == (
        common_pb2.LEG_KIND_PREFILL,
        4096,
        1,
        "http://b-p0",
    )
    finished = pb.LegFinished(leg_id=leg.leg_id, outcome=common_pb2.LEG_OUTCOME_DONE)
    await placement.ReportShadowWork(pb.ReportShadowWorkRequest(gateway_id="gw", leg_finished=finished))
    following = (await watch.read()).leg_start
    assert following.upto_tokens == 4992
    jobs = (await admin.ListShadowJobs(admin_pb2.ListShadowJobsRequest())).jobs
    assert [(j.model, j.reason, j.prefill_tokens) for j in jobs] == [("b", common_pb2.SHADOW_REASON_RUNNING, 4096)]
    events = admin.WatchEvents(admin_pb2.WatchEventsRequest())
    await events.initial_metadata()
    watch.cancel()
    event = (await events.read()).event
    assert (event.subject, event.reason) == ("gw", "left")
    ledger = await admin.GetLedger(admin_pb2.GetLedgerRequest())
    assert ledger.in_flight.shadow_legs == 0
    assert ledger.shadow.prefilled_tokens == ledger.shadow.resident_tokens == 4096


async def test_a_newer_stream_of_a_gateway_replaces_the_older(channel: grpc.aio.Channel) -> None:
    placement = placement_pb2_grpc.PlacementServiceStub(channel)
    first = placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="gw"))
    await first.initial_metadata()
    second = placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="gw"))
    await second.initial_metadata()
    assert await first.read() is grpc.aio.EOF
    await placement.BeginCall(begin(session=SESSION))
    rendered = pb.ContextRendered(session=SESSION, model="b", revision=1, tokens=5000)
    await placement.ReportShadowWork(pb.ReportShadowWorkRequest(gateway_id="gw", context_rendered=rendered))
    assert (await second.read()).HasField("leg_start")


async def test_streams_are_capped() -> None:
    config = ControllerConfig.model_validate(
        {"listen": "127.0.0.1:0", "grace_seconds": 0, "limits": {"max_streams": 1}}
    )
    async with (
        Controller(config).running() as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        placement = placement_pb2_grpc.PlacementServiceStub(channel)
        first = placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="one"))
        await first.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="two")).read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        attached = await attach(channel)
        other = engine_pb2_grpc.EngineServiceStub(channel).Attach()
        await other.write(hello(ref=common_pb2.InstanceRef(name="c-d1", incarnation="x1")))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await other.read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        attached.cancel()


async def test_a_dispatcher_too_far_behind_is_cut_off(controller: Controller) -> None:
    subscription = controller.plane.subscribe("slow")
    message = pb.WatchShadowWorkResponse()
    assert all(subscription.offer(message) for _ in range(QUEUE_LIMIT))
    assert not subscription.offer(message)
    subscription.close()
    assert len([message async for message in subscription.messages()]) == QUEUE_LIMIT


async def test_watching_the_cluster_shows_every_change(controller: Controller, channel: grpc.aio.Channel) -> None:
    watch = placement_pb2_grpc.PlacementServiceStub(channel).WatchCluster(pb.WatchClusterRequest())
    first = await watch.read()
    assert {i.endpoint.ref.name: i.state for i in first.instances} == dict.fromkeys(
        ("a-p0", "a-d0", "b-p0", "b-d0"), common_pb2.INSTANCE_STATE_READY
    )
    with controller.plane.turn() as (cluster, now):
        cluster.miss(now, "a-p0", refused=True)
    second = await watch.read()
    states = {i.endpoint.ref.name: i.state for i in second.instances}
    assert states["a-p0"] == common_pb2.INSTANCE_STATE_SUSPECT


async def test_liveness_and_readiness_are_told_apart_and_unknown_services_are_not_found(
    channel: grpc.aio.Channel,
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", LIVENESS, READINESS, "pdshadow.v1.PlacementService"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nope"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_shutting_down_turns_readiness_off_and_ends_the_streams() -> None:
    config = ControllerConfig(listen="127.0.0.1:0", grace_seconds=5)
    async with Stoppable(config) as (running, channel, stop):
        placement = placement_pb2_grpc.PlacementServiceStub(channel)
        readiness = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        assert (await readiness.read()).status == SERVING
        watch = placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="gw"))
        await watch.initial_metadata()
        assert running.plane.closing is False
        stop.set()
        assert (await readiness.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {"pdshadow.v1.PlacementService", "pdshadow.v1.EngineService", "pdshadow.v1.AdminService"} <= listed


async def test_lists_are_paged(controller: Controller, channel: grpc.aio.Channel) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    seen, token = [], ""
    while True:
        page = await admin.ListInstances(admin_pb2.ListInstancesRequest(page_size=3, page_token=token))
        seen += [i.endpoint.ref.name for i in page.instances]
        if not (token := page.next_page_token):
            break
    assert seen == ["a-d0", "a-p0", "b-d0", "b-p0"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.ListInstances(admin_pb2.ListInstancesRequest(page_token="x"))
    assert details(caught.value)[1].keys() == {"page_token"}
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await admin.GetInstance(admin_pb2.GetInstanceRequest(name="nope"))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_operators_read_models_and_the_configuration_in_force(channel: grpc.aio.Channel) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    models = (await admin.ListModels(admin_pb2.ListModelsRequest())).models
    assert [(m.name, m.prefill_ready, m.decode_ready) for m in models] == [("a", 1, 1), ("b", 1, 1)]
    config = (await admin.GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest())).config
    assert config["shadow"]["chunk_tokens"] == 4096  # type: ignore[index,call-overload]


async def test_a_colocated_instance_is_the_whole_placement(controller: Controller, channel: grpc.aio.Channel) -> None:
    add_instance(controller.plane, "c-c0", "c", common_pb2.ROLE_COLOCATED)
    placement = placement_pb2_grpc.PlacementServiceStub(channel)
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    begun = await placement.BeginCall(begin("c", session=SESSION))
    assert not begun.HasField("prefill")
    assert (begun.decode.instance.url, begun.decode.role) == ("http://c-c0", common_pb2.ROLE_COLOCATED)
    split = await placement.BeginCall(begin("a"))
    assert (split.prefill.role, split.decode.role) == (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)
    instance = (await admin.GetInstance(admin_pb2.GetInstanceRequest(name="c-c0"))).instance
    assert (instance.role, instance.calls_in_flight) == (common_pb2.ROLE_COLOCATED, 1)
    await placement.EndCall(
        pb.EndCallRequest(
            call_id=begun.call_id,
            outcome=common_pb2.CALL_OUTCOME_COMPLETED,
            handoff=common_pb2.HANDOFF_NONE,
            prompt_tokens=1000,
            completion_tokens=30,
        )
    )
    session = (await admin.GetSession(admin_pb2.GetSessionRequest(session=SESSION))).session
    binding = next(b for b in session.bindings if b.model == "c")
    assert (binding.prefill.name, binding.prefill_tokens, binding.HasField("decode")) == ("c-c0", 1024, False)
    models = (await admin.ListModels(admin_pb2.ListModelsRequest())).models
    assert [(m.prefill_ready, m.decode_ready, m.colocated_ready) for m in models if m.name == "c"] == [(0, 0, 1)]
    assert "c-c0" not in {link.decode.name for link in (await admin.ListLinks(admin_pb2.ListLinksRequest())).links}


async def test_the_shadow_policy_changes_at_run_time(channel: grpc.aio.Channel) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)

    async def effective() -> tuple[object, ...]:
        shadow = (await admin.GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest())).config["shadow"]
        return tuple(shadow[key] for key in ("approach", "enabled", "gate_probability", "top_k"))  # type: ignore[index,call-overload]

    assert await effective() == ("harvest-slo", True, 0.0, None)
    watch = admin.WatchEvents(admin_pb2.WatchEventsRequest())
    await watch.initial_metadata()
    request = admin_pb2.SetShadowPolicyRequest(approach="predictive", top_k=1)
    policy = (await admin.SetShadowPolicy(request)).policy
    assert policy == admin_pb2.ShadowPolicy(
        approach="predictive", gate_probability=0.25, top_k=1, enabled=True, engine_controller="harvest"
    )
    assert await effective() == ("predictive", True, 0.25, 1)
    event = (await watch.read()).event
    assert (event.kind, event.subject) == (admin_pb2.EVENT_KIND_SHADOW_POLICY, "predictive")
    # A value that is set to its default is still set.
    request = admin_pb2.SetShadowPolicyRequest(gate_probability=0.0, top_k=0, enabled=False)
    policy = (await admin.SetShadowPolicy(request)).policy
    assert (policy.approach, policy.gate_probability, policy.top_k, policy.enabled) == ("predictive", 0.0, 0, False)
    assert await effective() == ("predictive", False, 0.0, None)
    policy = (await admin.SetShadowPolicy(admin_pb2.SetShadowPolicyRequest(approach="harvest-slo+host"))).policy
    assert (policy.enabled, policy.engine_controller, policy.host_tier) == (True, "harvest-slo", True)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"approach": "harvest-sol"}, "approach", "did you mean 'harvest-slo'?"),
        ({"approach": "oracle"}, "approach", "only the simulator runs it"),
        ({"gate_probability": 2.0}, "gate_probability", "0 to 1 is expected"),
        ({"approach": "no-shadow", "enabled": True}, "enabled", "does no shadow work"),
    ],
)
async def test_a_policy_that_cannot_be_is_refused_and_changes_nothing(
    channel: grpc.aio.Channel, change: dict[str, object], field: str, says: str
) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.SetShadowPolicy(admin_pb2.SetShadowPolicyRequest(**change))  # type: ignore[arg-type]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    found, violations = details(caught.value)
    assert (found, list(violations)) == ("REJECTION_REASON_INVALID_FIELD", [field])
    assert says in violations[field]
    policy = (await admin.SetShadowPolicy(admin_pb2.SetShadowPolicyRequest())).policy
    assert (policy.approach, policy.enabled, policy.gate_probability) == ("harvest-slo", True, 0.0)


def hello(**change: object) -> engine_pb2.AttachRequest:
    given = {
        "ref": common_pb2.InstanceRef(name="c-d0", incarnation="x1"),
        "role": common_pb2.ROLE_DECODE,
        "model": "c",
        "url": "http://c-d0:1",
        "block_size": 16,
        **change,
    }
    return engine_pb2.AttachRequest(hello=engine_pb2.Hello(**given))  # type: ignore[arg-type]


async def attach(channel: grpc.aio.Channel, **change: object) -> grpc.aio.StreamStreamCall:
    """A stream whose Hello was accepted."""
    stream = engine_pb2_grpc.EngineServiceStub(channel).Attach()
    await stream.write(hello(**change))
    assert (await stream.read()).HasField("welcome")
    assert (await stream.read()).HasField("set_limits")
    assert (await stream.read()).HasField("resume_shadow")
    return stream


async def until(controller: Controller, true: Callable[[], bool]) -> None:
    """Wait until the core says so; it ticks all the time."""
    while not true():
        with controller.plane.turn():
            await asyncio.sleep(0)


def named(controller: Controller, name: str = "c-d0") -> Instance:
    instance = controller.plane.cluster.registry.named(name)
    assert instance is not None
    return instance


async def test_an_instance_attaches_reports_and_leaves(controller: Controller, channel: grpc.aio.Channel) -> None:
    stream = await attach(channel, plugin_version="1.2.3", vllm_version="0.32.0", hardware="gpu-7")
    instance = named(controller)
    assert instance.ready
    load = engine_pb2.Load(
        running=2,
        waiting=1,
        kv_usage=0.5,
        shadow_blocks=3,
        shadow_cap_blocks=10,
        slack_seconds=-0.5,
        shadow_room_tokens=320,
        step_reason=common_pb2.STEP_REASON_NO_BUDGET,
    )
    await stream.write(engine_pb2.AttachRequest(load=load))
    await until(controller, lambda: instance.load.running == 2)
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    listed = (await admin.ListInstances(admin_pb2.ListInstancesRequest())).instances
    shown = {i.endpoint.ref.name: i for i in listed}
    assert (shown["c-d0"].request_level, shown["c-d0"].hardware) == (False, "gpu-7")
    assert shown["c-d0"].plugin == admin_pb2.Plugin(version="1.2.3", vllm_version="0.32.0", attached=True, load=load)
    assert (shown["a-d0"].request_level, shown["a-d0"].HasField("plugin")) == (True, False)
    stream.cancel()
    events = controller.plane.cluster.events
    while not any((event.subject, event.reason) == ("c-d0", "suspect") for event in events()):
        await controller.plane.changes()
    assert not instance.ready
    left = (await admin.GetInstance(admin_pb2.GetInstanceRequest(name="c-d0"))).instance.plugin
    assert (left.attached, left.load) == (False, load)


async def test_an_attached_instance_says_what_it_holds_of_sessions(
    controller: Controller, channel: grpc.aio.Channel
) -> None:
    resident = [engine_pb2.ResidentSession(session=SESSION, tokens=1000)]
    stream = await attach(channel, resident_sessions=resident)
    session = controller.plane.cluster.sessions.get(SessionKey("", "s"))
    assert session is not None
    binding = session.bindings["c"]
    assert (binding.decode, binding.decode_tokens) == (("c-d0", "x1"), 992)
    # What says nothing this version knows changes nothing.
    await stream.write(engine_pb2.AttachRequest())
    await stream.write(engine_pb2.AttachRequest(event=engine_pb2.EngineEvent()))
    progress = engine_pb2.ShadowProgress(session=SESSION, covered_tokens=16)
    await stream.write(engine_pb2.AttachRequest(shadow_progress=progress))
    evicted = engine_pb2.EngineEvent(kind=engine_pb2.ENGINE_EVENT_KIND_SESSION_EVICTED, session=SESSION, tokens=500)
    await stream.write(engine_pb2.AttachRequest(event=evicted))
    await until(controller, lambda: binding.decode_tokens == 496)
    reset = engine_pb2.EngineEvent(kind=engine_pb2.ENGINE_EVENT_KIND_CACHE_RESET)
    await stream.write(engine_pb2.AttachRequest(event=reset))
    await until(controller, lambda: binding.decode_tokens == 0)
    stream.cancel()


async def test_directives_go_down_the_stream(controller: Controller, channel: grpc.aio.Channel) -> None:
    stream = await attach(channel)
    with controller.plane.turn() as (cluster, now):
        cluster.limit_engines(now, common_pb2.ROLE_DECODE, Limits(cap_share=0.0, minimum_tokens=64))
        cluster.operators.pause_cluster(now, paused=True)
    limits = (await stream.read()).set_limits
    assert {field.name: value for field, value in limits.ListFields()} == {"cap_share": 0.0, "minimum_tokens": 64}
    assert (await stream.read()).HasField("pause_shadow")
    stream.cancel()


async def test_the_latest_stream_of_an_instance_counts(controller: Controller, channel: grpc.aio.Channel) -> None:
    first = await attach(channel)
    second = await attach(channel)
    assert await first.read() is grpc.aio.EOF
    instance = named(controller)
    await second.write(engine_pb2.AttachRequest(load=engine_pb2.Load(running=1)))
    await until(controller, lambda: instance.load.running == 1)
    assert instance.ready
    newer = await attach(channel, ref=common_pb2.InstanceRef(name="c-d0", incarnation="x2"))
    assert await second.read() is grpc.aio.EOF
    late = engine_pb2_grpc.EngineServiceStub(channel).Attach()
    await late.write(hello())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await late.read()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(caught.value)[0] == "REJECTION_REASON_STALE_INCARNATION"
    assert named(controller).ready
    newer.cancel()


async def test_an_instance_that_was_given_up_is_asked_to_attach_again(
    controller: Controller, channel: grpc.aio.Channel
) -> None:
    stream = await attach(channel)
    with controller.plane.turn() as (cluster, now):
        cluster.tick(now + cluster.config.discovery.gone_after_seconds)
    await stream.write(engine_pb2.AttachRequest(load=engine_pb2.Load()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    again = await attach(channel)
    assert named(controller).ready
    again.cancel()


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"role": common_pb2.ROLE_UNSPECIFIED}, grpc.StatusCode.INVALID_ARGUMENT, "hello.role"),
        ({"url": "c-d0:1"}, grpc.StatusCode.INVALID_ARGUMENT, "hello.url"),
        ({"url": "http://" + "x" * 2042}, grpc.StatusCode.INVALID_ARGUMENT, "hello.url"),
        ({"hash_algorithm": "x" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "hello.hash_algorithm"),
        ({"block_size": 0}, grpc.StatusCode.INVALID_ARGUMENT, "hello.block_size"),
        ({"hardware": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT, "hello.hardware"),
        (
            {"resident_sessions": [engine_pb2.ResidentSession()]},
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello.resident_sessions[0].session.session_id",
        ),
        (
            {"resident_sessions": [engine_pb2.ResidentSession(session=SESSION)] * 4097},
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello.resident_sessions",
        ),
        ({"model": "a", "block_size": 64}, grpc.StatusCode.FAILED_PRECONDITION, "hello"),
        (
            {"model": "a", "block_size": 128, "role": common_pb2.ROLE_COLOCATED},
            grpc.StatusCode.FAILED_PRECONDITION,
            "hello",
        ),
        (
            {"ref": common_pb2.InstanceRef(name="a-d0", incarnation="x1"), "model": "b", "block_size": 128},
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello.model",
        ),
    ],
)
async def test_a_bad_hello_is_refused(
    channel: grpc.aio.Channel, change: dict[str, object], code: grpc.StatusCode, field: str
) -> None:
    stream = engine_pb2_grpc.EngineServiceStub(channel).Attach()
    await stream.write(hello(**change))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() == code
    assert list(details(caught.value)[1]) == [field]


@pytest.mark.parametrize("messages", [[], [engine_pb2.AttachRequest(load=engine_pb2.Load())], [hello(), hello()]])
async def test_a_stream_has_one_hello_and_it_comes_first(
    channel: grpc.aio.Channel, messages: list[engine_pb2.AttachRequest]
) -> None:
    stream = engine_pb2_grpc.EngineServiceStub(channel).Attach(iter(messages))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in stream]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert list(details(caught.value)[1]) == ["message"]


async def test_an_engine_too_far_behind_is_cut_off_once_it_has_read_what_waits(controller: Controller) -> None:
    named_ = Declared("c-d0", "c", common_pb2.ROLE_DECODE, "http://c-d0:1")
    attachment = controller.plane.attach(named_, facts(), [])
    with controller.plane.turn() as (cluster, now):
        for turn in range(QUEUE_LIMIT + 1):
            cluster.operators.pause_cluster(now, paused=turn % 2 == 0)
    assert not attachment.offer(engine_pb2.AttachResponse())
    assert len([message async for message in attachment.messages()]) == QUEUE_LIMIT


async def test_a_leg_may_cover_less_than_it_was_asked(controller: Controller, channel: grpc.aio.Channel) -> None:
    placement = placement_pb2_grpc.PlacementServiceStub(channel)
    work = placement.WatchShadowWork(pb.WatchShadowWorkRequest(gateway_id="gw"))
    await work.initial_metadata()
    await placement.BeginCall(begin(session=SESSION))
    rendered = pb.ContextRendered(session=SESSION, model="b", revision=1, tokens=5000)
    await placement.ReportShadowWork(pb.ReportShadowWorkRequest(gateway_id="gw", context_rendered=rendered))
    first = (await work.read()).leg_start
    ended = pb.LegFinished(leg_id=first.leg_id, outcome=common_pb2.LEG_OUTCOME_DONE, covered_tokens=1024)
    await placement.ReportShadowWork(pb.ReportShadowWorkRequest(gateway_id="gw", leg_finished=ended))
    second = (await work.read()).leg_start
    assert (second.kind, second.upto_tokens) == (common_pb2.LEG_KIND_PREFILL, 4096)
    nothing = pb.LegFinished(leg_id=second.leg_id, outcome=common_pb2.LEG_OUTCOME_DONE, covered_tokens=0)
    await placement.ReportShadowWork(pb.ReportShadowWorkRequest(gateway_id="gw", leg_finished=nothing))
    ledger = (await admin_pb2_grpc.AdminServiceStub(channel).GetLedger(admin_pb2.GetLedgerRequest())).shadow
    assert (ledger.prefilled_tokens, ledger.wasted_tokens, ledger.resident_tokens) == (1024, 1024, 0)


async def test_metrics_are_served_and_carry_reasons(controller: Controller, channel: grpc.aio.Channel) -> None:
    secret = common_pb2.SessionKey(session_id="in-no-label")
    await placement_pb2_grpc.PlacementServiceStub(channel).BeginCall(begin(session=secret))
    with controller.plane.turn() as (cluster, now):
        cluster.operators.drain(now, "b-d0")
        cluster.operators.pause_model(now, "b", paused=True)
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{controller.metrics_port}/metrics") as response,
    ):
        text = await response.text()
    assert 'pd_shadow_controller_instance_ready{instance="a-p0",model="a",role="prefill"} 1.0' in text
    assert 'pd_shadow_controller_placements_total{model="a",reason="first_call",role="decode"} 1.0' in text
    assert 'pd_shadow_controller_instance_draining{instance="b-d0",model="b",role="decode"} 1.0' in text
    assert 'pd_shadow_controller_instance_shadow_paused{instance="b-p0",model="b",role="prefill"} 1.0' in text
    assert 'pd_shadow_controller_links_quarantined{model="a"} 0.0' in text
    assert "in-no-label" not in text


class Stoppable:
    """A controller whose shutdown starts when `stop` is set, while the block still watches."""

    def __init__(self, config: ControllerConfig) -> None:
        self._controller = Controller(config)
        self._started, self._stop = asyncio.Event(), asyncio.Event()

    async def _run(self) -> None:
        async with self._controller.running():
            self._started.set()
            await self._stop.wait()

    async def __aenter__(self) -> tuple[Controller, grpc.aio.Channel, asyncio.Event]:
        self._task = asyncio.create_task(self._run())
        await self._started.wait()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._controller.port}")
        return self._controller, self._channel, self._stop

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._channel.close()
        await self._task
