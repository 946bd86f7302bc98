"""Models whose instances compute prompts and generate, through the cluster's public methods."""

import pytest

from controller.core.instance import LoadReport
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.support import SESSION, World, digests, facts, world

PREFILL = pb.LEG_KIND_PREFILL


def colocated(**more: object) -> World:
    return world(colocated=("a", "b"), **more)  # type: ignore[arg-type]


def job_reason(w: World, model: str = "b") -> str:
    job = w.cluster.jobs.get(SESSION, model)
    assert job is not None
    return pb.ShadowReason.Name(job.reason).removeprefix("SHADOW_REASON_").lower()


def held(w: World, model: str) -> tuple[int, int, int]:
    """Tokens the session has on the model: on the prefill side, on the decode side, its shadows' part."""
    session = w.cluster.sessions.get(SESSION)
    assert session is not None
    binding = session.bindings[model]
    return binding.prefill_tokens, binding.decode_tokens, binding.shadow_resident


def test_one_sticky_instance_takes_the_whole_call() -> None:
    w = colocated(replicas=3)
    first = w.call("a", 2000).call
    again = w.begin("a", 3000).call
    assert first.prefill == first.decode
    assert again.decode.instance is first.decode.instance
    assert (first.decode.reason, again.decode.reason) == (
        pb.PLACEMENT_REASON_FIRST_CALL,
        pb.PLACEMENT_REASON_STICKY,
    )
    placements = w.cluster.call_ledger.placements
    assert {(model, role): n for (model, role, _), n in placements.items()} == {("a", pb.ROLE_COLOCATED): 1}
    assert placements.total() == 2
    assert first.decode.instance.sessions == 1


def test_load_is_counted_once_and_the_prompt_until_the_first_token() -> None:
    w = colocated()
    begun = w.begin("a", 1500)
    instance = w.instance("a-c0")
    assert (instance.calls, instance.pending_prefill_tokens) == (1, 1500)
    w.decode(begun)
    assert (instance.calls, instance.pending_prefill_tokens) == (1, 0)
    w.end(begun, 1500, handoff=pb.HANDOFF_NONE)
    assert (instance.calls, instance.pending_prefill_tokens) == (0, 0)
    assert instance.gate.normal_transfers == 0
    ledger = w.cluster.call_ledger
    assert (ledger.calls, ledger.handed_off, ledger.recomputed) == (1, 0, 0)


def test_one_request_of_the_engine_is_one_call_here_and_a_second_one_is_somebody_elses() -> None:
    w = colocated()
    w.begin("a", 1500)
    for running, foreign in ((1, 0), (2, 1)):
        w.healthy("a-c0", running=running)
        assert w.instance("a-c0").foreign_requests == foreign


def test_calls_without_a_session_spread_by_what_each_instance_generates() -> None:
    w = colocated(replicas=2)
    placed = []
    for _ in range(4):
        begun = w.begin("a", 100, session=None)
        w.decode(begun)
        placed.append(begun.call.decode.instance.name)
    assert sorted(placed) == ["a-c0", "a-c0", "a-c1", "a-c1"]


def test_a_busy_sticky_instance_is_left_when_a_cold_one_ends_first() -> None:
    w = colocated(replicas=2)
    sticky = w.call("a", 4000).call.decode.instance
    others = [w.begin("a", 20_000, session=None) for _ in range(2)]
    for other in others:
        if other.call.decode.instance is not sticky:
            w.decode(other)
    begun = w.begin("a", 5000)
    assert begun.call.decode.instance is not sticky
    assert begun.call.decode.reason == pb.PLACEMENT_REASON_STICKY_BUSY


def test_prompt_and_output_stay_in_one_cache() -> None:
    w = colocated()
    w.call("a", 4000, output=225, digests=digests("x", "y"))
    # 4,000 prompt and 225 generated tokens, the last of them never written: 33 whole blocks.
    assert held(w, "a") == (4224, 0, 0)
    assert w.begin("a", 5000, digests=digests("x", "y", "z")).call.expected_warm_tokens == 4224


def test_a_call_that_broke_off_says_nothing_about_what_is_cached() -> None:
    w = colocated()
    w.call("a", 100)
    w.render("b", 4096)
    w.run_legs()
    broken = w.begin("b", 4500)
    w.decode(broken)
    w.end(broken, 4500, outcome=pb.CALL_OUTCOME_CLIENT_GONE, handoff=pb.HANDOFF_NONE)
    assert held(w, "b") == (4096, 0, 4096)


