"""vLLM's host tier on rigs without GPUs, where its native spec refuses to start.

Only the copies are ours: the native worker queues them on GPU streams, this one copies at once. Sizes, the cache
manager with its eviction policies and the metrics are vLLM's. On such a rig the KV pool is host memory too, so this
shows what a host tier keeps, not what PCIe costs. Named in the kv-transfer configuration by `host_tier.py`, loaded by
vLLM's OffloadingConnector (`spec_name`, `spec_module_path`).
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CpuRigOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """The native spec with a worker that needs no GPU."""

    _copying: "CopyingWorker | None" = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copying is None:
            self._copying = CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._copying


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the KV pool and host memory; every job is done when it has been submitted.

    Host memory holds `chunks` chunks of `blocks_per_chunk` pool blocks. A job names pool blocks and chunks per KV cache
    group; its first block may lie inside its first chunk.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        # Both of shape (blocks, bytes of a block).
        self._pool = [cache.tensor for cache in kv_caches.tensors]
        self._host = [
            torch.zeros((chunks * blocks_per_chunk, cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]
        self._tensors_of_group = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, to_host: bool) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec)
        started = time.perf_counter()
        size = 0
        for group, in_pool, on_host in self._rows(blocks, chunks.chunk_ids):
            for index in self._tensors_of_group[group]:
                pool, host = self._pool[index], self._host[index]
                if to_host:
                    host[on_host] = pool[in_pool]
                else:
                    pool[in_pool] = host[on_host]
                size += len(in_pool) * host.shape[1]
        self._finished.append(TransferResult(job_id, True, size, time.perf_counter() - started))
        return True

    def _rows(
        self, blocks: GPULoadStoreSpec, chunk_ids: np.ndarray
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Per group: its index, rows of the pool, and the rows of host memory that match them one by one."""
        block_ids = blocks.block_ids.astype(np.int64)
        within = np.arange(self._blocks_per_chunk)
        first_block = first_chunk = 0
        for group, (count, index) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if count == 0:
                continue
            skipped = index % self._blocks_per_chunk
            last_chunk = first_chunk + -(-(skipped + count) // self._blocks_per_chunk)
            chunks = chunk_ids[first_chunk:last_chunk].astype(np.int64)
            rows = (chunks[:, None] * self._blocks_per_chunk + within).ravel()[skipped : skipped + count]
            yield (
                group,
                torch.from_numpy(block_ids[first_block : first_block + count]),
                torch.from_numpy(rows),
            )
            first_block += count
            first_chunk = last_chunk
