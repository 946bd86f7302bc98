"""The benchmark comes to its end and says what it should; what it measures is not judged here."""

import numpy as np
import pytest

from transfer.bench.sweep import Case, block_table, llama_like, run_case
from transfer.layouts import KvLayout


def test_a_row_says_what_was_moved_and_in_how_many_descriptors() -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    layout = KvLayout(planes=2, heads=2, head_bytes=128, block_tokens=16)
    row = run_case(Case(layout, run_blocks=4, chunk_tokens=1024), rounds=2, seed=1)
    assert (row.descriptor_bytes, row.descriptors, row.chunk_bytes) == (4096, 128, 128 * 4096)
    assert 2 <= row.merged_descriptors <= 32
    assert row.ratio_to_limit == pytest.approx(row.gb_per_s / row.limit_gb_per_s)
    assert 0 < row.p50_s <= row.p90_s <= row.p99_s


@pytest.mark.parametrize("run", [0, 1, 3, 100])
def test_a_block_table_keeps_every_block_and_its_runs(run: int) -> None:
    table = block_table(np.random.default_rng(1), np.arange(9, dtype=np.int32), run)
    assert sorted(table.tolist()) == list(range(9))
    assert all(table[begin + 1] == table[begin] + 1 for begin in range(8) if run > 1 and (begin + 1) % run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_blocks": -1}, "run_blocks: must not be negative"),
        ({"chunk_tokens": 100}, "chunk_tokens: 100 are no whole blocks of 16 tokens"),
        ({"concurrency": 0}, "concurrency: must be at least 1"),
    ],
)
def test_a_case_names_what_is_wrong(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case(llama_like(1, 16), **change)  # type: ignore[arg-type]
