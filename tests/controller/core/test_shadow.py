"""Shadow jobs, through the cluster's public methods: what runs, when, in which order, and what becomes of it."""

import pytest

from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.support import GATEWAY, SESSION, World, world

PREFILL, EXPORT, FETCH = pb.LEG_KIND_PREFILL, pb.LEG_KIND_EXPORT, pb.LEG_KIND_FETCH


def job_reason(w: World, model: str = "b", session: SessionKey = SESSION) -> str:
    job = w.cluster.jobs.get(session, model)
    assert job is not None
    return pb.ShadowReason.Name(job.reason).removeprefix("SHADOW_REASON_").lower()


def in_flight(w: World) -> tuple[int, int]:
    return w.cluster.jobs.legs_in_flight, sum(i.gate.shadow_chunks for i in w.cluster.registry)


def test_a_context_is_computed_in_chunks_and_then_moved_in_chunks_whole_blocks_only() -> None:
    w = world()
    begun = w.begin("a", 10_000)
    assert [target.model for target in begun.shadow_targets] == ["b"]
    assert job_reason(w) == "rendering"
    w.render("b", 10_000)
    legs = w.run_legs()
    assert [(leg.kind, leg.upto_tokens) for leg in legs] == [
        (PREFILL, 4096),
        (PREFILL, 8192),
        (PREFILL, 9984),
        (EXPORT, 4096),
        (FETCH, 4096),
        (EXPORT, 8192),
        (FETCH, 8192),
        (EXPORT, 9984),
        (FETCH, 9984),
    ]
    assert {leg.instance.name for leg in legs} == {"b-p0", "b-d0"}
    assert job_reason(w) == "warm"
    assert in_flight(w) == (0, 0)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.pushed, ledger.resident) == (9984, 9984, 9984)


def test_a_grown_context_costs_its_delta_only() -> None:
    w = world()
    w.begin("a", 5000)
    w.render("b", 5000)
    w.run_legs()
    w.render("b", 6000, kept=5000)
    assert [(leg.kind, leg.upto_tokens) for leg in w.run_legs()] == [(PREFILL, 5888), (EXPORT, 5888), (FETCH, 5888)]
    assert w.cluster.shadow_ledger.prefilled == 5888


def test_less_than_a_block_more_is_not_worth_a_leg() -> None:
    w = world()
    w.begin("a", 5000)
    w.render("b", 4992)
    w.run_legs()
    w.render("b", 5100, kept=4992)
    assert w.run_legs() == []
    assert job_reason(w) == "warm"


def test_a_new_rendering_supersedes_what_is_left_and_keeps_the_running_leg() -> None:
    w = world()
    w.begin("a", 9000)
    w.render("b", 9000)
    (leg,) = w.pump()
    w.render("b", 12_288, kept=9000)
    assert w.cancelled == {}
    (following,) = w.finish(leg)
    assert (following.revision, following.upto_tokens) == (2, 8192)
    w.legs.clear()


def test_an_older_rendering_that_comes_late_changes_nothing() -> None:
    w = world()
    w.begin("a", 9000)
    for revision, tokens in ((2, 8000), (1, 9000)):
        w.cluster.rendered(w.now, GATEWAY, SESSION, "b", revision=revision, tokens=tokens)
    job = w.cluster.jobs.get(SESSION, "b")
    assert job is not None
    assert (job.revision, job.target_tokens) == (2, 8000)


def test_a_rewritten_history_cuts_back_to_the_common_prefix() -> None:
    w = world()
    w.begin("a", 8192)
    w.render("b", 8192)
    w.run_legs()
    w.render("b", 9000, kept=1000)
    legs = w.run_legs()
    assert [(leg.kind, leg.upto_tokens) for leg in legs if leg.kind == PREFILL] == [
        (PREFILL, 4096),
        (PREFILL, 8192),
        (PREFILL, 8960),
    ]
    ledger = w.cluster.shadow_ledger
    assert ledger.wasted == 8192 - 896
    assert ledger.by_waste_reason[pb.SHADOW_REASON_CUT_BACK] == ledger.wasted
    assert ledger.resident == 8960


