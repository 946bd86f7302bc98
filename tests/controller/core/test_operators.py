"""What operators do: drain, pause, rebind, forget."""

from __future__ import annotations

import pytest

from controller.core.effects import PauseEngine, StartLeg
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.api.v1 import placement_pb2
from tests.controller.core.test_shadow import job_reason
from tests.controller.support import GATEWAY, SESSION, World, world

SPLIT = (("a-p0", "a-p1"), ("a-d0", "a-d1"))


def bound(w: World, model: str = "a") -> tuple[str, str]:
    """Names of the session's P and D."""
    binding = w.cluster.sessions.known(SESSION).bindings[model]
    return (binding.prefill.name if binding.prefill else "", binding.decode.name if binding.decode else "")


def other(name: str) -> str:
    return name[:-1] + ("1" if name.endswith("0") else "0")


def events(w: World, kind: admin.EventKind.ValueType) -> list[tuple[str, str]]:
    return [(event.subject, event.reason) for event in w.cluster.events() if event.kind == kind]


def refused(reason: pb.RejectionReason.ValueType, message: str | None = None) -> pytest.RaisesExc[RejectedError]:
    return pytest.RaisesExc(RejectedError, match=message, check=lambda error: error.reason == reason)


# Drain.


def test_a_drained_instance_gets_nothing_new_and_the_session_moves_with_its_next_call() -> None:
    w = world(replicas=2)
    w.call("a", 1000)
    prefill, decode = bound(w)
    running = w.begin("a", 1200)
    for name in (prefill, decode):
        w.cluster.operators.drain(w.now, name)
        assert w.instance(name).shown_state == pb.INSTANCE_STATE_DRAINING
    # A call that runs ends normally, and the session stays until its next call.
    w.transfer(running)
    w.decode(running)
    w.end(running, 1200, 896)
    assert bound(w) == (prefill, decode)
    begun = w.begin("a", 1400)
    assert begun.call.prefill is not None
    for placed, left in ((begun.call.prefill, prefill), (begun.call.decode, decode)):
        assert (placed.instance.name, placed.reason) == (other(left), pb.PLACEMENT_REASON_INSTANCE_DRAINING)
    assert events(w, admin.EVENT_KIND_SESSION_REBOUND) == [("s-1", "instance_draining")] * 2
    w.transfer(begun)
    w.decode(begun)
    w.end(begun, 1400)
    assert bound(w) == (other(prefill), other(decode))
    assert w.begin("a", 1500).call.decode.reason == pb.PLACEMENT_REASON_STICKY


def test_a_late_call_on_a_drained_instance_does_not_pull_the_session_back() -> None:
    w = world(replicas=2)
    late = w.begin("a", 1000)
    w.transfer(late)
    assert late.call.prefill is not None
    left = late.call.prefill.instance.name
    w.cluster.operators.drain(w.now, left)
    w.call("a", 1200)
    moved = bound(w)
    assert moved[0] == other(left)
    w.decode(late)
    w.end(late, 1000)
    assert bound(w)[0] == moved[0]


def test_a_drain_is_about_the_name_and_outlives_a_restart() -> None:
    w = world(replicas=2)
    w.cluster.operators.drain(w.now, "a-p0")
    w.healthy("a-p0", "2")
    assert w.instance("a-p0").shown_state == pb.INSTANCE_STATE_DRAINING
    w.attach("a-p0", "3")
    assert not w.instance("a-p0").ready
    assert all(
        w.begin("a", session=None).call.prefill == (w.instance("a-p1"), pb.PLACEMENT_REASON_NO_SESSION)
        for _ in range(4)
    )
    w.cluster.miss(w.now, "a-p1", refused=True)
    w.cluster.operators.undrain(w.now, "a-p0")
    assert w.instance("a-p0").ready
    # What is drained and unhealthy shows its health.
    w.cluster.operators.drain(w.now, "a-p1")
    assert w.instance("a-p1").shown_state == pb.INSTANCE_STATE_SUSPECT


