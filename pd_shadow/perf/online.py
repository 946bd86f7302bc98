"""Iteration latency learnt from the engine itself: least squares on what a step consists of.

The form is that of the paper's appendix B, with the constants left to the measurements: a fixed part, a part for every
step that holds prefill work (on GPUs such a step leaves the full CUDA graph of a decode-only one), GEMM time per prompt
token, prefill attention per (new token, attended token) pair, decode attention per cached token, and a part per
decoding sequence, its own GEMM time in it: steps without prefill work say nothing about the price of prefill.

The appendix takes the longer of a GEMM's arithmetic and the reading of its weights; here, to stay linear, the reading
is part of the fixed time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FORGET = 0.998
"""Weight of an observation after one more has come: about 500 steps of memory."""
SOLVE_EVERY = 8
WARM_UP = 12
"""Observations before the estimate is trusted."""
RIDGE = 1e-3
# Observed times are taken as at most this many times, and at least this share of, what was predicted.
CLIP = 3.0
# Clipped observations, each fading over the next 32, that are too many on one side to be outliers.
SURPRISES = 8.0
SURPRISE_FORGET = 1 - 1 / 32
# Brings the features to the same magnitude.
SCALES = (1.0, 1.0, 1e-3, 1e-6, 1e-4, 1e-1)


class StepWork(NamedTuple):
    """What one iteration computes."""

    # New prompt tokens.
    prefill_tokens: int = 0
    # Pairs of a new prompt token and a token it attends to: q·c + q²/2 for q new tokens behind c cached ones.
    prefill_pairs: float = 0.0
    # Sequences that decode one token, and the cached tokens they attend to.
    decodes: int = 0
    decode_kv_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    def with_prefill(self, new: int, cached: int) -> "StepWork":
        """The same iteration with a chunk of `new` prompt tokens behind `cached` ones in it."""
        if not new:
            return self
        return self._replace(
            prefill_tokens=self.prefill_tokens + new, prefill_pairs=self.prefill_pairs + new * (cached + new / 2)
        )

    def with_decode(self, cached: int) -> "StepWork":
        """The same iteration with one more decode in it."""
        return self._replace(decodes=self.decodes + 1, decode_kv_tokens=self.decode_kv_tokens + cached)


class OnlineLatency:
    """Predicts seconds per iteration and learns from every one. Not thread-safe; one per engine.

    A single outlier (a page fault, a neighbour on the same core) must not make the model refuse all work, nor keep it
    from ever learning better: observations are clipped around the prediction, old ones fade, and when clipping becomes
    the rule, all are dropped. What recent iterations say nothing about stays as it was learnt last.
    """

    def __init__(self) -> None:
        size = len(SCALES)
        self._moment = np.zeros((size, size))
        self._product = np.zeros(size)
        self._weights: list[float] = [0.0] * size
        self.observations = 0
        self._prefills = 0
        # Observations since they were last dropped.
        self._kept = 0
        # Clipped observations without and with prefill work: from above counted up, from below counted down.
        self._surprises = [0.0, 0.0]

    @property
    def warm(self) -> bool:
        """Whether enough iterations with prefill work were seen for the price of a chunk to mean anything."""
        return self._prefills >= WARM_UP

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds of an iteration; does not fall as work grows."""
        weights = self._weights
        total = weights[0]
        if work.prefill_tokens:
            total += weights[1]
        return (
            total
            + weights[2] * SCALES[2] * work.prefill_tokens
            + weights[3] * SCALES[3] * work.prefill_pairs
            + weights[4] * SCALES[4] * work.decode_kv_tokens
            + weights[5] * SCALES[5] * work.decodes
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn that an iteration took so long."""
        if self.warm and self._kept >= WARM_UP:
            seconds = self._clipped(work, seconds)
        features = np.array(_features(work))
        self._moment *= FORGET
        self._product *= FORGET
        self._moment += np.outer(features, features)
        self._product += features * seconds
        self.observations += 1
        self._kept += 1
        self._prefills += work.prefill_tokens > 0
        if not self.warm or self._kept <= WARM_UP or self.observations % SOLVE_EVERY == 0:
            self._weights = _non_negative(self._moment, self._product, self._weights)

    def _clipped(self, work: StepWork, seconds: float) -> float:
        expected = self.seconds(work)
        clipped = min(max(seconds, expected / CLIP), expected * CLIP)
        kind = int(work.prefill_tokens > 0)
        self._surprises[kind] = self._surprises[kind] * SURPRISE_FORGET + (seconds > clipped) - (seconds < clipped)
        if abs(self._surprises[kind]) < SURPRISES:
            return clipped
        self._moment[:] = 0
        self._product[:] = 0
        self._kept = 0
        self._surprises = [0.0, 0.0]
        return seconds


def _features(work: StepWork) -> Sequence[float]:
    raw = (
        1.0,
        1.0 if work.prefill_tokens else 0.0,
        work.prefill_tokens,
        work.prefill_pairs,
        work.decode_kv_tokens,
        work.decodes,
    )
    return [value * scale for value, scale in zip(raw, SCALES, strict=True)]


def _non_negative(moment: "np.ndarray", product: "np.ndarray", before: Sequence[float]) -> list[float]:
    """Least squares with no negative weight: more work never takes less time. What is left open stays as `before`."""
    moment = moment + RIDGE * np.eye(len(product))
    product = product + RIDGE * np.array(before)
    weights = [0.0] * len(product)
    active = list(range(len(product)))
    while active:
        solution = np.linalg.solve(moment[np.ix_(active, active)], product[active])
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            for position, value in zip(active, solution, strict=True):
                weights[position] = float(value)
            break
        del active[worst]
    return weights
