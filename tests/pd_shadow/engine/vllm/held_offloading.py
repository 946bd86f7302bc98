"""A host tier whose loads take as long as the test wants; loaded by vLLM as an offloading spec."""

from typing import Any

from vllm.v1.kv_offload.base import TransferResult

from pd_shadow.engine.vllm.cpu_offloading import CopyingWorker, CpuRigOffloadingSpec


class HeldWorker(CopyingWorker):  # type: ignore[misc]
    """Copies loads only while `hold` is off, as if the bus were busy."""

    hold = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._held: list[tuple[Any, ...]] = []

    def submit_load(self, *load: Any) -> bool:
        self._held.append(load)
        return True

    def get_finished(self) -> list[TransferResult]:
        if not HeldWorker.hold:
            while self._held:
                super().submit_load(*self._held.pop(0))
        return super().get_finished()


class HeldSpec(CpuRigOffloadingSpec):  # type: ignore[misc]
    """The rig's spec with such a worker."""

    def get_worker(self, kv_caches: Any) -> HeldWorker:
        if not isinstance(self._copying, HeldWorker):
            self._copying = HeldWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._copying