def test_a_leg_about_a_rewritten_part_is_cancelled() -> None:
    w = world()
    w.begin("a", 8192)
    w.render("b", 8192)
    (leg,) = w.pump()
    w.render("b", 9000, kept=1000)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_CUT_BACK}


def test_no_leg_starts_while_its_prefill_instance_has_normal_work() -> None:
    w = world()
    busy = w.begin("b", 2000, session=None)
    w.begin("a", 5000)
    w.render("b", 5000)
    assert w.pump() == []
    assert job_reason(w) == "prefill_busy"
    w.transfer(busy)
    (leg,) = w.pump()
    assert leg.kind == PREFILL


def test_requests_that_did_not_come_through_the_controller_hold_shadow_work_too() -> None:
    w = world()
    w.healthy("b-p0", running=1)
    w.begin("a", 5000)
    w.render("b", 5000)
    assert w.pump() == []
    assert job_reason(w) == "prefill_busy"
    w.healthy("b-p0", running=0)
    w.cluster.tick(w.now)
    assert len(w.pump()) == 1


def test_a_report_that_still_counts_our_own_ended_leg_does_not_hold_the_next() -> None:
    w = world()
    w.begin("a", 10_000)
    w.render("b", 10_000)
    (leg,) = w.pump()
    (second,) = w.finish(leg)
    w.healthy("b-p0", running=1)
    assert len(w.finish(second)) == 1


def test_a_normal_call_takes_its_prefill_instance_back_at_once() -> None:
    w = world()
    w.begin("a", 9000)
    w.render("b", 9000)
    (leg,) = w.pump()
    normal = w.begin("b", 500, session=None)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_PREEMPTED}
    assert w.finish(leg, pb.LEG_OUTCOME_CANCELLED) == []
    w.transfer(normal)
    (again,) = w.pump()
    # What the cancelled leg left behind is found cached and is shadow work all the same.
    w.finish(again, cached=2048)
    assert w.cluster.shadow_ledger.prefilled == 4096


def test_on_shared_hardware_shadow_work_waits_for_every_neighbour_and_gives_way_to_each() -> None:
    w = world(hardware="gpu-0")
    call = w.begin("a", 9000)
    # Rendering would only take time from the call; its end asks for it.
    assert call.shadow_targets == []
    w.render("b", 9000)
    assert w.pump() == []
    assert job_reason(w) == "hardware_busy"
    w.transfer(call)
    w.decode(call)
    assert w.pump() == []
    assert [target.model for target in w.end(call, 9000)] == ["b"]
    (leg,) = w.pump()
    assert leg.instance.name == "b-p0"
    w.begin("a", 500, session=None)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_PREEMPTED}


def test_one_leg_per_prefill_instance_likeliest_switch_first() -> None:
    w = world()
    for _ in range(20):
        w.cluster.prior.observe("eager", "a", "b")
        w.cluster.prior.observe("loyal", "a", "a")
    keys = {task: SessionKey("", task) for task in ("loyal", "eager")}
    blocker = w.begin("b", 100, session=None)
    for task, key in keys.items():
        w.begin("a", 5000, session=key, task=task)
        w.render("b", 5000, session=key)
    assert w.pump() == []
    w.transfer(blocker)
    (leg,) = w.pump()
    assert leg.session == keys["eager"]
    assert job_reason(w, session=keys["loyal"]) == "prefill_taken"


def test_chunks_move_only_while_the_link_carries_no_normal_transfer() -> None:
    w = world()
    w.begin("a", 4096)
    w.render("b", 4096)
    (prefill,) = w.pump()
    normal = w.begin("b", 500, session=None)
    w.finish(prefill)
    w.transfer(normal)
    assert w.pump() == []
    assert job_reason(w) == "link_busy"
    w.decode(normal)
    (export,) = w.pump()
    assert export.kind == EXPORT


def test_a_chunk_in_flight_finishes_and_no_other_starts_beside_a_normal_transfer() -> None:
    w = world()
    w.begin("a", 8192)
    w.render("b", 8192)
    (leg,) = w.pump()
    while leg.kind != FETCH:
        (leg,) = w.finish(leg)
    normal = w.begin("b", 500, session=None)
    w.transfer(normal)
    w.pump()
    assert w.cancelled == {}
    assert w.finish(leg) == []
    assert job_reason(w) == "link_busy"
    w.decode(normal)
    (following,) = w.pump()
    assert (following.kind, following.upto_tokens) == (EXPORT, 8192)