def test_a_life_that_ends_drains_whatever_operators_say_and_the_next_life_does_not() -> None:
    w = world(replicas=2)
    w.cluster.mark_leaving(w.now, "a-p0", leaving=True)
    w.cluster.operators.undrain(w.now, "a-p0")
    assert w.instance("a-p0").shown_state == pb.INSTANCE_STATE_DRAINING
    w.healthy("a-p0", "2")
    assert w.instance("a-p0").ready
    w.cluster.operators.drain(w.now, "a-p0")
    w.cluster.mark_leaving(w.now, "a-p0", leaving=False)
    assert not w.instance("a-p0").ready
    states = [reason for subject, reason in events(w, admin.EVENT_KIND_INSTANCE_STATE) if subject == "a-p0"]
    assert states == ["ready", "draining", "gone", "ready", "draining"]


def test_where_everything_that_generates_drains_a_call_is_refused_and_keeps_its_warmth() -> None:
    w = world()
    w.call("a", 1000)
    w.cluster.operators.drain(w.now, "a-d0")
    with refused(pb.REJECTION_REASON_ALL_DRAINING, "that is up drains: a-d0"):
        w.begin("a", 1200)
    assert bound(w) == ("a-p0", "a-d0")
    w.cluster.operators.undrain(w.now, "a-d0")
    assert w.begin("a", 1200).call.expected_warm_tokens == 896
    # Where every P drains, D computes the prompt, as it does when no P is there.
    w.cluster.operators.drain(w.now, "a-p0")
    assert w.begin("a", 1200).call.prefill is None


def test_a_colocated_model_whose_instances_all_drain_refuses_calls() -> None:
    w = world(colocated=("a",))
    w.cluster.operators.drain(w.now, "a-c0")
    with refused(pb.REJECTION_REASON_ALL_DRAINING):
        w.begin("a")
    w.cluster.miss(w.now, "a-c0", refused=True)
    with refused(pb.REJECTION_REASON_NO_READY_INSTANCE):
        w.begin("a")


def _leg_on(w: World, kind: pb.LegKind.ValueType) -> StartLeg:
    """The first leg of that kind of the session's shadow on b."""
    w.begin("a", 4096)
    w.render("b", 4096)
    (leg,) = w.pump()
    while leg.kind != kind:
        (leg,) = w.finish(leg)
    return leg


@pytest.mark.parametrize(
    ("kind", "side"),
    [(pb.LEG_KIND_PREFILL, "p"), (pb.LEG_KIND_EXPORT, "p"), (pb.LEG_KIND_EXPORT, "d"), (pb.LEG_KIND_FETCH, "d")],
)
def test_shadow_legs_on_a_drained_instance_are_cancelled_and_start_again_elsewhere(
    kind: pb.LegKind.ValueType, side: str
) -> None:
    w = world(replicas=2)
    leg = _leg_on(w, kind)
    job = w.cluster.jobs.get(SESSION, "b")
    assert job is not None
    assert job.decode is not None
    drained = job.prefill if side == "p" else job.decode
    w.cluster.operators.drain(w.now, drained.name)
    assert w.pump() == []
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_INSTANCE_DRAINING}
    assert job_reason(w) == "instance_draining"
    assert w.cluster.jobs.legs_in_flight == 0
    assert job.decode.gate.shadow_chunks == 0
    # The dispatcher's late word changes nothing.
    w.finish(leg)
    w.begin("a", 4200)
    w.render("b", 4200, 4200)
    (again,) = w.pump()
    assert drained not in (again.instance, job.prefill, job.decode)
    assert (drained.shadow_legs, drained.fetch_leg) == ({}, None)


def test_shadow_tokens_on_a_drained_instance_are_wasted_when_the_session_leaves() -> None:
    w = world(replicas=2)
    w.finish(_leg_on(w, pb.LEG_KIND_PREFILL))
    prefill = bound(w, "b")[0]
    w.cluster.operators.drain(w.now, prefill)
    ledger = w.cluster.shadow_ledger
    assert (ledger.resident, ledger.wasted) == (4096, 0)
    # A router is told the truth at once: a switch would go elsewhere, and find nothing.
    assert {m.model: m.prefill_tokens for m in w.cluster.warmth(SESSION)[1]}["b"] == 0
    w.begin("a", 4200)
    assert (ledger.resident, ledger.by_waste_reason) == (0, {pb.SHADOW_REASON_INSTANCE_DRAINING: 4096})