def test_prefill_speed_is_learnt_from_first_tokens_only() -> None:
    w = colocated()
    instance = w.instance("a-c0")
    before = instance.prefill_tokens_per_second
    whole = w.begin("a", 4000)
    w.now = 9.0
    w.end(whole, 4000, handoff=pb.HANDOFF_NONE)
    assert instance.prefill_tokens_per_second == before
    streamed = w.begin("a", 8000)
    w.now = 10.0
    w.decode(streamed)
    w.now = 20.0
    w.end(streamed, 8000, cached=4000, handoff=pb.HANDOFF_NONE)
    assert instance.prefill_tokens_per_second == pytest.approx(before + 0.2 * (4000 - before))


def test_without_a_ready_instance_a_call_is_refused() -> None:
    w = colocated()
    w.cluster.miss(w.now, "a-c0", refused=True)
    with pytest.raises(RejectedError) as refused:
        w.begin("a")
    assert refused.value.reason == pb.REJECTION_REASON_NO_READY_INSTANCE
    assert not w.cluster.calls


def test_a_shadow_is_prefill_legs_alone_and_what_a_switch_finds() -> None:
    w = colocated()
    w.call("a", 10_000)
    assert [target.renderer.name for target in w.begin("a", 10_000).shadow_targets] == ["b-c0"]
    w.render("b", 10_000)
    legs = w.run_legs()
    assert [(leg.kind, leg.upto_tokens, leg.instance.name) for leg in legs] == [
        (PREFILL, 4096, "b-c0"),
        (PREFILL, 8192, "b-c0"),
        (PREFILL, 9984, "b-c0"),
    ]
    assert job_reason(w) == "warm"
    _, models = w.cluster.warmth(SESSION)
    by_name = {warmth.model: warmth for warmth in models}
    assert by_name["b"].prefill_tokens == 9984
    assert by_name["b"].warm_fraction == pytest.approx(0.9984)
    switch = w.begin("b", 10_400)
    assert switch.call.is_switch
    assert switch.call.expected_warm_tokens == 9984
    w.decode(switch)
    w.end(switch, 10_400, cached=9984, handoff=pb.HANDOFF_NONE)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.pushed, ledger.hit, ledger.wasted, ledger.resident) == (9984, 0, 9984, 0, 0)


def test_decodes_that_run_do_not_hold_a_leg_back() -> None:
    w = colocated()
    normal = w.begin("b", 500, session=None)
    w.decode(normal)
    w.healthy("b-c0", running=5)
    w.call("a", 5000)
    w.render("b", 5000)
    (leg,) = w.pump()
    assert leg.instance.name == "b-c0"


def test_a_queue_by_the_engines_own_report_does() -> None:
    w = colocated()
    w.healthy("b-c0", running=5, waiting=1)
    w.call("a", 5000)
    w.render("b", 5000)
    assert w.pump() == []
    assert job_reason(w) == "queue_not_empty"
    w.healthy("b-c0", running=6)
    w.cluster.tick(w.now)
    assert len(w.pump()) == 1


def test_a_call_placed_since_the_last_report_may_be_waiting() -> None:
    w = colocated()
    w.begin("b", 500, session=None)
    w.call("a", 5000)
    w.render("b", 5000)
    assert w.pump() == []
    assert job_reason(w) == "queue_not_empty"
    # The engine has it running: an answer that does not stream shows no first token, and would hold for ever.
    w.healthy("b-c0", running=1)
    w.cluster.tick(w.now)
    assert len(w.pump()) == 1


def test_one_leg_per_instance() -> None:
    w = colocated()
    keys = [SessionKey("", "s1"), SessionKey("", "s2")]
    for key in keys:
        w.call("a", 5000, session=key)
        w.render("b", 5000, session=key)
    assert len(w.pump()) == 1
    second = w.cluster.jobs.get(keys[1], "b")
    assert second is not None
    assert second.reason == pb.SHADOW_REASON_PREFILL_TAKEN


def test_a_call_that_arrives_takes_the_instance_back_at_once() -> None:
    w = colocated()
    w.call("a", 9000)
    w.render("b", 9000)
    (leg,) = w.pump()
    w.begin("b", 500, session=None)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_PREEMPTED}


