"""Links that fail: when a pair of P and D is avoided, for how long, and what lets it back in."""

from __future__ import annotations

import pytest

from controller.core.cluster import Begun
from controller.core.effects import StartLeg
from controller.core.instance import InstanceRef
from controller.core.links import LINKS_KEPT, Link, Links
from controller.core.session import SessionKey
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.support import World, world

QUARANTINED, PROBING, FAILING = pb.LINK_STATE_QUARANTINED, pb.LINK_STATE_PROBING, pb.LINK_STATE_FAILING


def pair(begun: Begun) -> tuple[str, str]:
    assert begun.call.prefill is not None
    return begun.call.prefill.instance.name, begun.call.decode.instance.name


def fail(w: World, begun: Begun, reason: pb.RecomputeReason.ValueType = pb.RECOMPUTE_REASON_TRANSFER_FAILED) -> None:
    w.end(begun, 1000, handoff=pb.HANDOFF_RECOMPUTED, recompute_reason=reason)


def failing_calls(w: World, number: int, model: str = "a") -> None:
    for _ in range(number):
        fail(w, w.begin(model))


def links(w: World) -> dict[tuple[str, str], Link]:
    return {(link.key.prefill.name, link.key.decode.name): link for link in w.cluster.links}


def link_events(w: World) -> list[tuple[str, str]]:
    return [(e.subject, e.reason) for e in w.cluster.events() if e.kind == admin.EVENT_KIND_LINK]


def test_a_pair_whose_transfers_keep_failing_is_avoided_and_the_session_moves_to_another_decode() -> None:
    w = world(replicas=2)
    failing_calls(w, 2)
    assert links(w)["a-p0", "a-d0"].state == FAILING
    third = w.begin("a")
    assert pair(third) == ("a-p0", "a-d0")
    fail(w, third)
    assert links(w)["a-p0", "a-d0"].state == QUARANTINED
    moved = w.begin("a")
    assert pair(moved) == ("a-p0", "a-d1")
    assert moved.call.decode.reason == pb.PLACEMENT_REASON_LINK_QUARANTINED
    assert moved.call.prefill is not None
    assert moved.call.prefill.reason == pb.PLACEMENT_REASON_STICKY
    assert link_events(w) == [("a-p0/a-d0", "quarantined")]
    assert w.cluster.call_ledger.quarantines == {"a": 1}


def test_a_prefill_without_any_usable_link_is_left_for_one_that_has_one() -> None:
    w = world(models=("a",), replicas=2, connected=False)
    for _ in range(6):
        begun = w.begin("a")
        assert pair(begun)[0] == "a-p0"
        fail(w, begun)
    assert {key for key, link in links(w).items() if link.quarantined} == {("a-p0", "a-d0"), ("a-p0", "a-d1")}
    moved = w.begin("a")
    assert pair(moved)[0] == "a-p1"
    assert moved.call.prefill is not None
    assert moved.call.prefill.reason == pb.PLACEMENT_REASON_LINK_QUARANTINED


def test_the_only_pair_serves_on() -> None:
    w = world()
    failing_calls(w, 3)
    begun = w.begin("a")
    assert pair(begun) == ("a-p0", "a-d0")
    assert links(w)["a-p0", "a-d0"].state == QUARANTINED
    assert begun.call.decode.reason == pb.PLACEMENT_REASON_STICKY


def test_one_probe_goes_after_the_quarantine_and_every_failed_one_doubles_it() -> None:
    w = world(models=("a",), links={"max_quarantine_seconds": 15})
    failing_calls(w, 3)
    for seconds in (5.0, 10.0, 15.0, 15.0):
        w.now += seconds - 0.01
        w.healthy("a-p0")
        w.healthy("a-d0")
        early = w.begin("a")
        assert links(w)["a-p0", "a-d0"].state == QUARANTINED
        w.now += 0.02
        probe, other = w.begin("a"), w.begin("a")
        assert links(w)["a-p0", "a-d0"].state == PROBING
        # What is not the probe says nothing new by failing.
        fail(w, early)
        fail(w, other)
        assert links(w)["a-p0", "a-d0"].state == PROBING
        fail(w, probe)
        assert links(w)["a-p0", "a-d0"].state == QUARANTINED
    assert links(w)["a-p0", "a-d0"].until == w.now + 15.0


def test_others_go_elsewhere_while_the_probe_is_on_its_way() -> None:
    w = world(models=("a",), replicas=2)
    failing_calls(w, 3)
    w.now += 5.0
    probe = w.begin("a")
    assert pair(probe) == ("a-p0", "a-d0")
    assert pair(w.begin("a", session=SessionKey("", "other"))) != ("a-p0", "a-d0")
    w.end(probe, 1000)
    assert links(w) == {}
    assert link_events(w)[-1] == ("a-p0/a-d0", "open")
    assert pair(w.begin("a")) == ("a-p0", "a-d0")


