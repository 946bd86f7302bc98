"""The CPU rig's copies: every block lands where the other direction looks for it."""

from typing import Any

import pytest

from tests.pd_shadow.engine.vllm.stepping import in_fresh_process

pytestmark = pytest.mark.engine


def copies() -> dict[str, Any]:
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from pd_shadow.engine.vllm.cpu_offloading import CopyingWorker

    # Two KV cache groups of a layer each, 16 blocks of 4 bytes; a block's bytes are its number, plus 50 in the second.
    pools = [torch.arange(16, dtype=torch.int8).repeat_interleave(4).view(16, 4) + 50 * group for group in range(2)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(pool, 4) for pool in pools], [[CanonicalKVCacheRef(group, 4)] for group in range(2)]
    )
    worker = CopyingWorker(caches, blocks_per_chunk=3, chunks=4)

    def jobs() -> list[tuple[int, int]]:
        return [(result.job_id, result.transfer_size) for result in worker.get_finished() if result.success]

    # Six blocks of the first group to chunks 3 and 0, three of the second to chunk 2.
    blocks = [9, 8, 7, 6, 5, 4, 1, 2, 3]
    worker.submit_store(1, GPULoadStoreSpec(blocks, [6, 3], [0, 0]), CPULoadStoreSpec([3, 0, 2]))
    stored = jobs()
    for pool in pools:
        pool.zero_()
    # Of the first group the last four blocks: the third of chunk 3, and all of chunk 0. Of the second the middle one.
    worker.submit_load(2, CPULoadStoreSpec([3, 0, 2]), GPULoadStoreSpec([10, 11, 12, 13, 14], [4, 1], [2, 1]))
    worker.wait({2})
    return {
        "stored": stored,
        "loaded": jobs(),
        "then": jobs(),
        "pools": [pool[10:15].tolist() for pool in pools],
        "elsewhere": int(sum(pool[:10].abs().sum() + pool[15:].abs().sum() for pool in pools)),
    }


def test_blocks_come_back_to_other_places_from_the_middle_of_chunks() -> None:
    seen = in_fresh_process(copies)
    assert seen["pools"][0] == [[number] * 4 for number in (7, 6, 5, 4, 0)]
    assert seen["pools"][1] == [[number] * 4 for number in (0, 0, 0, 0, 52)]
    assert seen["elsewhere"] == 0
    # Jobs are reported once, with their bytes.
    assert (seen["stored"], seen["loaded"], seen["then"]) == ([[1, 36]], [[2, 20]], [])
