"""Which blocks of a pool a chunk gets: long runs first, because runs move several times faster than single blocks."""

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]


class BlockPool:
    """Free blocks of a pool of `blocks`."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"blocks: must be at least 1, is {blocks}")
        self._free = np.ones(blocks, dtype=np.bool_)
        self.free_blocks = blocks

    def allocate(self, count: int) -> Blocks | None:
        """`count` blocks in the fewest runs, or None when so many are not free.

        The shortest run that holds all of them, so that longer ones stay whole; else the longest runs, the rest of the
        need always from the shortest run that holds it.
        """
        if count < 1:
            raise ValueError(f"count: must be at least 1, is {count}")
        if count > self.free_blocks:
            return None
        begins, lengths = self._runs()
        by_length = np.argsort(lengths, kind="stable")
        chosen: list[Blocks] = []
        last = len(by_length)
        while count:
            fitting = int(np.searchsorted(lengths[by_length[:last]], count))
            if fitting < last:
                begin, taken = int(begins[by_length[fitting]]), count
            else:
                last -= 1
                begin, taken = int(begins[by_length[last]]), int(lengths[by_length[last]])
            chosen.append(np.arange(begin, begin + taken, dtype=np.int32))
            count -= taken
        blocks = np.concatenate(chosen)
        self._free[blocks] = False
        self.free_blocks -= len(blocks)
        return blocks

    def free(self, blocks: Blocks) -> None:
        """Give blocks back; raises ValueError if one is free already, given twice or not of this pool."""
        if ((blocks < 0) | (blocks >= len(self._free))).any():
            raise ValueError(f"blocks: a block is not in 0…{len(self._free) - 1}")
        if len(np.unique(blocks)) != len(blocks) or self._free[blocks].any():
            raise ValueError("blocks: a block is given back twice")
        self._free[blocks] = True
        self.free_blocks += len(blocks)

    def longest_run(self) -> int:
        lengths = self._runs()[1]
        return int(lengths.max()) if len(lengths) else 0

    def _runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        edges = np.diff(np.concatenate(([0], self._free.astype(np.int8), [0])))
        begins = np.flatnonzero(edges == 1)
        return begins, np.flatnonzero(edges == -1) - begins
