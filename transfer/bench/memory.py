"""Memory for measurements: page-aligned, faulted in, on huge pages where the kernel gives them."""

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

HUGE = 2 << 20
_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


class Buffer:
    """`size` bytes of private memory, every page touched. Free it by dropping it."""

    def __init__(self, size: int, *, huge_pages: bool = True) -> None:
        # Shared anonymous memory, mmap's default, gets no transparent huge pages.
        self._map = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        start = -whole.ctypes.data % HUGE
        self.array: npt.NDArray[np.uint8] = whole[start : start + size]
        self.array[:] = 0
        self.address = int(self.array.ctypes.data)
        self.size = size

    def fill(self, seed: int) -> None:
        """Bytes that differ from place to place and from seed to seed."""
        words = self.array[: self.size // 8 * 8].view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed)


def huge_pages_available() -> bool:
    """Whether the kernel gives huge pages to memory that asks for them."""
    try:
        enabled = (_PAGE_SIZE.parent / "enabled").read_text()
    except OSError:
        return False
    return "[never]" not in enabled and os.name == "posix"