def test_at_a_switch_the_shadow_stops_and_what_it_covered_counts_as_hit() -> None:
    w = world()
    w.call("a", 6000)
    w.render("b", 6000)
    w.run_legs()
    w.render("b", 6400, kept=6000)
    (leg,) = w.pump()
    switch = w.begin("b", 6500)
    w.pump()
    assert switch.call.is_switch
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_MODEL_IN_USE}
    w.finish(leg, pb.LEG_OUTCOME_CANCELLED)
    w.transfer(switch)
    w.decode(switch)
    w.end(switch, 6500, cached=5888)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.hit, ledger.wasted, ledger.resident) == (5888, 5888, 0, 0)
    assert w.cluster.call_ledger.switch_cached_tokens == 5888


def test_a_prefix_the_model_computed_itself_is_no_shadow_hit() -> None:
    w = world()
    w.call("b", 3000)
    w.call("a", 4000)
    w.render("b", 4096, kept=2900)
    w.run_legs()
    assert w.cluster.shadow_ledger.prefilled == 4096 - 2816
    w.call("b", 4200, cached=4096)
    assert w.cluster.shadow_ledger.hit == 4096 - 2816


def test_a_shadow_that_was_evicted_before_its_call_is_wasted() -> None:
    w = world()
    w.call("a", 4096)
    w.render("b", 4096)
    w.run_legs()
    w.call("b", 4200, cached=0)
    ledger = w.cluster.shadow_ledger
    assert (ledger.hit, ledger.wasted, ledger.resident) == (0, 4096, 0)


@pytest.mark.parametrize("kind", [PREFILL, EXPORT, FETCH])
@pytest.mark.parametrize("outcome", [pb.LEG_OUTCOME_FAILED, pb.LEG_OUTCOME_TIMED_OUT])
def test_a_failed_leg_gives_everything_back_and_waits_longer_every_time(
    kind: pb.LegKind.ValueType, outcome: pb.LegOutcome.ValueType
) -> None:
    w = world(shadow={"backoff_seconds": 1.0, "max_backoff_seconds": 3.0}, links={"quarantine_after_failures": 100})
    w.begin("a", 4096)
    w.render("b", 4096)
    for wait in (1.0, 2.0, 3.0, 3.0):
        w.cluster.tick(w.now)
        (leg,) = w.pump()
        while leg.kind != kind:
            (leg,) = w.finish(leg)
        assert w.finish(leg, outcome) == []
        assert in_flight(w) == (0, 0)
        assert job_reason(w) == "backoff"
        w.now += wait - 0.01
        w.cluster.tick(w.now)
        assert w.pump() == []
        w.now += 0.02


def test_a_leg_may_fail_any_number_of_times() -> None:
    """A wait that doubles two thousand times is the longest one, and no number too large for a float."""
    w = world(shadow={"backoff_seconds": 0.5, "max_backoff_seconds": 1.0})
    w.begin("a", 4096)
    w.render("b", 4096)
    for _ in range(2000):
        (leg,) = w.pump()
        w.finish(leg, pb.LEG_OUTCOME_FAILED)
        w.now += 1.01
        w.cluster.tick(w.now)
    assert len(w.pump()) == 1


def test_a_dispatcher_that_says_nothing_past_the_deadline_has_lost_the_leg() -> None:
    w = world(shadow={"prefill_deadline_seconds": 10.0})
    w.begin("a", 4096)
    w.render("b", 4096)
    (leg,) = w.pump()
    w.now = 12.0
    w.cluster.tick(w.now)
    w.pump()
    assert leg.leg_id in w.cancelled
    assert in_flight(w)[0] == 0
    w.finish(leg)
    assert w.cluster.shadow_ledger.prefilled == 0