def test_shared_hardware_waits_for_its_neighbours_but_not_for_the_instances_own_decodes() -> None:
    w = colocated(hardware="gpu-0")
    w.call("a", 5000)
    w.render("b", 5000)
    (leg,) = w.pump()
    neighbour = w.begin("a", 500, session=None)
    w.pump()
    assert leg.leg_id in w.cancelled
    assert w.finish(leg, pb.LEG_OUTCOME_CANCELLED) == []
    assert job_reason(w) == "hardware_busy"
    w.end(neighbour, 500, handoff=pb.HANDOFF_NONE)
    own = w.begin("b", 500, session=None)
    w.decode(own)
    assert len(w.pump()) == 1


def test_a_restarted_instance_is_cold_and_warmed_again() -> None:
    w = colocated()
    w.call("a", 4096)
    w.render("b", 4096)
    w.run_legs()
    w.healthy("b-c0", incarnation="2")
    ledger = w.cluster.shadow_ledger
    assert ledger.by_waste_reason[pb.SHADOW_REASON_INSTANCE_LOST] == ledger.wasted == 4096
    legs = w.run_legs()
    assert [(leg.kind, leg.instance.ref) for leg in legs] == [(PREFILL, ("b-c0", "2"))]
    begun = w.begin("b", 5000)
    assert begun.call.decode.reason == pb.PLACEMENT_REASON_STICKY
    assert begun.call.expected_warm_tokens == 4096


def test_legs_on_a_vanished_instance_end_at_once() -> None:
    w = colocated()
    w.call("a", 9000)
    w.render("b", 9000)
    (leg,) = w.pump()
    w.healthy("b-c0", incarnation="2")
    (again,) = w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_INSTANCE_LOST}
    assert again.instance.ref == ("b-c0", "2")


def test_a_switch_may_go_between_a_split_model_and_a_colocated_one() -> None:
    w = world(colocated=("b",))
    w.call("a", 4096)
    w.render("b", 4096)
    assert [leg.kind for leg in w.run_legs()] == [PREFILL]
    w.call("b", 4500, cached=4096)
    w.render("a", 5000, kept=4096)
    assert [leg.kind for leg in w.run_legs()] == [PREFILL, pb.LEG_KIND_EXPORT, pb.LEG_KIND_FETCH]
    assert held(w, "a")[:2] == (4992, 4992)


@pytest.mark.parametrize(("split", "role"), [(True, pb.ROLE_COLOCATED), (False, pb.ROLE_PREFILL)])
def test_a_model_mixes_no_roles(split: bool, role: pb.Role.ValueType) -> None:
    w = world(models=("a",)) if split else world(models=("a",), colocated=("a",))
    stranger = Declared("stranger", "a", role, "http://stranger")
    w.cluster.declare(stranger)
    changes = w.cluster.observe(w.now, "stranger", facts(), LoadReport())
    assert changes.refused is not None
    assert changes.refused[1] == pb.REJECTION_REASON_MIXED_ROLES
    assert w.cluster.registry.named("stranger") is None
    message = w.cluster.events()[-1].message
    assert "stranger (colocated," in message or "stranger (prefill," in message
    assert message.endswith("mixed_roles")
    # Once the others are gone, the model may change over.
    w.now = 100.0
    for instance in list(w.cluster.registry):
        w.cluster.miss(w.now, instance.name, refused=True)
    assert w.cluster.observe(w.now, "stranger", facts(), LoadReport()).refused is None
    assert w.instance("stranger").ready


def test_eager_shadow_work_gives_way_to_nobody() -> None:
    w = colocated(hardware="gpu-0", shadow={"approach": "eager"})
    busy = w.begin("a", 9000)
    assert [target.model for target in busy.shadow_targets] == ["b"]
    w.healthy("b-c0", waiting=3)
    w.render("b", 9000)
    (leg,) = w.pump()
    assert leg.normal_priority
    w.begin("b", 500, session=None)
    w.pump()
    assert w.cancelled == {}


def test_other_approaches_run_behind_normal_work() -> None:
    w = colocated()
    w.call("a", 9000)
    w.render("b", 9000)
    assert not w.pump()[0].normal_priority