def test_a_probe_that_proves_nothing_leaves_its_turn_to_the_next() -> None:
    w = world(models=("a",))
    failing_calls(w, 3)
    w.now += 5.0
    probe = w.begin("a")
    w.end(probe, 0, outcome=pb.CALL_OUTCOME_CLIENT_GONE, handoff=pb.HANDOFF_NONE)
    assert links(w)["a-p0", "a-d0"].state == QUARANTINED
    w.end(w.begin("a"), 1000)
    assert links(w) == {}


@pytest.mark.parametrize(
    "reason",
    [
        pb.RECOMPUTE_REASON_PREFILL_FAILED,
        pb.RECOMPUTE_REASON_MISSING_PARAMS,
        pb.RECOMPUTE_REASON_NOT_TRANSFERABLE,
    ],
)
def test_what_the_link_cannot_have_caused_does_not_count(reason: pb.RecomputeReason.ValueType) -> None:
    w = world(models=("a",))
    for _ in range(5):
        fail(w, w.begin("a"), reason)
    assert links(w) == {}


def test_a_success_between_failures_begins_the_count_anew() -> None:
    w = world(models=("a",))
    failing_calls(w, 2)
    w.call("a", 1000)
    failing_calls(w, 2)
    assert links(w)["a-p0", "a-d0"].state == FAILING


@pytest.mark.parametrize("name", ["a-p0", "a-d0"])
def test_an_engine_that_is_away_is_no_failing_link_and_a_new_life_begins_with_a_clean_one(name: str) -> None:
    w = world(models=("a",))
    failing_calls(w, 2)
    begun = w.begin("a")
    w.cluster.miss(w.now, name, refused=True)
    fail(w, begun)
    assert links(w)["a-p0", "a-d0"].failures == 2
    w.healthy(name, "2")
    assert links(w) == {}


def shadow(w: World) -> StartLeg:
    """Run the shadow of "b" up to its fetch."""
    w.begin("a", 4096)
    w.render("b", 4096)
    (leg,) = w.pump()
    while leg.kind != pb.LEG_KIND_FETCH:
        (leg,) = w.finish(leg)
    return leg


def job_reason(w: World) -> pb.ShadowReason.ValueType:
    (job,) = w.cluster.jobs
    return job.reason


def test_pushes_over_a_quarantined_link_wait_and_one_chunk_is_the_probe() -> None:
    w = world(shadow={"backoff_seconds": 0.1}, links={"quarantine_after_failures": 1})
    w.finish(shadow(w), pb.LEG_OUTCOME_TIMED_OUT)
    assert links(w)["b-p0", "b-d0"].state == QUARANTINED
    w.now += 1.0
    w.cluster.tick(w.now)
    assert w.pump() == []
    assert job_reason(w) == pb.SHADOW_REASON_LINK_QUARANTINED
    w.now += 4.0
    w.cluster.tick(w.now)
    (export,) = w.pump()
    assert links(w)["b-p0", "b-d0"].state == PROBING
    (fetch,) = w.finish(export)
    w.finish(fetch, cached=4096)
    assert links(w) == {}
    assert job_reason(w) == pb.SHADOW_REASON_WARM


def test_a_cancelled_fetch_gives_the_probe_back() -> None:
    w = world(shadow={"backoff_seconds": 0.1}, links={"quarantine_after_failures": 1})
    w.finish(shadow(w), pb.LEG_OUTCOME_FAILED)
    w.now += 5.0
    w.cluster.tick(w.now)
    (export,) = w.pump()
    w.cluster.dispatcher_left(w.now, export.gateway_id)
    assert links(w)["b-p0", "b-d0"].state == QUARANTINED


def test_an_engine_says_itself_that_no_kv_arrived_or_that_it_had_no_room() -> None:
    w = world(plugin=True, links={"quarantine_after_failures": 1})
    leg = shadow(w)
    w.cluster.leg_finished(
        w.now, leg.gateway_id, leg.leg_id, pb.LEG_OUTCOME_DONE, covered_tokens=0, transfer_failed=True
    )
    assert links(w)["b-p0", "b-d0"].state == QUARANTINED
    w = world(plugin=True, links={"quarantine_after_failures": 1})
    w.finish(shadow(w), covered=0)
    assert links(w) == {}


def test_so_many_failing_links_are_remembered_and_no_more() -> None:
    w = world(models=("a",))
    known = Links(w.cluster.config.links, lambda *_: None)
    prefill, decode = w.instance("a-p0"), w.instance("a-d0")
    for number in range(LINKS_KEPT + 5):
        decode.ref = InstanceRef(f"d{number}", "1")
        known.failed(0.0, prefill, decode, None)
    assert len(known) == LINKS_KEPT
    assert known.get(prefill, decode) is not None
