"""AdminService over real gRPC: lists, watches, what operators do, and input that makes no sense."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import admin_pb2_grpc, common_pb2, placement_pb2, placement_pb2_grpc
from pd_shadow.common.config import parse
from pd_shadow.gateway.app import Gateway
from pd_shadow.gateway.config import GatewayConfig
from tests.controller.server.test_app import add_instance, begin, details
from tests.pd_shadow.gateway.rig import FakeEngine, serving

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]


@pytest.fixture
async def controller() -> AsyncIterator[Controller]:
    config = ControllerConfig(listen="127.0.0.1:0", grace_seconds=0)
    async with Controller(config).running() as running:
        for model in "ab":
            for index in range(2):
                add_instance(running.plane, f"{model}-p{index}", model, common_pb2.ROLE_PREFILL)
                add_instance(running.plane, f"{model}-d{index}", model, common_pb2.ROLE_DECODE)
        yield running


@pytest.fixture
async def channel(controller: Controller) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as open_channel:
        yield open_channel


@pytest.fixture
def admin(channel: grpc.aio.Channel) -> Any:
    return admin_pb2_grpc.AdminServiceStub(channel)


def session(name: str, tenant: str = "") -> common_pb2.SessionKey:
    return common_pb2.SessionKey(tenant=tenant, session_id=name)


async def place(channel: grpc.aio.Channel, *names: str, model: str = "a", tenant: str = "") -> None:
    stub = placement_pb2_grpc.PlacementServiceStub(channel)
    for name in names:
        await stub.BeginCall(begin(model, session=session(name, tenant)))


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), *details(caught.value)


# Lists.


async def test_pages_stay_right_while_sessions_come_and_go(admin: Any, channel: grpc.aio.Channel) -> None:
    await place(channel, "s1", "s3", "s5", "s7")
    await place(channel, "s1", tenant="t")
    first = await admin.ListSessions(pb.ListSessionsRequest(page_size=2))
    assert [s.key.session_id for s in first.sessions] == ["s1", "s3"]
    # What lies before the page's end, comes or goes, does not move what follows.
    await admin.ForgetSession(pb.ForgetSessionRequest(session=session("s1")))
    await place(channel, "s0", "s4")
    second = await admin.ListSessions(pb.ListSessionsRequest(page_size=9, page_token=first.next_page_token))
    assert [(s.key.tenant, s.key.session_id) for s in second.sessions] == [
        ("", "s4"), ("", "s5"), ("", "s7"), ("t", "s1"),
    ]  # fmt: skip
    assert second.next_page_token == ""


@pytest.mark.parametrize(
    ("listing", "token"),
    [
        ("ListInstances", "x"),
        ("ListInstances", "☃"),
        ("ListInstances", "A" * 100_000),
        ("ListModels", base64.urlsafe_b64encode(b"[" * 3000).decode()),
        ("ListSessions", base64.urlsafe_b64encode(json.dumps(["instances", "a", "b"]).encode()).decode()),
        ("ListShadowJobs", base64.urlsafe_b64encode(json.dumps(["shadow_jobs", "a", 1, None]).encode()).decode()),
        ("ListLinks", base64.urlsafe_b64encode(json.dumps(["links", "a", "b"]).encode()).decode()),
    ],
)
async def test_a_token_that_the_list_never_gave_is_refused(admin: Any, listing: str, token: str) -> None:
    request = getattr(pb, f"{listing}Request")(page_token=token)
    code, reason, fields = await refusal(getattr(admin, listing)(request))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REJECTION_REASON_INVALID_FIELD")
    assert fields.keys() == {"page_token"}


async def test_every_list_is_filtered(admin: Any, channel: grpc.aio.Channel) -> None:
    await place(channel, "s1")
    await place(channel, "s2", model="b")
    await admin.DrainInstance(pb.DrainInstanceRequest(name="a-p0"))

    async def names(**given: Any) -> list[str]:
        listed = await admin.ListInstances(pb.ListInstancesRequest(**given))
        return [i.endpoint.ref.name for i in listed.instances]

    assert await names(model="a", role=common_pb2.ROLE_DECODE) == ["a-d0", "a-d1"]
    assert await names(state=common_pb2.INSTANCE_STATE_DRAINING) == ["a-p0"]
    sessions = await admin.ListSessions(pb.ListSessionsRequest(model="b"))
    assert [s.key.session_id for s in sessions.sessions] == ["s2"]
    jobs = await admin.ListShadowJobs(pb.ListShadowJobsRequest(reason=common_pb2.SHADOW_REASON_RENDERING, model="a"))
    assert [(j.session.session_id, j.model) for j in jobs.jobs] == [("s2", "a")]
    links = await admin.ListLinks(pb.ListLinksRequest(model="b", page_size=1))
    assert ([link.decode.name for link in links.links], bool(links.next_page_token)) == (["b-d0"], True)
    events = await admin.ListEvents(
        pb.ListEventsRequest(kinds=[pb.EVENT_KIND_INSTANCE_STATE], subject="a-p0", after_sequence=1)
    )
    assert [e.reason for e in events.events] == ["draining"]
    await admin.PauseShadow(pb.PauseShadowRequest(model="b"))
    models = await admin.ListModels(pb.ListModelsRequest())
    assert [(m.name, m.prefill_ready, m.shadow_paused) for m in models.models] == [("a", 1, False), ("b", 2, True)]


async def test_sessions_are_found_by_the_instance_they_are_bound_to(admin: Any, channel: grpc.aio.Channel) -> None:
    await place(channel, "s1", "s2")
    await admin.RebindSession(pb.RebindSessionRequest(session=session("s1"), model="a", prefill="a-p1"))
    listed = await admin.ListSessions(pb.ListSessionsRequest(instance="a-p1"))
    assert [s.key.session_id for s in listed.sessions] == ["s1"]


async def test_one_of_each_is_read_by_name(admin: Any, channel: grpc.aio.Channel) -> None:
    await place(channel, "s1")
    assert (await admin.GetModel(pb.GetModelRequest(name="a"))).model.decode_ready == 2
    assert (await admin.GetLink(pb.GetLinkRequest(decode="a-d1"))).link.gate == common_pb2.GATE_REASON_OPEN
    job = (await admin.GetShadowJob(pb.GetShadowJobRequest(session=session("s1"), model="b"))).job
    assert job.reason == common_pb2.SHADOW_REASON_RENDERING
    for call, reason, says in (
        (admin.GetModel(pb.GetModelRequest(name="bb")), "UNKNOWN_MODEL", "did you mean 'b'"),
        (admin.GetLink(pb.GetLinkRequest(decode="a-p1")), "UNKNOWN_INSTANCE", "did you mean 'a-d1'"),
        (admin.GetShadowJob(pb.GetShadowJobRequest(session=session("s1"), model="a")), "UNKNOWN_SHADOW_JOB", "on 'a'"),
        (admin.GetShadowJob(pb.GetShadowJobRequest(session=session("s9"), model="a")), "UNKNOWN_SESSION", "'s9'"),
        (admin.GetInstance(pb.GetInstanceRequest(name="a-p")), "UNKNOWN_INSTANCE", "did you mean 'a-p"),
    ):
        code, found, fields = await refusal(call)
        assert (code, found) == (grpc.StatusCode.NOT_FOUND, f"REJECTION_REASON_{reason}")
        assert says in "".join(fields.values())


# Watches.


async def test_a_watch_sends_what_is_and_then_what_changed(admin: Any, controller: Controller) -> None:
    watch = admin.Watch(pb.WatchRequest(models=pb.ListModelsRequest(), interval_seconds=0.1))
    assert [m.decode_ready for m in (await watch.read()).models.models] == [2, 2]
    await admin.DrainInstance(pb.DrainInstanceRequest(name="b-d0"))
    assert [m.decode_ready for m in (await watch.read()).models.models] == [2, 1]
    ledger = admin.Watch(pb.WatchRequest(ledger=pb.GetLedgerRequest()))
    assert (await ledger.read()).ledger.in_flight == pb.InFlight()
    controller.plane.close()
    assert await watch.read() is grpc.aio.EOF


async def test_events_are_watched_from_where_one_left_off(admin: Any) -> None:
    await admin.DrainInstance(pb.DrainInstanceRequest(name="a-p0"))
    await admin.PauseShadow(pb.PauseShadowRequest(cluster=True))
    request = pb.WatchEventsRequest(after_sequence=0, kinds=[pb.EVENT_KIND_SHADOW_PAUSE, pb.EVENT_KIND_SHADOW_POLICY])
    watch = admin.WatchEvents(request)
    assert (await watch.read()).event.subject == "cluster"
    # A number of an earlier controller's life is no reason to wait for ever.
    later = admin.WatchEvents(pb.WatchEventsRequest(after_sequence=2**64 - 1))
    await later.initial_metadata()
    await admin.UndrainInstance(pb.UndrainInstanceRequest(name="a-p0"))
    event = (await later.read()).event
    assert (event.subject, event.reason) == ("a-p0", "ready")


async def test_watches_are_capped_and_end_free_their_place() -> None:
    config = ControllerConfig.model_validate(
        {"listen": "127.0.0.1:0", "grace_seconds": 0, "limits": {"max_streams": 1}}
    )
    async with (
        Controller(config).running() as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        first = admin.Watch(pb.WatchRequest(ledger=pb.GetLedgerRequest()))
        await first.read()
        code, reason, _ = await refusal(admin.WatchEvents(pb.WatchEventsRequest()).read())
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "REJECTION_REASON_TOO_MANY_STREAMS")
        first.cancel()
        answer = None
        while answer is None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await admin.Watch(pb.WatchRequest(ledger=pb.GetLedgerRequest())).read()
        assert answer.HasField("ledger")


# What operators do.


async def test_a_drain_says_what_is_left_and_gateways_see_it(admin: Any, channel: grpc.aio.Channel) -> None:
    view = placement_pb2_grpc.PlacementServiceStub(channel).WatchCluster(placement_pb2.WatchClusterRequest())
    await view.read()
    drained = await admin.DrainInstance(pb.DrainInstanceRequest(name="a-d0"))
    assert (drained.others_ready, drained.instance.draining) == (1, True)
    assert drained.instance.state == common_pb2.INSTANCE_STATE_DRAINING
    states = {i.endpoint.ref.name: i.state for i in (await view.read()).instances}
    assert states["a-d0"] == common_pb2.INSTANCE_STATE_DRAINING
    assert (await admin.DrainInstance(pb.DrainInstanceRequest(name="a-d1"))).others_ready == 0
    call = placement_pb2_grpc.PlacementServiceStub(channel).BeginCall(begin("a"))
    code, reason, _ = await refusal(call)
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "REJECTION_REASON_ALL_DRAINING")
    shown = await admin.GetEffectiveConfig(pb.GetEffectiveConfigRequest())
    assert list(shown.drained_instances) == ["a-d0", "a-d1"]
    assert not (await admin.UndrainInstance(pb.UndrainInstanceRequest(name="a-d1"))).instance.draining


async def test_pauses_are_listed_and_resumed_scope_by_scope(admin: Any) -> None:
    await admin.PauseShadow(pb.PauseShadowRequest(cluster=True))
    await admin.PauseShadow(pb.PauseShadowRequest(model="b"))
    paused = await admin.PauseShadow(pb.PauseShadowRequest(instance="a-p0"))
    assert paused.pauses == pb.ShadowPauses(cluster=True, models=["b"], instances=["a-p0"])
    left = await admin.ResumeShadow(pb.ResumeShadowRequest(cluster=True))
    assert left.pauses == pb.ShadowPauses(models=["b"], instances=["a-p0"])
    instances = (await admin.ListInstances(pb.ListInstancesRequest())).instances
    assert {i.endpoint.ref.name for i in instances if i.shadow_paused} == {"a-p0", "b-p0", "b-p1", "b-d0", "b-d1"}
    shown = await admin.GetEffectiveConfig(pb.GetEffectiveConfigRequest())
    assert (shown.pauses, shown.policy.approach) == (left.pauses, "harvest-slo")


async def test_statistics_count_by_reason(admin: Any, channel: grpc.aio.Channel) -> None:
    await place(channel, "s1")
    found = await admin.GetStatistics(pb.GetStatisticsRequest())
    placed = {(c.role, c.reason): c.count for c in found.placements}
    assert placed == {(role, common_pb2.PLACEMENT_REASON_FIRST_CALL): 1 for role in (1, 2)}
    assert [(c.reason, c.count) for c in found.shadow_jobs] == [(common_pb2.SHADOW_REASON_RENDERING, 1)]
    assert (found.sessions, found.uptime_seconds > 0) == (1, True)


# Input that makes no sense.


@pytest.mark.parametrize(
    ("rpc", "request_", "field"),
    [
        ("PauseShadow", pb.PauseShadowRequest(), "scope"),
        ("ResumeShadow", pb.ResumeShadowRequest(cluster=False), "scope"),
        ("PauseShadow", pb.PauseShadowRequest(model=""), "model"),
        ("DrainInstance", pb.DrainInstanceRequest(), "name"),
        ("DrainInstance", pb.DrainInstanceRequest(name="x" * 1_000_000), "name"),
        ("RebindSession", pb.RebindSessionRequest(session=session("s"), model="a"), "prefill"),
        ("ForgetSession", pb.ForgetSessionRequest(), "session.session_id"),
        ("ListInstances", pb.ListInstancesRequest(page_size=-1), "page_size"),
        ("ListInstances", pb.ListInstancesRequest(state=99), "state"),  # type: ignore[arg-type]
        ("ListEvents", pb.ListEventsRequest(kinds=[99]), "kinds"),  # type: ignore[list-item]
    ],
)
async def test_a_refusal_names_the_field(admin: Any, rpc: str, request_: Message, field: str) -> None:
    code, reason, fields = await refusal(getattr(admin, rpc)(request_))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REJECTION_REASON_INVALID_FIELD")
    assert list(fields) == [field]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.WatchRequest(), "what"),
        (pb.WatchRequest(ledger=pb.GetLedgerRequest(), interval_seconds=1e-3), "interval_seconds"),
        (pb.WatchRequest(ledger=pb.GetLedgerRequest(), interval_seconds=float("nan")), "interval_seconds"),
        (pb.WatchRequest(models=pb.ListModelsRequest(page_token="?")), "page_token"),
    ],
)
async def test_a_watch_that_cannot_be_is_refused(admin: Any, request_: pb.WatchRequest, field: str) -> None:
    code, _, fields = await refusal(admin.Watch(request_).read())
    assert (code, list(fields)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


_WILD: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_STRING: ("", "a", "a-p0", "s1", "\x00", "☃" * 5000, "-1"),
    FieldDescriptor.TYPE_BOOL: (True, False),
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: (float("nan"), float("inf"), -1.0, 0.0, 0.5, 1e308),
    FieldDescriptor.TYPE_ENUM: (0, 1, 5, 2**31 - 1),
}


def _fill(message: Message, dice: random.Random) -> None:
    """Set some fields to values that some field somewhere might have."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.3:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), dice)
        elif field.is_repeated:
            getattr(message, field.name).extend(dice.choices(_WILD[field.type], k=3))
        else:
            setattr(message, field.name, dice.choice(_WILD[field.type]))


