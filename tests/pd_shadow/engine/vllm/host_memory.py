"""vLLM's own host tier (OffloadingConnector) on a machine without a GPU: only the copies are made here, at once."""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostMemorySpec(CPUOffloadingSpec):  # type: ignore[misc]
    _copying: "CopyingWorker | None" = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copying is None:
            assert self.blocks_per_chunk == 1
            self._copying = CopyingWorker(kv_caches, self.num_chunks)
        return self._copying


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._pool = [cache.tensor for cache in kv_caches.tensors]
        self._host = [torch.zeros((chunks, cache.page_size_bytes), dtype=torch.int8) for cache in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pool, src_spec.block_ids, self._host, dst_spec.chunk_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec.chunk_ids, self._pool, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None: ...

    def _copy(
        self, job_id: int, source: list[torch.Tensor], rows: Any, target: list[torch.Tensor], target_rows: Any
    ) -> bool:
        for origin, copy in zip(source, target, strict=True):
            copy[torch.as_tensor(target_rows, dtype=torch.int64)] = origin[torch.as_tensor(rows, dtype=torch.int64)]
        self._finished.append(TransferResult(job_id, True, len(rows) * source[0].shape[1], 0.0))
        return True