@pytest.mark.parametrize(("name", "kind"), [("b-p0", PREFILL), ("b-p0", EXPORT), ("b-d0", FETCH), ("b-d0", EXPORT)])
def test_legs_on_a_vanished_instance_end_at_once_and_late_words_change_nothing(
    name: str, kind: pb.LegKind.ValueType
) -> None:
    w = world()
    w.begin("a", 4096)
    w.render("b", 4096)
    (leg,) = w.pump()
    while leg.kind != kind:
        (leg,) = w.finish(leg)
    old = w.instance(name)
    w.healthy(name, incarnation="2")
    (again,) = w.pump()
    assert again.instance.ref.incarnation == "2" or again.instance.name != name
    assert (old.shadow_legs, old.fetch_leg, old.gate.shadow_chunks) == ({}, None, 0)
    assert w.cancelled[leg.leg_id] == pb.SHADOW_REASON_INSTANCE_LOST
    pushed = w.cluster.shadow_ledger.pushed
    w.finish(leg)
    assert w.cluster.shadow_ledger.pushed == pushed


def test_a_restarted_prefill_instance_takes_its_shadows_with_it_and_is_warmed_again() -> None:
    w = world()
    w.call("a", 4096)
    w.render("b", 4096)
    w.run_legs()
    w.healthy("b-p0", incarnation="2")
    ledger = w.cluster.shadow_ledger
    assert (ledger.wasted, ledger.resident) == (4096, 0)
    assert ledger.by_waste_reason[pb.SHADOW_REASON_INSTANCE_LOST] == 4096
    w.begin("a", 4200)
    assert [leg.kind for leg in w.run_legs()][:1] == [PREFILL]


def test_without_a_dispatcher_nothing_starts_and_its_legs_end_with_it() -> None:
    w = world()
    w.begin("a", 9000)
    w.render("b", 9000)
    w.pump()
    w.cluster.dispatcher_left(w.now, GATEWAY)
    assert in_flight(w) == (0, 0)
    assert w.pump() == []
    assert job_reason(w) == "no_dispatcher"
    w.cluster.dispatcher_connected(w.now, GATEWAY)
    assert len(w.pump()) == 1


def test_only_the_dispatcher_that_runs_a_leg_can_end_it() -> None:
    w = world()
    w.begin("a", 4096)
    w.render("b", 4096)
    (leg,) = w.pump()
    w.cluster.leg_finished(w.now, "somebody-else", leg.leg_id, pb.LEG_OUTCOME_DONE)
    assert w.cluster.shadow_ledger.prefilled == 0


def test_shadow_work_can_be_switched_off() -> None:
    w = world(shadow={"enabled": False})
    assert w.begin("a", 5000).shadow_targets == []
    w.render("b", 5000)
    assert w.pump() == []


def test_gate_and_top_k_decide_what_is_rendered() -> None:
    w = world(models=("a", "b", "c", "d"), shadow={"gate_probability": 0.2, "top_k": 1})
    for following, times in (("b", 60), ("c", 30), ("d", 10)):
        for _ in range(times):
            w.cluster.prior.observe("", "a", following)
    assert [target.model for target in w.begin("a", 5000).shadow_targets] == ["b"]
    assert job_reason(w, "c") == "not_top_k"
    assert job_reason(w, "d") == "below_gate"


def test_a_context_beyond_the_window_is_not_shadowed() -> None:
    w = world()
    job_instance = w.instance("b-p0")
    job_instance.facts = type(job_instance.facts)("1", 128, "", 4096)
    w.begin("a", 5000)
    w.render("b", 5000)
    assert w.pump() == []
    assert job_reason(w) == "exceeds_context"


def test_forgetting_a_session_ends_its_legs_and_wastes_its_shadow() -> None:
    w = world(limits={"session_idle_seconds": 60})
    w.call("a", 9000)
    w.render("b", 9000)
    (leg,) = w.pump()
    (second,) = w.finish(leg)
    w.now = 61.0
    w.cluster.tick(w.now)
    w.pump()
    assert w.cancelled == {second.leg_id: pb.SHADOW_REASON_FORGOTTEN}
    assert w.dropped == [SESSION]
    assert in_flight(w) == (0, 0)
    assert w.cluster.shadow_ledger.wasted == 4096
    assert list(w.cluster.jobs) == []


def test_a_call_that_overtook_a_leg_owns_what_both_computed() -> None:
    w = world()
    w.begin("a", 4096)
    w.render("b", 4096)
    (leg,) = w.pump()
    w.call("b", 4500)
    w.finish(leg, cached=0)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.wasted, ledger.resident) == (4096, 4096, 0)