def _requests(dice: random.Random) -> Iterator[tuple[str, bool, Any]]:
    for method in SERVICE.methods:
        for _ in range(25):
            request = getattr(pb, method.input_type.name)()
            _fill(request, dice)
            yield method.name, method.server_streaming, request


async def test_no_request_makes_it_stumble(admin: Any, controller: Controller, channel: grpc.aio.Channel) -> None:
    fine = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}
    for name, streams, request in _requests(random.Random(7)):
        await place(channel, "s1") if controller.plane.cluster.registry.ready("a", common_pb2.ROLE_DECODE) else None
        call = getattr(admin, name)(request)
        try:
            # A stream's first answer, or its headers where it has nothing to say yet.
            await (call if not streams else call.read() if name == "Watch" else call.initial_metadata())
        except grpc.aio.AioRpcError:
            pass
        else:
            assert not call.done() or await call.code() in {grpc.StatusCode.OK, *fine}
            call.cancel()
            continue
        assert await call.code() in fine, (name, request, await call.details())
    path = f"/{SERVICE.full_name}/DrainInstance"
    # Bytes that are no message never get as far as the servicer: gRPC itself says UNKNOWN.
    with pytest.raises(grpc.aio.AioRpcError, match="Error parsing message"):
        await channel.unary_unary(path)(b"\xff\xff\xff")
    assert (await admin.ListModels(pb.ListModelsRequest())).models


