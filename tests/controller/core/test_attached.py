"""Engines with the plugin: their lives, their legs, and what they say about sessions."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.effects import DropResident, LimitEngine, Limits, PauseEngine, StartLeg
from controller.core.instance import LoadReport
from controller.core.registry import GONE_KEPT, Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.policy.approach import STALE_SECONDS
from tests.controller.core.test_shadow import EXPORT, FETCH, PREFILL, in_flight, job_reason
from tests.controller.support import BLOCK, SESSION, World, facts, world

OTHER = SessionKey("", "other")
# Nobody goes suspect while time passes.
PATIENT = {"suspect_after_misses": 1_000_000, "gone_after_seconds": 1e6}


def held(w: World, model: str = "b", session: SessionKey = SESSION) -> tuple[int, int]:
    """Tokens on P and D."""
    known = w.cluster.sessions.get(session)
    assert known is not None
    binding = known.bindings[model]
    return binding.prefill_tokens, binding.decode_tokens


def wanted(w: World, tokens: int, session: SessionKey = SESSION) -> None:
    """The session is on a, and b should be warm up to `tokens`."""
    w.begin("a", tokens, session=session)
    w.render("b", tokens, session=session)


# Lives.


def test_an_attached_engine_takes_calls_and_leaves_iterations_to_its_plugin() -> None:
    w = world(plugin=True)
    assert w.cluster.registry.models() == ["a", "b"]
    assert not w.instance("a-p0").request_level
    assert w.begin("a").call.decode.instance.name == "a-d0"


def test_while_an_engine_is_attached_discovery_only_adds_what_its_metrics_page_alone_tells() -> None:
    w = world()
    w.attach("b-p0")
    w.beat("b-p0", running=0, waiting=0)
    before = w.instance("b-p0")
    # /metrics counts the shadow leg that the plugin does not count as a normal request.
    w.cluster.observe(w.now, "b-p0", facts(), LoadReport(running=1, failed_transfers=2, expired_exports=3))
    for _ in range(5):
        w.cluster.miss(w.now, "b-p0", refused=True)
    assert w.instance("b-p0") is before
    assert before.ready
    assert not before.request_level
    assert (before.foreign_requests, before.load.running) == (0, 0)
    w.beat("b-p0", running=1)
    assert (before.foreign_requests, before.load.failed_transfers, before.load.expired_exports) == (1, 2, 3)
    assert [i.name for i in w.cluster.registry].count("b-p0") == 1


def test_a_discovered_engine_that_attaches_is_the_same_life_and_keeps_what_is_placed_on_it() -> None:
    w = world()
    wanted(w, 9000)
    (leg,) = w.pump()
    before = w.instance("b-p0")
    w.attach("b-p0", hardware="gpu-0")
    assert w.instance("b-p0") is before
    assert (before.request_level, before.hardware) == (False, "gpu-0")
    assert before.shadow_legs == {leg.leg_id: PREFILL}
    assert leg.leg_id not in w.cancelled


def test_an_attached_engine_says_itself_which_life_it_is_until_its_stream_ends() -> None:
    w = world()
    w.attach("b-p0", "2")
    w.healthy("b-p0", "3")
    assert w.instance("b-p0").ref.incarnation == "2"
    w.cluster.detach(w.now, w.instance("b-p0").ref, w.streams["b-p0"])
    w.healthy("b-p0", "3")
    assert w.instance("b-p0").ref.incarnation == "3"
    assert w.instance("b-p0").request_level


@pytest.mark.parametrize(
    ("change", "field"), [({"model": "c"}, "hello.model"), ({"role": pb.ROLE_DECODE}, "hello.role")]
)
@pytest.mark.parametrize("plugin", [False, True])
def test_a_name_that_is_known_otherwise_is_refused(change: dict[str, Any], field: str, plugin: bool) -> None:
    w = world(plugin=plugin)
    named = Declared(**{"name": "b-p0", "model": "b", "role": pb.ROLE_PREFILL, "url": "http://b-p0", **change})
    with pytest.raises(RejectedError, match="known here with another") as caught:
        w.cluster.attach(w.now, named, facts())
    assert (caught.value.reason, caught.value.field) == (pb.REJECTION_REASON_INVALID_FIELD, field)


def test_a_replaced_life_cannot_attach_again_nor_report_on() -> None:
    w = world(plugin=True)
    old, stream = w.instance("b-p0").ref, w.streams["b-p0"]
    w.attach("b-p0", "2")
    for say in (
        lambda: w.attach("b-p0", "1"),
        lambda: w.cluster.heartbeat(w.now, old, stream, LoadReport()),
    ):
        with pytest.raises(RejectedError, match="registered as 2, newer than 1") as caught:
            say()
        assert caught.value.reason == pb.REJECTION_REASON_STALE_INCARNATION
    assert w.instance("b-p0").ready


def test_only_the_latest_stream_of_a_life_counts() -> None:
    w = world(plugin=True)
    ref, older = w.instance("b-p0").ref, w.streams["b-p0"]
    w.attach("b-p0")
    w.cluster.detach(w.now, ref, older)
    assert w.instance("b-p0").ready
    with pytest.raises(RejectedError, match="attach again"):
        w.cluster.heartbeat(w.now, ref, older, LoadReport())
    w.cluster.detach(w.now, ref, w.streams["b-p0"])
    assert w.instance("b-p0").state == pb.INSTANCE_STATE_SUSPECT


def test_an_engine_that_cannot_exchange_kv_with_its_partners_is_refused_and_told_of() -> None:
    w = world(plugin=True)
    with pytest.raises(RejectedError, match="cannot pair") as caught:
        w.attach("b-p1", block_size=64)
    assert caught.value.reason == pb.REJECTION_REASON_BLOCK_SIZE_MISMATCH
    assert w.cluster.registry.named("b-p1") is None
    assert w.cluster.events()[-1].reason == "block_size_mismatch"


@pytest.mark.parametrize("broken", [False, True])
def test_silence_makes_an_engine_suspect_and_then_gone_with_all_it_held(broken: bool) -> None:
    w = world(plugin=True)
    w.call("b", 1000)
    for name in ("a-p0", "a-d0", "b-d0"):
        w.beat(name)
    instance, ref = w.instance("b-p0"), w.instance("b-p0").ref
    if broken:
        w.cluster.detach(w.now, ref, w.streams["b-p0"])
        assert instance.state == pb.INSTANCE_STATE_SUSPECT
    for w.now, state in ((1.4, None), (1.5, pb.INSTANCE_STATE_SUSPECT), (9.9, pb.INSTANCE_STATE_SUSPECT)):
        w.cluster.tick(w.now)
        assert state is None or instance.state == state
    assert held(w)[0] > 0
    w.now = 10.0
    w.cluster.tick(w.now)
    assert instance.state == pb.INSTANCE_STATE_GONE
    assert held(w)[0] == 0
    with pytest.raises(RejectedError, match="attach again"):
        w.cluster.heartbeat(w.now, ref, w.streams["b-p0"], LoadReport())
    w.attach("b-p0")
    assert w.instance("b-p0").ready


def test_a_heartbeat_brings_a_suspect_back() -> None:
    w = world(plugin=True)
    w.now = 5.0
    w.cluster.tick(w.now)
    assert not w.instance("b-p0").ready
    w.beat("b-p0")
    assert w.instance("b-p0").ready


def test_names_that_come_and_go_are_not_remembered_without_bound() -> None:
    w = world(plugin=True)
    for index in range(3 * GONE_KEPT):
        w.attach(f"b-p{index + 1}")
        w.now += 20.0
        w.cluster.tick(w.now)
    assert len(list(w.cluster.registry)) <= GONE_KEPT + 2


# Legs.


def test_legs_start_beside_normal_work_and_stay_when_more_arrives() -> None:
    w = world(plugin=True)
    w.begin("b", 2000, session=None)
    w.beat("b-p0", running=5, waiting=3)
    wanted(w, 5000)
    (leg,) = w.pump()
    assert (leg.kind, leg.instance.name) == (PREFILL, "b-p0")
    w.begin("b", 2000, session=None)
    w.pump()
    assert w.cancelled == {}


def test_a_prefill_instance_has_two_prefill_legs_and_exports_beside_them() -> None:
    w = world(plugin=True)
    keys = [SessionKey("", f"s{index}") for index in range(4)]
    for w.now, key in enumerate(keys[:3]):
        wanted(w, 4096, session=key)
    legs = w.pump()
    assert [leg.session for leg in legs] == keys[:2]
    assert job_reason(w, session=keys[2]) == "prefill_taken"
    w.now = 3
    wanted(w, 4096, session=keys[3])
    assert {(leg.kind, leg.session) for leg in w.finish(legs[0])} == {(EXPORT, keys[0]), (PREFILL, keys[2])}
    assert len(w.instance("b-p0").shadow_legs) == 3


def test_on_shared_hardware_the_plugin_sees_its_neighbours_by_itself() -> None:
    w = world(plugin=True, hardware="gpu-0")
    w.begin("a", 9000)
    w.render("b", 9000)
    (leg,) = w.pump()
    w.begin("b", 500, session=None)
    w.pump()
    assert leg.leg_id not in w.cancelled


def test_a_push_is_as_large_as_the_room_that_d_reports_in_whole_blocks() -> None:
    w = world(plugin=True)
    w.beat("b-d0", shadow_room_tokens=3 * BLOCK + 100)
    wanted(w, 4096)
    (prefill,) = w.pump()
    (export,) = w.finish(prefill)
    assert (export.kind, export.upto_tokens) == (EXPORT, 3 * BLOCK)
    (fetch,) = w.finish(export)
    assert (fetch.kind, fetch.upto_tokens) == (FETCH, 3 * BLOCK)
    # What was sent is not room any more, whether D has reported since or not.
    assert w.finish(fetch) == []
    assert job_reason(w) == "no_room"
    w.beat("b-d0", shadow_room_tokens=BLOCK - 1)
    w.cluster.tick(w.now)
    assert w.pump() == []
    assert job_reason(w) == "no_room"
    w.beat("b-d0", shadow_room_tokens=100_000)
    w.cluster.tick(w.now)
    (export,) = w.pump()
    assert export.upto_tokens == 4096
    assert in_flight(w) == (1, 1)


def test_no_prefill_leg_waits_on_an_engine_without_room() -> None:
    w = world(plugin=True)
    w.beat("b-p0", shadow_room_tokens=BLOCK - 1)
    wanted(w, 4096)
    assert w.pump() == []
    assert job_reason(w) == "no_room"
    w.beat("b-p0", shadow_room_tokens=BLOCK)
    w.cluster.tick(w.now)
    (leg,) = w.pump()
    assert (leg.kind, leg.upto_tokens) == (PREFILL, 4096)


def test_an_engine_may_cover_less_than_it_was_asked_and_the_next_leg_goes_on_from_there() -> None:
    w = world(plugin=True)
    wanted(w, 4096)
    (leg,) = w.pump()
    (leg,) = w.finish(leg, cached=256, covered=1100)
    assert (leg.kind, leg.upto_tokens) == (PREFILL, 4096)
    assert held(w) == (1024, 0)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.resident) == (768, 768)
    (export,) = w.finish(leg, cached=1024, covered=4096)
    (fetch,) = w.finish(export)
    (export,) = w.finish(fetch, covered=1024)
    assert held(w) == (4096, 1024)
    assert (ledger.prefilled, ledger.pushed) == (768 + 3072, 1024)
    assert (export.kind, export.upto_tokens) == (EXPORT, 4096)


@pytest.mark.parametrize("kind", [PREFILL, FETCH])
def test_a_leg_that_covers_nothing_new_waits_longer_every_time_until_one_does(kind: pb.LegKind.ValueType) -> None:
    w = world(plugin=True, shadow={"backoff_seconds": 1.0}, discovery=PATIENT)
    wanted(w, 4096)

    def next_of_kind(started: list[StartLeg]) -> StartLeg:
        (leg,) = started
        while leg.kind != kind:
            (leg,) = w.finish(leg)
        return leg

    for wait in (1.0, 2.0, 4.0):
        assert w.finish(next_of_kind(w.pump()), covered=0) == []
        assert in_flight(w) == (0, 0)
        assert job_reason(w) == "no_progress"
        w.now += wait - 0.01
        w.cluster.tick(w.now)
        assert w.pump() == []
        w.now += 0.02
        w.cluster.tick(w.now)
    following = w.finish(next_of_kind(w.pump()), covered=1024)
    assert w.finish(next_of_kind(following), covered=1024) == []
    assert job_reason(w) == "no_progress"
    w.now += 1.01
    w.cluster.tick(w.now)
    assert len(w.pump()) == 1


def test_an_engine_that_covers_less_than_was_thought_has_lost_the_rest() -> None:
    w = world(plugin=True)
    wanted(w, 8192)
    (leg,) = w.pump()
    (leg,) = w.finish(leg)
    assert w.finish(leg, cached=0, covered=1024) == []
    assert held(w) == (1024, 0)
    ledger = w.cluster.shadow_ledger
    assert ledger.by_waste_reason[pb.SHADOW_REASON_EVICTED] == 4096 - 1024
    assert ledger.resident == 1024


def test_an_export_of_what_p_no_longer_holds_is_not_fetched() -> None:
    w = world(plugin=True)
    wanted(w, 4096)
    (leg,) = w.pump()
    (export,) = w.finish(leg)
    assert w.finish(export, covered=100) == []
    assert in_flight(w) == (0, 0)
    assert job_reason(w) == "no_progress"
    assert held(w) == (0, 0)


def test_what_a_leg_had_computed_when_the_switch_call_took_over_is_shadow_work_that_paid() -> None:
    w = world(plugin=True)
    w.call("a", 8192)
    w.render("b", 8192)
    (leg,) = w.pump()
    ref = w.instance("b-p0").ref
    for tokens in (1024, 3000, 2048):
        w.cluster.progressed(w.now, ref, SESSION, tokens)
    switch = w.begin("b", 8300)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_MODEL_IN_USE}
    w.finish(leg, pb.LEG_OUTCOME_CANCELLED)
    w.transfer(switch)
    w.decode(switch)
    w.end(switch, 8300, cached=2944)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.hit, ledger.wasted, ledger.resident) == (2944, 2944, 0, 0)


def test_progress_of_a_leg_that_goes_on_is_booked_once() -> None:
    w = world(plugin=True)
    wanted(w, 8192)
    (leg,) = w.pump()
    w.cluster.progressed(w.now, w.instance("b-p0").ref, SESSION, 2048)
    # The history is rewritten under the leg, which ends well all the same.
    w.render("b", 8192, kept=1024)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.wasted, ledger.resident) == (2048, 1024, 1024)
    (again,) = w.finish(leg, covered=4096)
    assert (ledger.prefilled, ledger.wasted, ledger.resident) == (2048, 1024, 1024)
    assert (again.kind, again.upto_tokens, held(w)) == (PREFILL, 4096, (1024, 0))


def test_a_fetch_that_ends_badly_leaves_what_d_said_it_got() -> None:
    w = world(plugin=True)
    wanted(w, 4096)
    (leg,) = w.pump()
    while leg.kind != FETCH:
        (leg,) = w.finish(leg)
    w.cluster.progressed(w.now, w.instance("b-d0").ref, SESSION, 2048)
    w.finish(leg, pb.LEG_OUTCOME_TIMED_OUT)
    assert held(w) == (4096, 2048)
    assert w.cluster.shadow_ledger.pushed == 2048


# What engines say about sessions.


def test_an_eviction_is_wasted_shadow_and_waits_for_the_sessions_next_word() -> None:
    w = world(plugin=True)
    wanted(w, 4096)
    w.run_legs()
    w.cluster.shrunk(w.now, w.instance("b-p0").ref, SESSION, 1100)
    ledger = w.cluster.shadow_ledger
    assert (ledger.wasted, ledger.resident) == (3072, 1024)
    assert ledger.by_waste_reason[pb.SHADOW_REASON_EVICTED] == 3072
    assert held(w) == (1024, 4096)
    assert job_reason(w) == "evicted"
    w.cluster.tick(w.now)
    assert w.pump() == []
    w.render("b", 4096, kept=4096)
    assert [leg.upto_tokens for leg in w.run_legs()] == [4096]
    assert job_reason(w) == "warm"


def test_an_eviction_on_d_costs_another_push_and_wastes_no_computed_token() -> None:
    w = world(plugin=True)
    wanted(w, 4096)
    w.run_legs()
    w.cluster.shrunk(w.now, w.instance("b-d0").ref, SESSION, 0)
    assert held(w) == (4096, 0)
    assert w.cluster.shadow_ledger.wasted == 0
    w.render("b", 4096, kept=4096)
    assert [leg.kind for leg in w.run_legs()] == [EXPORT, FETCH]


def test_a_cleared_cache_takes_every_sessions_context_and_that_of_no_other_instance() -> None:
    w = world(plugin=True)
    for key in (SESSION, OTHER):
        wanted(w, 4096, session=key)
    w.run_legs()
    w.cluster.shrunk(w.now, w.instance("b-p0").ref, None, 0)
    assert [held(w, session=key) for key in (SESSION, OTHER)] == [(0, 4096)] * 2
    ledger = w.cluster.shadow_ledger
    assert (ledger.wasted, ledger.resident) == (8192, 0)


def test_what_an_engine_still_holds_is_known_again_at_once() -> None:
    w = world()
    w.attach("b-p0", resident=[(SESSION, 4200), (OTHER, 300)])
    w.attach("b-d0", resident=[(SESSION, 2048), (OTHER, 5)])
    assert (held(w), held(w, session=OTHER)) == ((4096, 2048), (256, 0))
    assert next(m for m in w.cluster.warmth(SESSION)[1] if m.model == "b").prefill_tokens == 4096
    call = w.begin("b", 5000).call
    assert call.expected_warm_tokens == 4096
    assert call.decode.reason == pb.PLACEMENT_REASON_STICKY


def test_what_was_there_before_is_no_shadow_work_of_this_ledger() -> None:
    w = world()
    w.attach("b-p0", resident=[(SESSION, 2048)])
    w.begin("a", 4096)
    w.render("b", 4096, kept=4096)
    (leg,) = w.pump()
    assert leg.upto_tokens == 4096
    w.finish(leg, cached=2048, covered=4096)
    w.call("b", 4200, cached=2048)
    ledger = w.cluster.shadow_ledger
    assert (ledger.prefilled, ledger.hit, ledger.wasted) == (2048, 0, 2048)


def test_what_a_leg_computed_before_its_engine_attached_is_shadow_work() -> None:
    w = world()
    wanted(w, 4096)
    (leg,) = w.pump()
    w.attach("b-p0", resident=[(SESSION, 384)])
    w.finish(leg, cached=0, covered=4096)
    ledger = w.cluster.shadow_ledger
    assert (held(w)[0], ledger.prefilled, ledger.wasted, ledger.resident) == (4096, 4096, 0, 4096)


def test_a_session_that_lives_elsewhere_stays_there() -> None:
    w = world(replicas=2, plugin=True)
    w.call("b", 4096)
    before = w.cluster.sessions.get(SESSION)
    assert before is not None
    bound = before.bindings["b"].prefill
    assert bound is not None
    other = "b-p1" if bound.name == "b-p0" else "b-p0"
    w.attach(other, resident=[(SESSION, 8192)])
    assert (before.bindings["b"].prefill, held(w)[0]) == (bound, 4096)


def test_no_session_makes_way_for_one_that_an_engine_remembers() -> None:
    w = world(limits={"max_sessions": 1})
    w.call("a", 1000)
    w.attach("b-p0", resident=[(OTHER, 4096)])
    assert w.cluster.sessions.get(OTHER) is None
    assert w.dropped == []


def test_engines_hear_of_sessions_that_are_forgotten() -> None:
    w = world(plugin=True, limits={"session_idle_seconds": 60}, discovery=PATIENT)
    w.call("b", 4096)
    w.pump()
    w.told.clear()
    w.now = 60.0
    w.cluster.tick(w.now)
    w.pump()
    assert {(told.instance.name, told.session) for told in w.told if isinstance(told, DropResident)} == {
        ("b-p0", SESSION),
        ("b-d0", SESSION),
    }


def test_settings_reach_the_engines_of_a_role_now_and_when_they_attach() -> None:
    w = world(plugin=True)
    w.pump()
    w.told.clear()
    w.cluster.limit_engines(w.now, pb.ROLE_PREFILL, Limits(controller="off", beta=0.25))
    w.cluster.limit_engines(w.now, pb.ROLE_PREFILL, Limits(controller="harvest"))
    w.cluster.operators.pause_cluster(w.now, paused=True)
    w.pump()
    a, b = (w.instance(name).ref for name in ("a-p0", "b-p0"))
    limits = [told for told in w.told if isinstance(told, LimitEngine)]
    assert [told.instance for told in limits] == [a, b, a, b]
    assert {told.instance.name for told in w.told if isinstance(told, PauseEngine)} == set(w.streams)
    w.told.clear()
    w.attach("b-p1")
    w.attach("b-d1")
    w.pump()
    b1, d1 = (w.instance(name).ref for name in ("b-p1", "b-d1"))
    # What the policy in force says besides.
    both, on_d = Limits(controller="harvest", beta=0.25, stale_seconds=0.0), Limits(stale_seconds=0.0)
    assert w.told == [LimitEngine(b1, both), PauseEngine(b1, True), LimitEngine(d1, on_d), PauseEngine(d1, True)]


@pytest.mark.parametrize(
    ("change", "on_p", "on_colocated"),
    [
        ({"approach": "harvest"}, "prefill-window", "harvest"),
        ({"approach": "eager"}, "eager", "eager"),
        ({"approach": "no-shadow"}, "off", "off"),
        ({"enabled": False}, "off", "off"),
    ],
)
def test_engines_follow_the_approach_in_force(change: dict[str, Any], on_p: str, on_colocated: str) -> None:
    w = world(plugin=True, models=("a", "c"), colocated=("c",))
    w.pump()

    def controllers() -> dict[str, str | None]:
        told, w.told[:] = list(w.told), []
        given = {t.instance.name: t.limits.controller for t in told if isinstance(t, LimitEngine)}
        return {name: controller for name, controller in given.items() if controller is not None}

    assert controllers() == {"a-p0": "prefill-window", "c-c0": "harvest-slo"}
    w.cluster.operators.set_shadow_policy(w.now, w.cluster.shadow_policy.changed(**change))
    w.pump()
    assert controllers() == {"a-p0": on_p, "c-c0": on_colocated}
    w.attach("c-c1")
    w.pump()
    assert controllers() == {"c-c1": on_colocated}


def test_every_engine_follows_the_order_in_which_the_approach_gives_up_memory() -> None:
    w = world(plugin=True)
    w.pump()
    w.told.clear()
    w.cluster.operators.set_shadow_policy(w.now, w.cluster.shadow_policy.changed(approach="warm-first"))
    w.pump()
    given = {t.instance.name: t.limits.stale_seconds for t in w.told if isinstance(t, LimitEngine)}
    assert given == dict.fromkeys(w.streams, STALE_SECONDS)


def test_paused_engines_get_no_legs_until_they_go_on() -> None:
    w = world(plugin=True)
    w.cluster.operators.pause_cluster(w.now, paused=True)
    wanted(w, 4096)
    assert w.pump() == []
    assert job_reason(w) == "paused"
    w.cluster.operators.pause_cluster(w.now, paused=False)
    assert len(w.pump()) == 1


def test_a_stock_engine_is_told_nothing() -> None:
    w = world()
    w.cluster.operators.pause_cluster(w.now, paused=True)
    w.cluster.limit_engines(w.now, pb.ROLE_PREFILL, Limits(controller="off"))
    w.pump()
    assert w.told == []


def test_the_late_hello_of_a_process_that_is_no_more_does_not_lock_the_running_one_out() -> None:
    """Neither life says which of the two is older; the one that is never heard of again replaced nobody."""
    w = world(plugin=True)
    w.attach("a-p0", "running")
    w.beat("a-p0")
    w.attach("a-p0", "late")
    with pytest.raises(RejectedError) as caught:
        w.attach("a-p0", "running")
    assert caught.value.reason == pb.REJECTION_REASON_STALE_INCARNATION
    w.now += w.cluster.config.discovery.gone_after_seconds
    w.cluster.tick(w.now)
    w.attach("a-p0", "running")
    assert w.instance("a-p0").ready
    with pytest.raises(RejectedError):
        w.attach("a-p0", "late")


def test_a_life_that_was_heard_of_keeps_the_one_before_it_out_even_once_it_is_gone() -> None:
    w = world(plugin=True)
    w.attach("a-p0", "2")
    w.beat("a-p0")
    w.now += w.cluster.config.discovery.gone_after_seconds
    w.cluster.tick(w.now)
    with pytest.raises(RejectedError):
        w.attach("a-p0", "1")
