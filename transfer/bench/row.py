"""One row of the result: a shape of chunk, what moved, and the machine's own limit for the same bytes."""

from typing import NamedTuple


class Row(NamedTuple):
    """Bandwidths in 1e9 bytes per second, medians; times in seconds as the receiver sees them.

    `descriptors_before` counts the pieces of a chunk, `descriptors_after` what is left once pieces that lie side by
    side at both ends are merged. `best_ratio_to_limit` compares the fastest chunk with the fastest run of the limit: on
    a machine that does other work beside, medians say more about that than about the transfer. `limit_moved` is how
    far the limit itself moved within the run: its 90th percentile less its 10th, over its median. `lanes` are those
    that UCX says it uses; empty where it did not say.
    """

    model: str
    layout: str
    direction: str
    backend: str
    block_tokens: int
    chunk_tokens: int
    descriptor_bytes: int
    run_length: int
    concurrency: int
    repeats: int
    chunk_bytes: int
    descriptors_before: int
    descriptors_after: int
    posts: int
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    ratio_to_limit: float
    best_ratio_to_limit: float
    limit_moved: float
    p50_s: float
    p90_s: float
    p99_s: float
    cpu_s_per_gb: float
    lanes: str

    @property
    def merged_bytes(self) -> float:
        """Mean size of a descriptor after merging."""
        return self.chunk_bytes / self.descriptors_after
