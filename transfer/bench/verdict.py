"""What a row of the benchmark means for the one who ran it: reasons, each with the figures it rests on."""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from transfer.bench.row import Row

NEAR = 0.95
"""Share of a single copy from which on nothing is left to gain; a copy by descriptors of 512 KB reaches it."""
NEAR_TCP = 0.80
"""The same of a plain TCP stream, which has no messages, acknowledgements and completions."""
LARGE_BYTES = 512 << 10
"""Descriptors of this size cost no more than their bytes (NIXL 1.5.1 over UCX, measured on one host)."""
NOTICEABLY_SLOWER = 0.9
BUSY = 0.15
"""A limit that moves further than this within a run has met other work on the machine."""
SINGLE_COPY_LANES = ("cma", "xpmem", "knem", "cuda_ipc", "rocm_ipc", "ze_ipc")
RDMA_LANES = ("rc_", "rc/", "dc_", "dc/", "ud_", "ud/", "gdaki", "srd", "gga")


class VerdictReason(Enum):
    NEAR_LIMIT = "near_limit"
    DESCRIPTOR_SIZE = "descriptor_size"
    TCP_FALLBACK = "tcp_fallback"
    MACHINE_BUSY = "machine_busy"
    BELOW_LIMIT = "below_limit"
    """Slower than the limit, and none of the other reasons explains it."""


class Verdict(NamedTuple):
    """`evidence` names figures of the row, or says where else one comes from."""

    reason: VerdictReason
    text: str
    evidence: dict[str, float | int | str]


def judge(rows: Sequence[Row]) -> list[list[Verdict]]:
    """For every row its verdicts, the one that explains most first. Never empty."""
    return [_of(row, rows) for row in rows]


def _of(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    verdicts = []
    if row.backend == "ucx" and not fast_lane(row) and (row.lanes or row.limit == "tcp_loopback"):
        verdicts.append(_fallback(row))
    near = NEAR_TCP if row.limit == "tcp_loopback" else NEAR
    busy = row.limit_moved > BUSY
    best = max(_comparable(row, rows), key=lambda other: other.gb_per_s)
    fragmented = row.merged_bytes < LARGE_BYTES and row.descriptors_after > 1
    outdone = row.gb_per_s < NOTICEABLY_SLOWER * best.gb_per_s and row.merged_bytes < best.merged_bytes
    if fragmented and (outdone or row.ratio_to_limit < near):
        verdicts.append(_descriptors(row, best))
    elif row.ratio_to_limit >= near:
        verdicts.append(_near(row))
    elif not busy and not verdicts:
        verdicts.append(_below(row, near))
    if busy:
        verdicts.append(_busy(row))
    return verdicts


def _comparable(row: Row, rows: Sequence[Row]) -> Iterable[Row]:
    alike = (row.backend, row.direction, row.concurrency)
    return [row, *(other for other in rows if (other.backend, other.direction, other.concurrency) == alike)]


def fast_lane(row: Row) -> bool:
    """Whether UCX names a lane that moves data by one copy or by RDMA."""
    return any(name in row.lanes for name in (*SINGLE_COPY_LANES, *RDMA_LANES))


def _fallback(row: Row) -> Verdict:
    said = f"UCX chose {row.lanes}" if row.lanes else "the kernel forbids single copies between these processes"
    return Verdict(
        VerdictReason.TCP_FALLBACK,
        f"TCP fallback in use: expected RDMA or CMA, but {said}. Between containers of one host share the PID "
        "namespace and allow ptrace; between hosts see what ucx_info -d lists.",
        {"lanes": row.lanes, "limit": row.limit, "gb_per_s": row.gb_per_s},
    )


def _descriptors(row: Row, best: Row) -> Verdict:
    evidence: dict[str, float | int | str] = {
        "merged_bytes": round(row.merged_bytes),
        "descriptors_after": row.descriptors_after,
        "gb_per_s": row.gb_per_s,
        "ratio_to_limit": row.ratio_to_limit,
    }
    text = (
        f"this pair is limited by descriptor size: coalesce or use larger blocks. {row.descriptors_after} descriptors "
        f"of {_size(row.merged_bytes)} move at {row.gb_per_s:.1f} GB/s"
    )
    if best is not row and best.merged_bytes > row.merged_bytes and best.gb_per_s > row.gb_per_s:
        text += f", descriptors of {_size(best.merged_bytes)} at {best.gb_per_s:.1f} GB/s"
        evidence["larger_gb_per_s"] = best.gb_per_s
        evidence["larger_bytes"] = round(best.merged_bytes)
    return Verdict(VerdictReason.DESCRIPTOR_SIZE, text + ".", evidence)


def _near(row: Row) -> Verdict:
    return Verdict(
        VerdictReason.NEAR_LIMIT,
        f"near the limit: nothing to gain. {row.ratio_to_limit:.2f} of what the machine does without any library.",
        {"ratio_to_limit": row.ratio_to_limit, "limit": row.limit, "limit_gb_per_s": row.limit_gb_per_s},
    )


def _busy(row: Row) -> Verdict:
    return Verdict(
        VerdictReason.MACHINE_BUSY,
        f"machine is busy: the limit moved by {100 * row.limit_moved:.0f} % within the run; trust "
        f"best_ratio_to_limit ({row.best_ratio_to_limit:.2f}), or measure again on a quiet machine.",
        {"limit_moved": row.limit_moved, "best_ratio_to_limit": row.best_ratio_to_limit},
    )


def _below(row: Row, near: float) -> Verdict:
    return Verdict(
        VerdictReason.BELOW_LIMIT,
        f"below the limit: {row.ratio_to_limit:.2f} of it where {near:.2f} is usual, with large descriptors and a "
        "quiet machine. Compare cpu_s_per_gb, and p99_s with p50_s: a core may be shared or throttled.",
        {"ratio_to_limit": row.ratio_to_limit, "cpu_s_per_gb": row.cpu_s_per_gb, "p99_s": row.p99_s},
    )


def _size(count: float) -> str:
    return f"{count / (1 << 20):.1f} MB" if count >= 1 << 20 else f"{count / (1 << 10):.0f} KB"