def test_unknown_names_are_refused_with_the_nearest_known_one() -> None:
    w = world()
    for act in (w.cluster.operators.drain, w.cluster.operators.undrain):
        with refused(pb.REJECTION_REASON_UNKNOWN_INSTANCE, "did you mean 'a-p0'"):
            act(w.now, "a-p")
    with refused(pb.REJECTION_REASON_UNKNOWN_MODEL, "no model 'ab'; did you mean"):
        w.cluster.operators.pause_model(w.now, "ab", paused=True)
    with refused(pb.REJECTION_REASON_UNKNOWN_INSTANCE, "did you mean 'b-d0'"):
        w.cluster.operators.pause_instance(w.now, "b-d00", paused=True)
    with refused(pb.REJECTION_REASON_UNKNOWN_SESSION):
        w.cluster.operators.forget(w.now, SessionKey("", "nobody"))


# Pause.


@pytest.mark.parametrize("scope", ["cluster", "model", "instance"])
def test_a_pause_takes_prefill_legs_back_and_lasts_until_that_scope_is_resumed(scope: str) -> None:
    w = world()

    def pause(paused: bool) -> None:
        match scope:
            case "cluster":
                w.cluster.operators.pause_cluster(w.now, paused=paused)
            case "model":
                w.cluster.operators.pause_model(w.now, "b", paused=paused)
            case _:
                w.cluster.operators.pause_instance(w.now, "b-p0", paused=paused)

    leg = _leg_on(w, pb.LEG_KIND_PREFILL)
    pause(True)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_PAUSED}
    assert w.finish(leg, pb.LEG_OUTCOME_CANCELLED) == []
    assert job_reason(w) == "paused"
    # No rendering is asked for in vain; other models go on.
    assert w.begin("a", 4200).shadow_targets == []
    assert [t.model for t in w.begin("b", session=SessionKey("", "x")).shadow_targets] == (
        [] if scope == "cluster" else ["a"]
    )
    w.healthy("b-p0", "2")
    assert w.instance("b-p0").paused
    pause(False)
    assert [t.model for t in w.begin("a", 4200).shadow_targets] == ["b"]
    subject = {"cluster": "cluster", "model": "b", "instance": "b-p0"}[scope]
    pause(False)
    assert events(w, admin.EVENT_KIND_SHADOW_PAUSE) == [(subject, "paused"), (subject, "resumed")]


def test_pausing_d_shuts_its_link_and_leaves_p_to_its_work() -> None:
    w = world()
    w.cluster.operators.pause_instance(w.now, "b-d0", paused=True)
    leg = _leg_on(w, pb.LEG_KIND_PREFILL)
    assert w.finish(leg) == []
    assert job_reason(w) == "paused"
    assert w.instance("b-d0").gate.state.value == "paused"
    w.cluster.operators.pause_instance(w.now, "b-d0", paused=False)
    (push,) = w.pump()
    assert push.kind == pb.LEG_KIND_EXPORT


def test_an_export_that_a_pause_meets_is_still_fetched() -> None:
    w = world()
    export = _leg_on(w, pb.LEG_KIND_EXPORT)
    w.cluster.operators.pause_cluster(w.now, paused=True)
    (fetch,) = w.finish(export)
    assert fetch.kind == pb.LEG_KIND_FETCH
    assert w.finish(fetch) == []
    assert w.instance("b-d0").gate.shadow_chunks == 0


def test_scopes_overlap_and_engines_are_told_only_of_changes() -> None:
    w = world(plugin=True)
    w.pump()
    w.told.clear()
    w.cluster.operators.pause_instance(w.now, "b-p0", paused=True)
    w.cluster.operators.pause_model(w.now, "b", paused=True)
    w.cluster.operators.pause_instance(w.now, "b-p0", paused=False)
    w.pump()
    assert [(told.instance.name, told.paused) for told in w.told if isinstance(told, PauseEngine)] == [
        ("b-p0", True),
        ("b-d0", True),
    ]


# Rebind.


