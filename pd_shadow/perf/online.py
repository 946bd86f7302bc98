"""Iteration latency learnt from the engine itself: least squares on what a step consists of.

The form is that of the paper's appendix B, with the constants left to the measurements: a fixed part, a part for every
step that holds prefill work (on GPUs such a step leaves the full CUDA graph of a decode-only one), GEMM time per
token, prefill attention per (new token, attended token) pair, decode attention per cached token, and a part per
sequence.
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
    from ever learning better: observations are clipped around the prediction, old ones fade.
    """

    def __init__(self) -> None:
        size = len(SCALES)
        self._moment = np.eye(size) * RIDGE
        self._product = np.zeros(size)
        self._weights: list[float] = [0.0] * size
        self.observations = 0

    @property
    def warm(self) -> bool:
        """Whether enough iterations were seen for predictions to mean anything."""
        return self.observations >= WARM_UP

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds of an iteration; does not fall as work grows."""
        weights = self._weights
        total = weights[0]
        if work.prefill_tokens:
            total += weights[1]
        return (
            total
            + weights[2] * SCALES[2] * work.tokens
            + weights[3] * SCALES[3] * work.prefill_pairs
            + weights[4] * SCALES[4] * work.decode_kv_tokens
            + weights[5] * SCALES[5] * work.decodes
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn that an iteration took so long."""
        if self.warm:
            expected = self.seconds(work)
            seconds = min(max(seconds, expected / CLIP), expected * CLIP)
        features = np.array(_features(work))
        self._moment *= FORGET
        self._product *= FORGET
        self._moment += np.outer(features, features)
        self._product += features * seconds
        self.observations += 1
        if self.observations <= WARM_UP or self.observations % SOLVE_EVERY == 0:
            self._weights = _non_negative(self._moment, self._product)


def _features(work: StepWork) -> Sequence[float]:
    raw = (
        1.0,
        1.0 if work.prefill_tokens else 0.0,
        work.tokens,
        work.prefill_pairs,
        work.decode_kv_tokens,
        work.decodes,
    )
    return [value * scale for value, scale in zip(raw, SCALES, strict=True)]


def _non_negative(moment: "np.ndarray", product: "np.ndarray") -> list[float]:
    """Least squares with no negative weight: more work never takes less time."""
    size = len(product)
    active = list(range(size))
    ridge = np.eye(size) * RIDGE
    while active:
        index = np.ix_(active, active)
        solution = np.linalg.solve(moment[index] + ridge[index], product[active])
        if (solution >= 0).all():
            weights = [0.0] * size
            for position, value in zip(active, solution, strict=True):
                weights[position] = float(value)
            return weights
        active = [position for position, value in zip(active, solution, strict=True) if value >= 0]
    return [0.0] * size
