"""The SLOs that normal requests are judged by (paper section 5.1), from what an idle engine needs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pd_shadow.bench.samples import Sample
from pd_shadow.engine.settings import SloSettings


@dataclass(frozen=True)
class Isolated:
    """Measured on an idle engine, in seconds.

    `prefill`: (prompt tokens, time to first token), by length. `decode`: time per token of a request that runs alone.
    """

    prefill: Sequence[tuple[int, float]]
    decode: float

    def prefill_seconds(self, tokens: int) -> float:
        """Between the measured lengths by linear interpolation; outside them the nearest one's."""
        points = list(self.prefill)
        if tokens <= points[0][0]:
            return points[0][1]
        for (low, before), (high, after) in itertools.pairwise(points):
            if tokens <= high:
                return before + (after - before) * (tokens - low) / (high - low)
        return points[-1][1]


@dataclass(frozen=True)
class Slo:
    """The larger of a floor and a multiple of the isolated time; the same for every mode."""

    isolated: Isolated
    settings: SloSettings

    def ttft(self, prompt_tokens: int) -> float:
        """Longest time to first token, in seconds."""
        return max(
            self.settings.ttft_floor_seconds, self.settings.multiple * self.isolated.prefill_seconds(prompt_tokens)
        )

    @property
    def tpot(self) -> float:
        """Longest time per token after the first, in seconds."""
        return max(self.settings.tpot_floor_seconds, self.settings.multiple * self.isolated.decode)

    def met_by(self, sample: Sample) -> bool:
        """Whether a request was answered and kept both."""
        return not sample.error and sample.ttft <= self.ttft(sample.prompt_tokens) and sample.tpot <= self.tpot

    def attainment(self, samples: Sequence[Sample]) -> float | None:
        """Share of requests that met both; None without requests."""
        return round(sum(map(self.met_by, samples)) / len(samples), 6) if samples else None

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        lengths = [tokens for tokens, _ in self.isolated.prefill]
        return {
            "ttft_floor_s": self.settings.ttft_floor_seconds,
            "tpot_floor_s": self.settings.tpot_floor_seconds,
            "multiple": self.settings.multiple,
            "isolated_prefill_s": {str(tokens): round(seconds, 6) for tokens, seconds in self.isolated.prefill},
            "isolated_decode_s": round(self.isolated.decode, 6),
            "ttft_s": {str(tokens): round(self.ttft(tokens), 6) for tokens in lengths},
            "tpot_s": round(self.tpot, 6),
        }
