"""Placement and accounting of calls, through the cluster's public methods."""

import pytest

from controller.core.instance import LoadReport
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.support import SESSION, World, digests, facts, world


def reserved(w: World) -> tuple[int, int, int, int]:
    instances = list(w.cluster.registry)
    return (
        len(w.cluster.calls),
        sum(i.pending_prefill_tokens for i in instances),
        sum(len(i.decode_calls) for i in instances),
        sum(i.gate.normal_transfers for i in instances),
    )


def test_a_session_keeps_its_instances_per_model_and_side() -> None:
    w = world(replicas=3)
    first = w.call("a", 2000)
    elsewhere = w.call("b", 2000)
    again = w.begin("a", 3000)
    assert again.call.prefill is not None
    assert first.call.prefill is not None
    assert again.call.prefill.instance is first.call.prefill.instance
    assert again.call.decode.instance is first.call.decode.instance
    assert again.call.prefill.reason == again.call.decode.reason == pb.PLACEMENT_REASON_STICKY
    assert first.call.prefill.reason == pb.PLACEMENT_REASON_FIRST_CALL
    assert elsewhere.call.is_switch
    assert again.call.is_switch
    assert not first.call.is_switch


def test_sessions_spread_over_idle_instances() -> None:
    w = world(replicas=2)
    for number in range(10):
        w.call("a", 1000, session=SessionKey("", f"s{number}"))
    assert [w.instance(name).sessions for name in ("a-p0", "a-p1", "a-d0", "a-d1")] == [5, 5, 5, 5]


def test_tenants_with_the_same_session_id_share_nothing() -> None:
    w = world()
    w.call("a", 4000, session=SessionKey("t1", "s"))
    assert w.begin("a", 4000, session=SessionKey("t2", "s")).call.expected_warm_tokens == 0


def test_a_call_without_session_is_served_and_forgotten() -> None:
    w = world()
    begun = w.call("a", 1000, session=None)
    assert begun.call.decode.reason == pb.PLACEMENT_REASON_NO_SESSION
    assert begun.shadow_targets == []
    assert len(w.cluster.sessions) == 0


def test_load_is_counted_at_once_and_given_back_phase_by_phase() -> None:
    w = world()
    begun = w.begin("a", 1500)
    assert reserved(w) == (1, 1500, 1, 0)
    w.transfer(begun)
    assert reserved(w) == (1, 0, 1, 1)
    w.decode(begun)
    assert reserved(w) == (1, 0, 1, 0)
    w.end(begun, 1500)
    assert reserved(w) == (0, 0, 0, 0)


@pytest.mark.parametrize("phase", ["begun", "transfer", "decode"])
@pytest.mark.parametrize("outcome", [pb.CALL_OUTCOME_CLIENT_GONE, pb.CALL_OUTCOME_DECODE_FAILED])
def test_a_call_gives_everything_back_wherever_it_ends(phase: str, outcome: pb.CallOutcome.ValueType) -> None:
    w = world()
    begun = w.begin("a", 1500)
    if phase != "begun":
        w.transfer(begun)
    if phase == "decode":
        w.decode(begun)
    w.end(begun, 0, outcome=outcome, handoff=pb.HANDOFF_NONE)
    assert reserved(w) == (0, 0, 0, 0)


def test_phases_never_go_back_and_repeats_change_nothing() -> None:
    w = world()
    begun = w.begin("a", 1500)
    for step in (w.transfer, w.transfer, w.decode, w.transfer, w.decode):
        step(begun)
    assert reserved(w) == (1, 0, 1, 0)


def test_a_warm_session_is_expected_warm_in_whole_blocks() -> None:
    w = world()
    w.call("a", 4000, digests=digests("x", "y"))
    assert w.begin("a", 5000, digests=digests("x", "y", "z")).call.expected_warm_tokens == 3968


def test_a_rewritten_history_is_expected_warm_up_to_the_common_messages() -> None:
    w = world()
    w.call("a", 4096, digests=digests("x", "y", "z", "w"))
    begun = w.begin("a", 5000, digests=digests("x", "q"))
    assert begun.call.expected_warm_tokens == 1024
    assert w.begin("a", 5000, digests=digests("q")).call.expected_warm_tokens == 0


