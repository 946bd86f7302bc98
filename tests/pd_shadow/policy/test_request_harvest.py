import pytest

from pd_shadow.policy.request_harvest import PrefillLoad, Verdict, admit


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
