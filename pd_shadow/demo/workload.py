"""Agent sessions to replay: which model each call goes to, what is appended before it, how long the tool took.

Everything follows from the seed. The shape is the paper's coding workload (GHCP-coding: lengths fitted to its Table 1,
switch decisions from the coding tasks), every length divided by eight: a window of 16,384 tokens stands for 131,072,
and a first prompt of about 6,900 for 55,000. Tool gaps (log-normal, median 2 s) are the paper's, not scaled.
"""

import csv
import functools
import importlib.resources
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pd_shadow.demo.models import stdlib_sources

CHARACTERS_PER_TOKEN = 3.7
"""Of standard library source, in the demo's tokenizers."""
PRICE_RATIO = 7.0
"""Cost of a large-model token in small-model tokens: the two models' parameter counts, 49B to 7B."""
SCALE = 8
"""Lengths below are the fitted ones divided by this."""
FIRST_MEDIAN_TOKENS, FIRST_SIGMA = 55_000 / SCALE, 0.8
FIRST_LIMITS_TOKENS = (2_000, 9_000)
TOOL_MEDIAN_TOKENS, TOOL_SIGMA = 650 / SCALE, 1.4
INPUT_MEDIAN_TOKENS, INPUT_SIGMA = 300 / SCALE, 0.8
STEP_CAP_TOKENS = 1_500
CONTEXT_CAP_TOKENS = 13_500
"""A session ends before it outgrows the window; the paper compacts its history there."""
MEAN_CALLS = 7.7
CALLS_LIMITS = (3, 16)
CODING_TASKS = ("human_eval", "mbpp")
GAP_MEDIAN_SECONDS = 2.0
GAP_SIGMA = 0.6
GAP_LIMITS_SECONDS = (0.5, 8.0)


@dataclass(frozen=True)
class Step:
    """One call: wait `gap_seconds` after the previous answer, append `content` as the next message, ask `model`."""

    model: str
    content: str
    gap_seconds: float


@dataclass(frozen=True)
class Session:
    """One agent's task. `system` is its first message."""

    name: str
    task: str
    system: str
    steps: tuple[Step, ...]

    @property
    def switches(self) -> int:
        return sum(a.model != b.model for a, b in zip(self.steps, self.steps[1:], strict=False))


def build_sessions(count: int, seed: int, small: str, large: str, stretch: float = 1.0) -> list[Session]:
    """`count` sessions over the models named `small` and `large`; all lengths times `stretch`.

    Each takes consecutive queries of one coding task and sends every query to the model with the higher score per cost.
    Sessions that stay on one model are passed over: they would show nothing here.
    """
    scores = routing_scores()
    sessions = []
    for index in range(count):
        rng = random.Random(f"{seed}/session/{index}")
        task, decisions = _decisions(scores, rng)
        text = _Source(rng)
        steps: list[Step] = []
        context = 0.0
        for large_wins in decisions:
            tokens = stretch * (_step_tokens(rng) if steps else _first_tokens(rng))
            context += tokens
            if context > stretch * CONTEXT_CAP_TOKENS:
                break
            gap = rng.lognormvariate(math.log(GAP_MEDIAN_SECONDS), GAP_SIGMA)
            low, high = GAP_LIMITS_SECONDS
            steps.append(
                Step(
                    model=large if large_wins else small,
                    content=text.read(int(tokens * CHARACTERS_PER_TOKEN)),
                    gap_seconds=min(max(gap, low), high),
                )
            )
        system = f"You are agent {index} of run {seed}, working on {task}. Read the tool output and name the next step."
        sessions.append(Session(f"agent-{seed}-{index}", task, system, tuple(steps)))
    return sessions


@functools.cache
def routing_scores() -> dict[str, tuple[tuple[float, float], ...]]:
    """Per task, the (small, large) score of each query in the data's order."""
    by_task: dict[str, list[tuple[float, float]]] = defaultdict(list)
    data = importlib.resources.files("pd_shadow.demo").joinpath("data", "routing_scores.csv").read_text()
    for row in csv.DictReader(data.splitlines()):
        by_task[row["task"]].append((float(row["small"]), float(row["large"])))
    return {task: tuple(rows) for task, rows in by_task.items()}


def prefers_large(small_score: float, large_score: float) -> bool:
    """Whether the large model has the higher score per cost; ties go to the cheaper one."""
    return large_score / PRICE_RATIO > small_score


def _decisions(scores: dict[str, tuple[tuple[float, float], ...]], rng: random.Random) -> tuple[str, Sequence[bool]]:
    low, high = CALLS_LIMITS
    while True:
        task = rng.choice(CODING_TASKS)
        calls = min(max(low, math.ceil(math.log(1 - rng.random()) / math.log(1 - 1 / MEAN_CALLS))), high)
        start = rng.randrange(len(scores[task]) - calls)
        decisions = [prefers_large(*pair) for pair in scores[task][start : start + calls]]
        if len(set(decisions)) > 1:
            return task, decisions


def _first_tokens(rng: random.Random) -> float:
    low, high = FIRST_LIMITS_TOKENS
    return min(max(low, rng.lognormvariate(math.log(FIRST_MEDIAN_TOKENS), FIRST_SIGMA)), high)


def _step_tokens(rng: random.Random) -> float:
    tool = rng.lognormvariate(math.log(TOOL_MEDIAN_TOKENS), TOOL_SIGMA)
    return min(tool + rng.lognormvariate(math.log(INPUT_MEDIAN_TOKENS), INPUT_SIGMA), STEP_CAP_TOKENS)


class _Source:
    """Reads on through standard library modules in a random order, as tool outputs."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._files = stdlib_sources()
        self._rest = ""

    def read(self, characters: int) -> str:
        parts = ["Tool output:\n"]
        while characters > 0:
            if not self._rest:
                path = self._rng.choice(self._files)
                self._rest = path.read_text(encoding="utf-8", errors="replace")
                parts.append(f"$ cat {path.name}\n")
            part, self._rest = self._rest[:characters], self._rest[characters:]
            parts.append(part)
            characters -= len(part)
        return "".join(parts)
