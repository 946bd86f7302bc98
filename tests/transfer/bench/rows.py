"""A row like those of a quiet machine, to be changed."""

from typing import Any

from transfer.bench.row import Row

CMA = "rma_am(tcp/lo) amo_am(tcp/lo) am(tcp/lo cma/memory) ka(tcp/lo)"
TCP = "rma_am(tcp/lo) amo_am(tcp/lo) am(tcp/lo) ka(tcp/lo)"
MB = 1 << 20


def row(**changes: Any) -> Row:
    usual = Row(
        model="Llama-3.1-8B-Instruct",
        layout="plane_major",
        direction="write",
        backend="ucx",
        block_tokens=16,
        chunk_tokens=4096,
        descriptor_bytes=64 << 10,
        run_length=256,
        concurrency=1,
        repeats=10,
        chunk_bytes=512 * MB,
        descriptors_before=8192,
        descriptors_after=32,
        posts=32,
        gb_per_s=12.6,
        limit="single_copy",
        limit_gb_per_s=13.0,
        ratio_to_limit=12.6 / 13.0,
        best_ratio_to_limit=0.98,
        limit_moved=0.03,
        p50_s=0.04,
        p90_s=0.04,
        p99_s=0.05,
        cpu_s_per_gb=0.08,
        lanes=CMA,
    )
    return usual._replace(**changes)
