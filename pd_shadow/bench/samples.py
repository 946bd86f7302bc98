"""What the load generator saw. Times in seconds."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One normal request: `token_times` count from when it was due. `error` is empty for a good one."""

    prompt_tokens: int
    token_times: tuple[float, ...] = ()
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.token_times[0]

    @property
    def decode_seconds(self) -> float:
        """From its first token to its last."""
        return self.token_times[-1] - self.token_times[0]

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first."""
        return len(self.token_times) - 1

    @property
    def tpot(self) -> float:
        """Mean time per token after the first."""
        return self.decode_seconds / max(1, self.decode_tokens)

    @property
    def longest_gap(self) -> float:
        """Longest time between two tokens; 0 with fewer than two."""
        times = self.token_times
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True)
class Leg:
    """One shadow request. `ended_at` is monotonic; `end` is the engine's word, or `failed` with an error."""

    ended_at: float
    computed_tokens: int
    end: str
    error: str = ""


@dataclass
class Phase:
    """A stretch of traffic on one engine; monotonic times. `legs` may lie before and after it."""

    opened: float = 0.0
    closed: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.closed - self.opened

    @property
    def good(self) -> Sequence[Sample]:
        return [sample for sample in self.samples if not sample.error]

    @property
    def legs_inside(self) -> Sequence[Leg]:
        """Legs that ended in the phase.

        Shadow work runs before and after it: what the first of them had done before makes up for what the last have
        not finished.
        """
        return [leg for leg in self.legs if self.opened <= leg.ended_at <= self.closed]
