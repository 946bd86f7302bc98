"""Routers over LLMRouter's score matrix: one replays its decisions, one is calibrated to the paper's switch rates."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pd_shadow.sim.workload.profiles import SessionProfile
from pd_shadow.sim.workload.scores import best

MOST_MODELS = 5
"""The paper goes no further (appendix C)."""
FIVE_MODEL_SWITCHES = 5.1 / 3.2
"""Growth of switches per session from two models to five (appendix C)."""


class Policy(StrEnum):
    """How the matrix's scores become decisions (paper sections 2.1 and C)."""

    ACCURACY_PER_COST = "accuracy-per-cost"
    MAX_ACCURACY = "max-accuracy"


@dataclass(frozen=True)
class MatrixRouter:
    """Replays the policy over consecutive queries of the session's task, beginning anywhere among them.

    `columns` names the matrix's column of each model (`scores.stand_ins`). Decisions are real, but many are those of
    stand-ins, so a trace's switch rate is not the paper's: `table1.pair_rates` has both.
    """

    columns: tuple[str, ...]
    policy: Policy = Policy.ACCURACY_PER_COST

    def __post_init__(self) -> None:
        _check(self.columns)

    def route(self, task: str, steps: int, models: int, rng: np.random.Generator) -> Sequence[int]:
        _same_number(self.columns, models)
        decisions = _decisions(task, self.columns, self.policy)
        start = rng.integers(len(decisions))
        indices: list[int] = decisions[(start + np.arange(steps)) % len(decisions)].tolist()
        return indices

    def switch_probability(self, tasks: Sequence[str]) -> float:
        """Share of steps after a session's first that switch, each task being as frequent."""
        shares = []
        for task in tasks:
            decisions = _decisions(task, self.columns, self.policy)
            shares.append(np.mean(decisions != np.roll(decisions, 1)))
        return float(np.mean(shares))


class _Chain(NamedTuple):
    """A task's model choices as a Markov chain."""

    start: NDArray[np.float64]  # (models,) cumulative probabilities of the first model
    moves: NDArray[np.float64]  # (models, models) cumulative probabilities of the next model, by the current one


@dataclass(frozen=True)
class CalibratedRouter:
    """A Markov router per task that switches as often as the paper's: the default where no matrix fits its models.

    Its transitions are those of the accuracy-per-cost decisions in the matrix, per task and current model, counted with
    half a decision more for each pair. What is calibrated is one shift, the same for all tasks, of the log-odds of
    switching: it makes the mean switch rate of the profile's sessions `rate`. Where a switch goes to stays as counted,
    and tasks and models keep differing, so that a switch prior has something to learn; how often each model is chosen
    changes with the shift. No single decision is that of the paper's models.

    `rate` is by default the profile's (Table 1 or 5) for two models. For more it grows evenly to 1.6 times that at
    five, as the paper's switches per session do from two to five (appendix C); between those the growth is assumed.
    """

    profile: SessionProfile
    columns: tuple[str, ...]
    rate: float | None = None
    _chains: dict[str, _Chain] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.columns)
        if len(self.columns) < 2:
            raise ValueError("columns: at least 2 models are needed to switch between")
        calls = self.profile.mean_calls
        target = self.target * calls / (calls - 1)
        counted = {task: _transitions(task, self.columns) for task in self.profile.tasks}
        low, high = -12.0, 12.0
        if not 0 < target < _mean_switching(counted, high):
            most = _mean_switching(counted, high) * (calls - 1) / calls
            raise ValueError(f"rate {self.target}: must be above 0 and below {most:.2f} for these models")
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean_switching(counted, middle) < target else (low, middle)
        chains = {}
        for task, matrix in counted.items():
            shifted = _shift(matrix, low)
            chains[task] = _Chain(np.cumsum(_stationary(shifted)), np.cumsum(shifted, axis=1))
        object.__setattr__(self, "_chains", chains)

    @property
    def target(self) -> float:
        """The switch rate it is calibrated to, first calls counted."""
        if self.rate is not None:
            return self.rate
        return self.profile.switch_rate * (1 + (FIVE_MODEL_SWITCHES - 1) * (len(self.columns) - 2) / 3)

    def route(self, task: str, steps: int, models: int, rng: np.random.Generator) -> Sequence[int]:
        _same_number(self.columns, models)
        if task not in self._chains:
            raise ValueError(f"task {task!r} is not one of {self.profile.name}'s: {', '.join(self.profile.tasks)}")
        start, moves = self._chains[task]
        indices: list[int] = []
        for drawn in rng.random(steps):
            cumulated = moves[indices[-1]] if indices else start
            # Rounding may leave the last sum below 1.
            indices.append(min(int(np.searchsorted(cumulated, drawn, side="right")), models - 1))
        return indices


def _check(columns: tuple[str, ...]) -> None:
    if not 1 <= len(columns) <= MOST_MODELS or len(set(columns)) != len(columns):
        raise ValueError(f"columns {', '.join(columns)}: 1 to {MOST_MODELS} different ones are needed")


def _same_number(columns: tuple[str, ...], models: int) -> None:
    if models != len(columns):
        raise ValueError(f"models {models}: the router was made for {len(columns)} ({', '.join(columns)})")


@functools.cache
def _decisions(task: str, columns: tuple[str, ...], policy: Policy) -> NDArray[np.int64]:
    return best(task, columns, per_cost=policy is Policy.ACCURACY_PER_COST)


def _transitions(task: str, columns: tuple[str, ...]) -> NDArray[np.float64]:
    """Probabilities of the next model, by the current one."""
    decisions = _decisions(task, columns, Policy.ACCURACY_PER_COST)
    counts = np.full((len(columns), len(columns)), 0.5)
    np.add.at(counts, (decisions[:-1], decisions[1:]), 1)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def _shift(matrix: NDArray[np.float64], by: float) -> NDArray[np.float64]:
    """The chain with the log-odds of leaving each model shifted."""
    weights = matrix * np.exp(by)
    np.fill_diagonal(weights, np.diag(matrix))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _stationary(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Long-run shares of the models; every entry of the matrix is above 0."""
    models = len(matrix)
    equations = np.vstack([matrix.T - np.eye(models), np.ones(models)])
    return np.asarray(np.linalg.lstsq(equations, np.append(np.zeros(models), 1.0))[0])


def _mean_switching(counted: dict[str, NDArray[np.float64]], shift: float) -> float:
    """Mean over the tasks of the probability that a step switches."""
    switching = []
    for matrix in counted.values():
        shifted = _shift(matrix, shift)
        switching.append(_stationary(shifted) @ (1 - np.diag(shifted)))
    return float(np.mean(switching))
