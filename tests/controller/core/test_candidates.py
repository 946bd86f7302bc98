"""Sessions with several candidate models: order by switch probability, gate, top k, and models that take no calls."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.cluster import Cluster
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.support import SESSION, World, world

MODELS = ("a", "b", "c", "d", "e")


def teach(cluster: Cluster, counts: dict[str, int]) -> None:
    """So many past calls that followed one on model a."""
    for following, times in counts.items():
        for _ in range(times):
            cluster.prior.observe("", "a", following)


def lose(w: World, name: str) -> None:
    w.cluster.miss(w.now, name, refused=True)
    w.now += 100.0
    w.cluster.miss(w.now, name, refused=True)
    assert not w.instance(name).ready


def reasons(w: World) -> dict[str, pb.ShadowReason.ValueType]:
    jobs = {model: w.cluster.jobs.get(SESSION, model) for model in MODELS}
    return {model: job.reason for model, job in jobs.items() if job is not None}


@given(
    models=st.integers(3, 5),
    counts=st.dictionaries(st.sampled_from(MODELS), st.integers(0, 20)),
    top_k=st.none() | st.integers(1, 5),
)
def test_targets_and_warmth_are_in_order_of_switch_probability_and_cut_at_top_k(
    models: int, counts: dict[str, int], top_k: int | None
) -> None:
    w = world(models=MODELS[:models], shadow={"top_k": top_k, "gate_probability": 0.0})
    teach(w.cluster, {model: times for model, times in counts.items() if model in MODELS[:models]})
    begun = w.begin("a", 5000)
    current, warmth = w.cluster.warmth(SESSION)
    assert current == "a"
    assert {m.model for m in warmth} == set(MODELS[:models])
    assert sum(m.switch_probability for m in warmth) == pytest.approx(1.0)
    order = [m.switch_probability for m in warmth]
    assert order == sorted(order, reverse=True)
    others = [m.model for m in warmth if m.model != "a"]
    # What is said at the beginning, at the end, and to routers is one order.
    assert [t.model for t in begun.shadow_targets] == others[:top_k]
    assert [t.model for t in w.end(begun, 5000)] == others[:top_k]
    by_model = {m.model: m.switch_probability for m in warmth}
    assert all(t.probability == by_model[t.model] for t in begun.shadow_targets)
    cut = [] if top_k is None else others[top_k:]
    assert {m for m, reason in reasons(w).items() if reason == pb.SHADOW_REASON_NOT_TOP_K} == set(cut)


def test_the_likeliest_models_are_warmed_first_and_the_others_stay_cold() -> None:
    w = world(models=MODELS[:4], shadow={"top_k": 2})
    teach(w.cluster, {"c": 9, "d": 5, "b": 1})
    begun = w.begin("a", 4096)
    assert [t.model for t in begun.shadow_targets] == ["c", "d"]
    w.transfer(begun)
    w.decode(begun)
    targets = w.end(begun, 4096)
    for target in targets:
        w.render(target.model, 4096)
    w.run_legs()
    fractions = {m.model: m.warm_fraction for m in w.cluster.warmth(SESSION)[1]}
    assert fractions == {"a": 1.0, "c": 1.0, "d": 1.0, "b": 0.0}


def test_top_k_follows_what_sessions_do() -> None:
    w = world(models=MODELS[:3], shadow={"top_k": 1})
    teach(w.cluster, {"b": 3})
    assert [t.model for t in w.begin("a", 1000).shadow_targets] == ["b"]
    teach(w.cluster, {"c": 30})
    assert [t.model for t in w.begin("a", 1000).shadow_targets] == ["c"]
    assert reasons(w)["b"] == pb.SHADOW_REASON_NOT_TOP_K


def test_a_model_that_no_prefill_instance_can_take_uses_up_no_place_of_the_top_k() -> None:
    w = world(models=MODELS[:4], shadow={"top_k": 1})
    teach(w.cluster, {"b": 9, "c": 5})
    lose(w, "b-p0")
    assert [t.model for t in w.begin("a", 1000).shadow_targets] == ["c"]


def test_a_model_without_instances_is_no_free_switch() -> None:
    w = world(models=MODELS[:3])
    w.call("a", 4096)
    lose(w, "b-d0")
    seconds = {m.model: m.estimated_prefill_seconds for m in w.cluster.warmth(SESSION)[1]}
    assert seconds["b"] == math.inf
    assert 0 < seconds["c"] < math.inf


def test_without_prefill_instances_the_decode_instance_is_what_is_waited_for() -> None:
    w = world(models=MODELS[:3])
    w.call("a", 4096)
    lose(w, "b-p0")
    warmth = {m.model: m for m in w.cluster.warmth(SESSION)[1]}
    rate = w.instance("b-d0").prefill_tokens_per_second
    assert warmth["b"].estimated_prefill_seconds == warmth["b"].context_tokens / rate > 0
    # What D holds already needs no computing.
    lose(w, "a-p0")
    held = {m.model: m for m in w.cluster.warmth(SESSION)[1]}["a"]
    assert held.decode_tokens == held.context_tokens > 0
    assert held.estimated_prefill_seconds == 0.0