# Under load.


async def test_no_call_fails_while_instances_are_drained_and_undrained(
    admin: Any, controller: Controller, channel: grpc.aio.Channel
) -> None:
    """The real gateway and controller over scripted engines: drains roam while calls of some sessions run."""
    engines = {name: FakeEngine(name) for name in ("c-p0", "c-p1", "c-d0", "c-d1")}
    async with serving(engines.values()), aiohttp.ClientSession() as http:
        for name, engine in engines.items():
            role = common_pb2.ROLE_PREFILL if "-p" in name else common_pb2.ROLE_DECODE
            add_instance(controller.plane, name, "c", role, url=engine.url)
        gateway = Gateway(parse(GatewayConfig, {"controller": f"127.0.0.1:{controller.port}", "listen": "127.0.0.1:0"}))
        url = await gateway.start()
        try:
            statuses: list[int] = []
            talked = asyncio.Event()

            async def talk(name: str) -> None:
                for turn in range(12):
                    body = {"model": "c", "messages": [{"role": "user", "content": f"turn {turn}"}]}
                    headers = {"X-Session-ID": name}
                    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                        statuses.append(response.status)
                        await response.read()

            async def roam() -> None:
                while not talked.is_set():
                    for name in engines:
                        await admin.DrainInstance(pb.DrainInstanceRequest(name=name))
                        await admin.UndrainInstance(pb.UndrainInstanceRequest(name=name))

            roaming = asyncio.create_task(roam())
            await asyncio.gather(*(talk(f"s{index}") for index in range(4)))
            talked.set()
            await roaming
            assert statuses == [200] * 48
            with controller.plane.turn() as (cluster, now):
                for name in ("c-p0", "c-d0"):
                    cluster.operators.drain(now, name)
            served = {name: len(engines[name].calls()) for name in ("c-p0", "c-d0")}
            await asyncio.gather(*(talk(f"s{index}") for index in range(4)))
            assert statuses == [200] * 96
            assert served == {name: len(engines[name].calls()) for name in served}
            reasons = controller.plane.cluster.call_ledger.placements
            assert reasons["c", common_pb2.ROLE_DECODE, common_pb2.PLACEMENT_REASON_INSTANCE_DRAINING] > 0
            assert controller.plane.cluster.call_ledger.recomputed == 0
        finally:
            await gateway.stop()
        assert (await admin.GetLedger(pb.GetLedgerRequest())).in_flight == pb.InFlight()
