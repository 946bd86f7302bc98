"""Who picks the model of every call of a session; routers that need no data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Router(Protocol):
    """Assigns models to the steps of sessions. Keeps nothing from one session to the next."""

    def route(self, task: str, steps: int, models: int, rng: np.random.Generator) -> Sequence[int]:
        """One index below `models` for each of `steps` consecutive calls of a session of that task.

        Raises ValueError when it cannot route over that many models, or does not know the task.
        """
        ...


@dataclass(frozen=True)
class AlwaysRouter:
    """Every call to one model: the paper's Always Cheap and Always Expensive (section 5.3)."""

    index: int

    def route(self, task: str, steps: int, models: int, rng: np.random.Generator) -> Sequence[int]:
        if not 0 <= self.index < models:
            raise ValueError(f"index {self.index}: must be one of the run's models, 0 to {models - 1}")
        return [self.index] * steps


@dataclass(frozen=True)
class RandomRouter:
    """Every call to any model, all equally likely (paper appendix C)."""

    def route(self, task: str, steps: int, models: int, rng: np.random.Generator) -> Sequence[int]:
        _at_least_one(models)
        indices: list[int] = rng.integers(models, size=steps).tolist()
        return indices


@dataclass(frozen=True)
class MarkovRouter:
    """Switches at each step with one probability (paper appendix C), to any of the other models alike."""

    probability: float

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability {self.probability}: must be between 0 and 1")

    def route(self, task: str, steps: int, models: int, rng: np.random.Generator) -> Sequence[int]:
        _at_least_one(models)
        if models == 1:
            return [0] * steps
        first = rng.integers(models)
        moves = np.where(rng.random(steps) < self.probability, rng.integers(1, models, size=steps), 0)
        indices: list[int] = ((first + np.cumsum(moves)) % models).tolist()
        return indices


def _at_least_one(models: int) -> None:
    if models < 1:
        raise ValueError(f"models {models}: must be at least 1")
