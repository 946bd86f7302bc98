import pytest

from pd_shadow.api.v1 import common_pb2
from pd_shadow.policy.request_harvest import ColocatedLoad, PrefillLoad, Verdict, admit, admit_colocated, admit_eager


@pytest.mark.parametrize(
    ("load", "verdict"),
    [
        (PrefillLoad(calls=0, shadow_legs=0, foreign_requests=0), Verdict.ADMIT),
        (PrefillLoad(calls=1, shadow_legs=0, foreign_requests=0), Verdict.PREFILL_BUSY),
        (PrefillLoad(calls=0, shadow_legs=0, foreign_requests=1), Verdict.PREFILL_BUSY),
        (PrefillLoad(calls=0, shadow_legs=1, foreign_requests=0), Verdict.PREFILL_TAKEN),
        (PrefillLoad(calls=1, shadow_legs=1, foreign_requests=0), Verdict.PREFILL_BUSY),
        (PrefillLoad(calls=0, shadow_legs=0, foreign_requests=0, neighbour_busy=True), Verdict.HARDWARE_BUSY),
    ],
)
def test_a_leg_starts_only_beside_nothing(load: PrefillLoad, verdict: Verdict) -> None:
    assert admit(load) is verdict


@pytest.mark.parametrize(
    ("load", "verdict"),
    [
        (ColocatedLoad(waiting=0, shadow_legs=0), Verdict.ADMIT),
        (ColocatedLoad(waiting=1, shadow_legs=0), Verdict.QUEUE_NOT_EMPTY),
        (ColocatedLoad(waiting=0, shadow_legs=1), Verdict.PREFILL_TAKEN),
        (ColocatedLoad(waiting=1, shadow_legs=1), Verdict.QUEUE_NOT_EMPTY),
        (ColocatedLoad(waiting=0, shadow_legs=0, neighbour_busy=True), Verdict.HARDWARE_BUSY),
    ],
)
def test_on_a_colocated_instance_it_waits_for_the_queue_alone(load: ColocatedLoad, verdict: Verdict) -> None:
    assert admit_colocated(load) is verdict


def test_an_eager_leg_waits_for_its_predecessor_alone() -> None:
    assert [admit_eager(legs) for legs in (0, 1)] == [Verdict.ADMIT, Verdict.PREFILL_TAKEN]


def test_every_refusal_is_an_api_reason() -> None:
    names = set(common_pb2.ShadowReason.keys())
    assert {f"SHADOW_REASON_{v.name}" for v in Verdict if v is not Verdict.ADMIT} <= names
