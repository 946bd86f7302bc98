"""The shadow policy: what the configuration and operators can say, and what follows from it."""

import math

import pytest

from controller.config import ControllerConfig, ShadowConfig
from controller.core.rejection import RejectedError
from controller.core.shadow_policy import ShadowPolicy
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.config import ConfigError, parse
from pd_shadow.policy.approach import Approach
from tests.controller.core.test_shadow import in_flight, job_reason
from tests.controller.support import SESSION, World, world


def configured(**shadow: object) -> ShadowPolicy:
    return ShadowPolicy.configured(ShadowConfig.model_validate(shadow))


def set_policy(w: World, **change: object) -> None:
    w.cluster.operators.set_shadow_policy(w.now, w.cluster.shadow_policy.changed(**change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shadow", "approach", "enabled", "gate"),
    [
        ({}, Approach.HARVEST_SLO, True, 0.0),
        ({"approach": "no-shadow"}, Approach.NO_SHADOW, False, 0.0),
        ({"approach": "predictive"}, Approach.PREDICTIVE, True, 0.25),
        ({"approach": "predictive", "gate_probability": 0.5}, Approach.PREDICTIVE, True, 0.5),
        ({"approach": "predictive", "gate_probability": 0.0}, Approach.PREDICTIVE, True, 0.0),
        ({"enabled": False}, Approach.HARVEST_SLO, False, 0.0),
    ],
)
def test_an_approach_sets_defaults_that_explicit_values_win_over(
    shadow: dict[str, object], approach: Approach, enabled: bool, gate: float
) -> None:
    policy = configured(**shadow)
    assert (policy.approach, policy.enabled, policy.gate_probability) == (approach, enabled, gate)


@pytest.mark.parametrize(
    ("shadow", "message"),
    [
        ({"approach": "harvest-sol"}, "shadow.approach: .*did you mean 'harvest-slo'"),
        ({"approach": "oracle"}, "shadow.approach: .*only the simulator runs it"),
        ({"approach": "no-shadow", "enabled": True}, "approach no-shadow does no shadow work"),
        ({"gate_probability": 1.5}, "shadow.gate_probability"),
    ],
)
def test_configuration_that_cannot_be_is_refused(shadow: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(ControllerConfig, {"shadow": shadow})


def test_a_change_keeps_what_it_does_not_name() -> None:
    policy = configured(gate_probability=0.3, top_k=2)
    assert policy.changed(enabled=False) == ShadowPolicy(Approach.HARVEST_SLO, False, 0.3, 2)
    assert policy.changed(top_k=0).top_k is None
    assert policy.changed(gate_probability=0.0).gate_probability == 0.0
    assert policy.changed() == policy


def test_a_changed_approach_brings_its_own_values() -> None:
    policy = configured(gate_probability=0.3, top_k=2)
    assert policy.changed(approach="predictive") == ShadowPolicy(Approach.PREDICTIVE, True, 0.25, 2)
    assert policy.changed(approach="predictive", gate_probability=0.4).gate_probability == 0.4
    assert policy.changed(approach="no-shadow") == ShadowPolicy(Approach.NO_SHADOW, False, 0.0, 2)
    assert policy.changed(approach="harvest", enabled=False).enabled is False
    paused = policy.changed(approach="no-shadow")
    assert paused.changed(approach="harvest").enabled is True


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"approach": "harvst"}, "approach", "did you mean 'harvest'"),
        ({"approach": "dedicated"}, "approach", "only the simulator"),
        ({"approach": "no-shadow", "enabled": True}, "enabled", "does no shadow work"),
        ({"gate_probability": -0.1}, "gate_probability", "0 to 1"),
        ({"gate_probability": math.nan}, "gate_probability", "0 to 1"),
    ],
)
def test_changes_that_cannot_be_are_refused_with_their_field(
    change: dict[str, object], field: str, message: str
) -> None:
    with pytest.raises(RejectedError) as refused:
        configured().changed(**change)  # type: ignore[arg-type]
    assert (refused.value.reason, refused.value.field) == (pb.REJECTION_REASON_INVALID_FIELD, field)
    assert message in refused.value.message


def test_pausing_takes_prefill_legs_back_and_enabling_goes_on_where_they_were() -> None:
    w = world()
    w.begin("a", 9000)
    w.render("b", 9000)
    (leg,) = w.pump()
    set_policy(w, enabled=False)
    w.pump()
    assert w.cancelled == {leg.leg_id: pb.SHADOW_REASON_PAUSED}
    assert w.finish(leg, pb.LEG_OUTCOME_CANCELLED) == []
    assert job_reason(w) == "paused"
    assert w.begin("a", 9000).shadow_targets == []
    set_policy(w, enabled=True)
    (again,) = w.pump()
    assert again.upto_tokens == 4096


def test_a_chunk_on_its_way_is_finished_when_work_is_paused() -> None:
    w = world()
    w.begin("a", 4096)
    w.render("b", 4096)
    (leg,) = w.pump()
    (export,) = w.finish(leg)
    set_policy(w, enabled=False)
    (fetch,) = w.finish(export)
    assert fetch.kind == pb.LEG_KIND_FETCH
    assert w.finish(fetch) == []
    assert in_flight(w) == (0, 0)
    assert w.cluster.shadow_ledger.pushed == 4096


def test_a_gate_counts_from_the_next_call_on() -> None:
    w = world(models=("a", "b", "c"))
    for following, times in (("b", 90), ("c", 10)):
        for _ in range(times):
            w.cluster.prior.observe("", "a", following)
    assert [target.model for target in w.begin("a", 5000).shadow_targets] == ["b", "c"]
    set_policy(w, approach="predictive")
    assert [target.model for target in w.begin("a", 5000).shadow_targets] == ["b"]
    assert job_reason(w, "c", SESSION) == "below_gate"


def test_a_change_is_an_event_and_part_of_the_effective_configuration() -> None:
    w = world(shadow={"top_k": 3})
    set_policy(w, approach="predictive", gate_probability=0.4)
    event = w.cluster.events()[-1]
    assert (event.kind, event.subject, event.reason) == (admin.EVENT_KIND_SHADOW_POLICY, "predictive", "enabled")
    assert event.message == "predictive, enabled, gate 0.4, top 3"
    shadow = w.cluster.effective_config.shadow
    assert (shadow.approach, shadow.enabled, shadow.gate_probability, shadow.top_k) == ("predictive", True, 0.4, 3)
    assert w.cluster.config.shadow.gate_probability is None