def test_a_busy_sticky_prefill_instance_is_left_when_a_cold_one_ends_first() -> None:
    w = world(replicas=2)
    first = w.call("a", 4000)
    assert first.call.prefill is not None
    sticky = first.call.prefill.instance
    for other in [w.begin("a", 20_000, session=None) for _ in range(2)]:
        if other.call.prefill is not None and other.call.prefill.instance is not sticky:
            w.transfer(other)
    assert sticky.pending_prefill_tokens == 20_000
    begun = w.begin("a", 5000)
    assert begun.call.prefill is not None
    assert begun.call.prefill.instance is not sticky
    assert begun.call.prefill.reason == pb.PLACEMENT_REASON_STICKY_BUSY
    assert begun.call.decode.reason == pb.PLACEMENT_REASON_STICKY


def test_nothing_is_bound_before_the_engine_took_the_call() -> None:
    w = world(replicas=2)
    begun = w.begin("a", 1000)
    w.end(begun, 0, outcome=pb.CALL_OUTCOME_DECODE_FAILED, handoff=pb.HANDOFF_NONE)
    session = w.cluster.sessions.get(SESSION)
    assert session is not None
    assert "a" not in session.bindings or session.bindings["a"].prefill is None


def test_a_restarted_instance_is_cold_and_the_reason_says_so() -> None:
    w = world()
    w.call("a", 4000)
    w.healthy("a-p0", incarnation="2")
    w.healthy("a-d0", incarnation="2")
    begun = w.begin("a", 5000)
    assert begun.call.prefill is not None
    assert begun.call.prefill.instance.ref == ("a-p0", "2")
    assert begun.call.prefill.reason == begun.call.decode.reason == pb.PLACEMENT_REASON_INSTANCE_RESTARTED
    assert begun.call.expected_warm_tokens == 0


def test_a_lost_instance_leaves_its_sessions_to_the_others_evenly() -> None:
    w = world(replicas=3)
    keys = [SessionKey("", f"s{n}") for n in range(30)]
    for key in keys:
        w.call("a", 1000, session=key)
    w.now = 100.0
    for name in ("a-d1", "a-d2"):
        w.healthy(name)
    w.cluster.miss(w.now, "a-d0", refused=True)
    for key in keys:
        begun = w.call("a", 1000, session=key)
        assert begun.call.decode.instance.name != "a-d0"
    assert abs(w.instance("a-d1").sessions - w.instance("a-d2").sessions) <= 1


def test_a_suspect_instance_gets_nothing_new_and_recovers_with_what_it_held() -> None:
    w = world(replicas=2)
    sticky = w.call("a", 4000).call.decode.instance
    w.cluster.miss(w.now, sticky.name, refused=True)
    assert w.begin("a", 1000).call.decode.reason == pb.PLACEMENT_REASON_INSTANCE_LOST
    w.healthy(sticky.name)
    assert w.begin("a", 1000).call.decode.instance is sticky


def test_without_a_prefill_instance_decode_computes() -> None:
    w = world()
    w.cluster.miss(w.now, "a-p0", refused=True)
    begun = w.begin("a", 1000)
    assert begun.call.prefill is None
    w.decode(begun)
    w.end(
        begun,
        1000,
        handoff=pb.HANDOFF_RECOMPUTED,
        recompute_reason=pb.RECOMPUTE_REASON_NO_PREFILL_INSTANCE,
    )
    assert w.cluster.call_ledger.recomputed == 1
    assert reserved(w) == (0, 0, 0, 0)


def test_refusals_name_the_reason_and_leave_nothing_behind() -> None:
    w = world(limits={"max_calls_in_flight": 1})
    with pytest.raises(RejectedError) as unknown:
        w.begin("nope")
    assert unknown.value.reason == pb.REJECTION_REASON_UNKNOWN_MODEL
    assert "known models: a, b" in unknown.value.message
    w.cluster.miss(w.now, "a-d0", refused=True)
    with pytest.raises(RejectedError) as unready:
        w.begin("a")
    assert unready.value.reason == pb.REJECTION_REASON_NO_READY_INSTANCE
    w.begin("b")
    with pytest.raises(RejectedError) as full:
        w.begin("b")
    assert full.value.reason == pb.REJECTION_REASON_TOO_MANY_CALLS
    assert reserved(w)[0] == 1


def test_a_call_ends_once() -> None:
    w = world()
    begun = w.call("a", 1000)
    with pytest.raises(RejectedError) as again:
        w.end(begun, 1000)
    assert again.value.reason == pb.REJECTION_REASON_UNKNOWN_CALL
    assert w.cluster.call_ledger.calls == 1


