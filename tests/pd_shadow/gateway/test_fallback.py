"""The data path survives the controller."""

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.api.v1 import common_pb2, placement_pb2
from pd_shadow.gateway.cluster import ClusterView

from .rig import Refusal, Rig, running


def instance(name: str, role: int, model: str = "m", state: int = common_pb2.INSTANCE_STATE_READY):  # type: ignore[no-untyped-def]
    ref = common_pb2.InstanceRef(name=name, incarnation="1")
    endpoint = common_pb2.InstanceEndpoint(ref=ref, url=f"http://{name}")
    return placement_pb2.ClusterInstance(endpoint=endpoint, role=role, model=model, state=state)


async def test_controller_away_and_back(rig: Rig) -> None:
    assert (await rig.chat())[0] == 200
    await rig.stop_controller()
    status, payload, _ = await rig.chat()
    assert status == 200
    assert payload["choices"][0]["message"]["content"] == "Hello"
    assert rig.metric("controller_fallbacks_total") == 1
    assert len(rig.ad.calls()) == 2
    assert (await rig.get("/ready"))[0] == 200
    watchers = rig.controller.watchers
    await rig.start_controller()
    await rig.controller.until(lambda: rig.controller.watchers > watchers)
    ended = len(rig.controller.ended)
    assert (await rig.chat())[0] == 200
    await rig.controller.until(lambda: len(rig.controller.ended) > ended)
    assert rig.metric("controller_fallbacks_total") == 1


async def test_controller_down_mid_call_does_not_disturb_it(rig: Rig) -> None:
    rig.ad.go.clear()
    call = asyncio.create_task(rig.chat())
    await rig.ad.until(lambda: bool(rig.ad.seen))
    await rig.stop_controller()
    rig.ad.go.set()
    assert (await call)[0] == 200


async def test_a_controller_that_does_not_answer_is_not_waited_for_twice() -> None:
    async with running({"deadlines": {"begin_call": 0.05}}) as rig:
        rig.controller.go.clear()
        assert (await rig.chat())[0] == 200
        assert (await rig.chat())[0] == 200
        assert rig.metric("controller_fallbacks_total") == 2
        assert len(rig.controller.begun) == 1
        # The placement that came too late is ended, so that its load does not stay reserved.
        rig.controller.go.set()
        await rig.controller.until(lambda: bool(rig.controller.ended))
        assert rig.controller.ended[0].call_id == "call-1"
        assert rig.controller.ended[0].handoff == common_pb2.HANDOFF_NONE


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
async def test_a_broken_controller_counts_as_away(rig: Rig, code: grpc.StatusCode) -> None:
    rig.controller.refusal = Refusal(code, "broken")
    assert (await rig.chat())[0] == 200
    assert rig.metric("controller_fallbacks_total") == 1


async def test_unknown_model_without_a_controller(rig: Rig) -> None:
    await rig.stop_controller()
    status, payload, _ = await rig.chat(model="zzz")
    assert (status, payload["error"]["code"]) == (404, "model_not_found")


async def test_never_connected() -> None:
    async with running(with_controller=False) as rig:
        assert (await rig.get("/health"))[0] == 200
        assert (await rig.get("/ready"))[0] == 503
        status, payload, headers = await rig.chat()
        assert (status, payload["error"]["code"], headers["Retry-After"]) == (503, "no_ready_instance", "1")
        status, payload = await rig.get("/v1/models")
        assert (status, payload["data"]) == (200, [])


async def test_models_and_metrics(rig: Rig) -> None:
    status, payload = await rig.get("/v1/models")
    assert status == 200
    assert [(m["id"], m["max_model_len"]) for m in payload["data"]] == [("a", 8192), ("b", 8192)]
    status, text = await rig.get("/metrics")
    assert status == 200
    assert "pd_shadow_gateway_in_flight_calls" in text


def test_only_ready_instances_of_the_model_take_calls() -> None:
    view = ClusterView(default_block_size=16)
    assert view.place("m", "k") is None
    view.update([instance("p", common_pb2.ROLE_PREFILL), instance("other", common_pb2.ROLE_DECODE, model="n")])
    assert view.place("m", "k") is None
    draining = common_pb2.INSTANCE_STATE_DRAINING
    view.update([instance("p", common_pb2.ROLE_PREFILL, state=draining), instance("d", common_pb2.ROLE_COLOCATED)])
    placed = view.place("m", "k")
    assert placed is not None
    assert placed[0] is None
    assert placed[1].instance.ref.name == "d"
    assert placed[1].reason == common_pb2.PLACEMENT_REASON_CONTROLLER_UNREACHABLE


@given(st.lists(st.text(max_size=20), min_size=1, max_size=30), st.integers(0, 4))
def test_losing_an_instance_moves_only_its_own_keys(keys: list[str], lost: int) -> None:
    view = ClusterView(default_block_size=16)
    instances = [instance(f"d{i}", common_pb2.ROLE_DECODE) for i in range(5)]

    def where() -> list[str]:
        placed = [view.place("m", key) for key in keys]
        return [p[1].instance.ref.name for p in placed if p is not None]

    view.update(instances)
    before = where()
    view.update([i for i in instances if i.endpoint.ref.name != f"d{lost}"])
    for old, new in zip(before, where(), strict=True):
        assert new == old or old == f"d{lost}"
