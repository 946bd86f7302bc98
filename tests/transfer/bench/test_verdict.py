"""What a row means, and on which of its figures that rests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.bench.rows import TCP, row
from transfer.bench.verdict import BUSY, LARGE_BYTES, VerdictReason, judge

SCATTERED = row(descriptors_after=8192, run_length=1, gb_per_s=9.7, limit_gb_per_s=11.4, ratio_to_limit=0.85)


def reasons(*rows: object, of: int = 0) -> list[VerdictReason]:
    return [verdict.reason for verdict in judge(rows)[of]]  # type: ignore[arg-type]


def test_large_descriptors_near_the_limit_have_nothing_to_gain() -> None:
    ((verdict,),) = judge([row()])
    assert verdict.reason is VerdictReason.NEAR_LIMIT
    assert "nothing to gain" in verdict.text
    assert verdict.evidence["limit_gb_per_s"] == 13.0


def test_small_descriptors_far_from_the_limit_are_what_limits() -> None:
    ((verdict,),) = judge([SCATTERED])
    assert verdict.reason is VerdictReason.DESCRIPTOR_SIZE
    assert "coalesce or use larger blocks" in verdict.text
    assert verdict.evidence["merged_bytes"] == 64 << 10


def test_small_descriptors_at_their_own_limit_still_lose_to_larger_ones() -> None:
    """The kernel's copy of scattered pieces is slow as well: near that limit is no reason to be content."""
    slow = row(descriptors_after=8192, gb_per_s=6.0, limit_gb_per_s=6.1, ratio_to_limit=0.98)
    (verdict,) = judge([slow, row()])[0]
    assert verdict.reason is VerdictReason.DESCRIPTOR_SIZE
    assert verdict.evidence["larger_gb_per_s"] == 12.6
    assert reasons(slow) == [VerdictReason.NEAR_LIMIT]


@pytest.mark.parametrize("change", [{"backend": "tcp"}, {"direction": "read"}, {"concurrency": 4}])
def test_rows_of_another_way_are_not_compared(change: dict[str, object]) -> None:
    slow = row(descriptors_after=8192, gb_per_s=6.0, limit_gb_per_s=6.1, ratio_to_limit=0.98)
    assert reasons(slow, row(**change)) == [VerdictReason.NEAR_LIMIT]


def test_tcp_that_nobody_asked_for_is_named_with_what_ucx_chose() -> None:
    fallback = row(lanes=TCP, gb_per_s=3.5, limit="tcp_loopback", limit_gb_per_s=4.4, ratio_to_limit=0.8)
    verdicts = judge([fallback])[0]
    assert verdicts[0].reason is VerdictReason.TCP_FALLBACK
    assert verdicts[0].evidence["lanes"] == TCP


def test_forbidden_single_copies_are_a_fallback_also_where_ucx_says_nothing() -> None:
    assert VerdictReason.TCP_FALLBACK in reasons(row(lanes="", limit="tcp_loopback"))
    assert VerdictReason.TCP_FALLBACK not in reasons(row(lanes=""))


@pytest.mark.parametrize("lanes", ["rma(rc_mlx5/mlx5_0:1) am(rc_mlx5/mlx5_0:1)", "rma(cuda_ipc/cuda) am(tcp/eth0)"])
def test_rdma_and_copies_between_gpus_are_no_fallback(lanes: str) -> None:
    assert reasons(row(lanes=lanes)) == [VerdictReason.NEAR_LIMIT]


def test_tcp_that_was_asked_for_is_no_fallback() -> None:
    asked = row(backend="tcp", lanes=TCP, limit="tcp_loopback", ratio_to_limit=0.82)
    assert reasons(asked) == [VerdictReason.NEAR_LIMIT]


def test_a_limit_that_moves_says_that_the_machine_is_busy() -> None:
    verdicts = judge([row(limit_moved=0.4, ratio_to_limit=0.7, best_ratio_to_limit=0.97)])[0]
    assert [verdict.reason for verdict in verdicts] == [VerdictReason.MACHINE_BUSY]
    assert "moved by 40 %" in verdicts[0].text


def test_what_nothing_explains_is_said_to_be_so() -> None:
    assert reasons(row(ratio_to_limit=0.7)) == [VerdictReason.BELOW_LIMIT]


@given(
    ratio=st.floats(0.01, 2.0),
    moved=st.floats(0.0, 2.0),
    after=st.integers(1, 8192),
    speed=st.floats(0.01, 50.0),
    lanes=st.sampled_from(["", TCP, row().lanes]),
)
def test_every_row_has_a_verdict_each_reason_once(
    ratio: float, moved: float, after: int, speed: float, lanes: str
) -> None:
    one = row(ratio_to_limit=ratio, limit_moved=moved, descriptors_after=after, gb_per_s=speed, lanes=lanes)
    found = reasons(one, row())
    assert found
    assert len(set(found)) == len(found)
    assert (VerdictReason.MACHINE_BUSY in found) == (moved > BUSY)
    if one.merged_bytes >= LARGE_BYTES:
        assert VerdictReason.DESCRIPTOR_SIZE not in found
