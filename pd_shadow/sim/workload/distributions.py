"""Distributions of lengths and times, drawn many at a time."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Distribution(Protocol):
    """Something positive to draw from."""

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        """`size` independent values."""
        ...


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution; without spread it is always its median."""

    median: float
    sigma: float = 0.0

    @classmethod
    def of_mean(cls, mean: float, sigma: float) -> "LogNormal":
        """The one with that mean."""
        return cls(mean * math.exp(-(sigma**2) / 2), sigma)

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return self.median * np.exp(self.sigma * rng.standard_normal(size))


@dataclass(frozen=True)
class Quantiles:
    """Known quantiles; between two of them the logarithm grows evenly.

    `knots` are (probability, value), both rising, probabilities from 0 to 1, values above 0.
    """

    knots: tuple[tuple[float, float], ...]

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        probabilities, values = np.array(self.knots).T
        return np.asarray(np.exp(np.interp(rng.random(size), probabilities, np.log(values))))


def whole_tokens(lengths: NDArray[np.float64], most: float) -> NDArray[np.int64]:
    """Lengths as whole numbers from 1 to `most`."""
    return np.clip(np.rint(lengths), 1, most).astype(np.int64)