def test_the_session_map_is_capped_and_never_drops_a_session_in_flight() -> None:
    w = world(limits={"max_sessions": 2})
    busy = w.begin("a", session=SessionKey("", "busy"))
    w.call("a", 1000, session=SessionKey("", "old"))
    w.call("a", 1000, session=SessionKey("", "new"))
    w.pump()
    assert [s.key.session_id for s in w.cluster.sessions] == ["busy", "new"]
    assert w.dropped == [SessionKey("", "old")]
    w.end(busy, 1000)


def test_idle_sessions_expire_and_unbind() -> None:
    w = world(limits={"session_idle_seconds": 60})
    w.call("a", 1000)
    w.now = 61.0
    w.cluster.tick(w.now)
    assert len(w.cluster.sessions) == 0
    assert w.instance("a-p0").sessions == w.instance("a-d0").sessions == 0


def test_a_gateway_that_stays_away_loses_its_calls_and_one_that_returns_does_not() -> None:
    w = world(limits={"gateway_grace_seconds": 10})
    w.transfer(w.begin("a", 1000))
    w.cluster.dispatcher_left(w.now, "gw-1")
    w.now = 5.0
    w.cluster.dispatcher_connected(w.now, "gw-1")
    w.now = 20.0
    w.cluster.tick(w.now)
    assert len(w.cluster.calls) == 1
    w.cluster.dispatcher_left(w.now, "gw-1")
    w.now = 30.0
    w.cluster.tick(w.now)
    assert reserved(w) == (0, 0, 0, 0)
    assert w.cluster.call_ledger.outcomes["a", pb.CALL_OUTCOME_GATEWAY_LOST] == 1


def test_a_call_that_nobody_ends_is_given_up() -> None:
    w = world(limits={"max_call_seconds": 100})
    w.begin("a", 1000)
    w.now = 100.0
    w.cluster.tick(w.now)
    assert reserved(w) == (0, 0, 0, 0)


def test_prefill_speed_is_learnt_from_calls() -> None:
    w = world()
    before = w.instance("a-p0").prefill_tokens_per_second
    begun = w.begin("a", 4000)
    w.now = 1.0
    w.transfer(begun)
    w.end(begun, 4000)
    assert w.instance("a-p0").prefill_tokens_per_second == pytest.approx(before + 0.2 * (4000 - before))


def test_warmth_prices_every_model() -> None:
    w = world()
    w.call("a", 4096)
    w.render("b", 4096)
    w.run_legs()
    current, models = w.cluster.warmth(SESSION)
    by_name = {warmth.model: warmth for warmth in models}
    assert current == "a"
    assert by_name["b"].warm_fraction == 1.0
    assert by_name["b"].estimated_prefill_seconds == 0.0
    assert by_name["b"].prefill_tokens == by_name["b"].decode_tokens == 4096
    assert 0 < by_name["b"].switch_probability < 1


def test_warmth_of_an_unknown_session_is_refused() -> None:
    with pytest.raises(RejectedError) as unknown:
        world().cluster.warmth(SessionKey("", "nobody"))
    assert unknown.value.reason == pb.REJECTION_REASON_UNKNOWN_SESSION


def test_unfit_partners_are_refused_with_both_values() -> None:
    w = world()
    w.cluster.miss(w.now, "a-d0", refused=True)
    w.now = 100.0
    w.healthy("a-p0")
    w.cluster.miss(w.now, "a-d0", refused=True)
    changes = w.cluster.observe(w.now, "a-d0", facts("2", block_size=64), LoadReport())
    assert changes.refused is not None
    assert changes.refused[1] == pb.REJECTION_REASON_BLOCK_SIZE_MISMATCH
    assert not w.cluster.registry.ready("a", pb.ROLE_DECODE)
    message = w.cluster.events()[-1].message
    assert "block size 64" in message
    assert "block size 128" in message


def test_an_old_incarnation_never_comes_back() -> None:
    w = world()
    w.healthy("a-p0", incarnation="2")
    with pytest.raises(RejectedError) as stale:
        w.healthy("a-p0", incarnation="1")
    assert stale.value.reason == pb.REJECTION_REASON_STALE_INCARNATION
    assert w.instance("a-p0").ref == ("a-p0", "2")


def test_sessions_that_calls_kept_beyond_the_cap_go_once_the_calls_have_ended() -> None:
    w = world(limits={"max_sessions": 2})
    begun = [w.begin("a", session=SessionKey("", f"s{n}")) for n in range(4)]
    assert len(w.cluster.sessions) == 4
    for each in begun:
        w.end(each, 1000)
    w.cluster.tick(w.now)
    assert [session.key.session_id for session in w.cluster.sessions] == ["s2", "s3"]