def test_a_rebound_session_goes_where_the_operator_said_even_if_cold() -> None:
    w = world(replicas=2)
    w.call("a", 8000)
    prefill, decode = bound(w)
    w.cluster.operators.rebind(w.now, SESSION, "a", prefill=other(prefill), decode=other(decode))
    begun = w.begin("a", 8200)
    assert begun.call.prefill is not None
    for placed, left in ((begun.call.prefill, prefill), (begun.call.decode, decode)):
        assert (placed.instance.name, placed.reason) == (other(left), pb.PLACEMENT_REASON_REBOUND)
    assert begun.call.expected_warm_tokens == 0
    w.transfer(begun)
    w.decode(begun)
    w.end(begun, 8200)
    assert w.begin("a", 8300).call.decode.reason == pb.PLACEMENT_REASON_STICKY


def test_a_call_in_flight_does_not_undo_a_rebind_but_a_lost_instance_does() -> None:
    w = world(replicas=2)
    running = w.begin("a", 1000)
    w.transfer(running)
    prefill = bound(w)[0]
    w.cluster.operators.rebind(w.now, SESSION, "a", prefill=other(prefill), decode=None)
    w.decode(running)
    w.end(running, 1000)
    assert bound(w)[0] == other(prefill)
    w.cluster.miss(w.now, other(prefill), refused=True)
    w.call("a", 1200)
    assert bound(w)[0] == prefill


def test_an_unbound_side_is_placed_afresh() -> None:
    w = world()
    w.call("a", 1000)
    w.cluster.operators.rebind(w.now, SESSION, "a", prefill="", decode=None)
    assert bound(w) == ("", "a-d0")
    begun = w.begin("a", 1200)
    assert begun.call.prefill == (w.instance("a-p0"), pb.PLACEMENT_REASON_REBOUND)


def test_a_rebind_ends_the_shadow_leg_in_flight_and_its_job_follows() -> None:
    w = world(replicas=2)
    leg = _leg_on(w, pb.LEG_KIND_PREFILL)
    target = other(leg.instance.name)
    w.cluster.operators.rebind(w.now, SESSION, "b", prefill=target, decode=None)
    (again,) = w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_REBOUND}
    assert (again.instance.name, again.upto_tokens) == (target, 4096)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason", "message"),
    [
        ("a-p9", None, pb.REJECTION_REASON_UNKNOWN_INSTANCE, "did you mean 'a-p"),
        (None, "a-p0", pb.REJECTION_REASON_INVALID_FIELD, "decode: a-p0 is a prefill instance of 'a'"),
        ("b-p0", None, pb.REJECTION_REASON_INVALID_FIELD, "prefill: b-p0 is a prefill instance of 'b'"),
        ("a-p1", None, pb.REJECTION_REASON_INSTANCE_NOT_READY, "prefill: a-p1 is draining"),
    ],
)
def test_a_rebind_that_cannot_be_changes_nothing(
    prefill: str | None, decode: str | None, reason: pb.RejectionReason.ValueType, message: str
) -> None:
    w = world(replicas=2)
    w.call("a", 1000)
    w.cluster.operators.drain(w.now, "a-p1")
    before = bound(w)
    with refused(reason, message):
        w.cluster.operators.rebind(w.now, SESSION, "a", prefill=prefill, decode=decode)
    assert bound(w) == before


# Forget.


def test_a_forgotten_session_is_gone_while_its_call_goes_on() -> None:
    w = world()
    leg = _leg_on(w, pb.LEG_KIND_PREFILL)
    (call,) = w.cluster.calls.values()
    w.cluster.operators.forget(w.now, SESSION)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_FORGOTTEN}
    assert w.dropped == [SESSION]
    assert list(w.cluster.jobs) == []
    # A new session of the same name counts its own calls only.
    again = w.begin("a", 1000)
    w.cluster.progress(w.now, call.call_id, placement_pb2.CALL_PHASE_TRANSFER)
    w.cluster.tick(w.now)
    assert w.cluster.sessions.known(SESSION).calls_in_flight == 1
    w.end(again, 1000)
    assert call.call_id in w.cluster.calls
    assert call.gateway_id == GATEWAY
