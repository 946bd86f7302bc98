import pytest

from pd_shadow.perf.energy import HIGH_IDLE, LOW_IDLE


def test_watts_go_from_decode_to_prefill_with_the_compute_bound_share() -> None:
    assert [LOW_IDLE.watts(share) for share in (0, 0.5, 1)] == [380, 540, 700]


def test_energy_is_that_of_all_gpus_of_the_instance() -> None:
    assert LOW_IDLE.busy_joules(2.0, 0.5, gpus=4) == pytest.approx(4 * 2 * 540)
    assert LOW_IDLE.idle_joules(2.0, gpus=4) == pytest.approx(4 * 2 * 75)


def test_presets_differ_in_idle_watts_alone() -> None:
    assert HIGH_IDLE.idle_joules(1.0) == 300
    assert HIGH_IDLE.with_idle(75.0) == LOW_IDLE
