"""Agent sessions to replay: which model each call goes to, what is appended before it, how long the tool took.

Everything follows from the seed. Scale: a session starts near 2,800 tokens and ends near 10,500 of a 16,384-token
window, because two cores prefill some thousand tokens a second; coding agents on GPUs work at 50K and more. Calls per
session (12), switch decisions and tool gaps (log-normal, median 2 s) are the paper's.
"""

import csv
import functools
import importlib.resources
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pd_shadow.demo.models import stdlib_sources

CHARACTERS_PER_TOKEN = 3.7
"""Of standard library source, in the demo's tokenizers."""
PRICE_RATIO = 7.0
"""Cost of a large-model token in small-model tokens: the two models' parameter counts, 49B to 7B."""
CALLS_PER_SESSION = 12
START_TOKENS = 2800
STEP_MEDIAN_TOKENS = 620
STEP_SIGMA = 0.45
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


def build_sessions(
    count: int, seed: int, small: str, large: str, calls: int = CALLS_PER_SESSION, start_tokens: int = START_TOKENS
) -> list[Session]:
    """`count` sessions over the models named `small` and `large`.

    Each takes `calls` consecutive queries of one benchmark task and sends every query to the model with the higher
    score per cost. Windows without any switch are passed over: they would show nothing here, at the price of a switch
    rate somewhat above the data's own.
    """
    scores = routing_scores()
    sessions = []
    for index in range(count):
        rng = random.Random(f"{seed}/session/{index}")
        task, decisions = _decisions(scores, rng, calls)
        text = _Source(rng)
        steps = []
        for number, large_wins in enumerate(decisions):
            tokens = start_tokens if number == 0 else rng.lognormvariate(0, STEP_SIGMA) * STEP_MEDIAN_TOKENS
            gap = rng.lognormvariate(0, GAP_SIGMA) * GAP_MEDIAN_SECONDS
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


def _decisions(
    scores: dict[str, tuple[tuple[float, float], ...]], rng: random.Random, calls: int
) -> tuple[str, Sequence[bool]]:
    tasks = sorted(scores)
    while True:
        task = rng.choice(tasks)
        start = rng.randrange(len(scores[task]) - calls)
        decisions = [prefers_large(*pair) for pair in scores[task][start : start + calls]]
        if len(set(decisions)) > 1:
            return task, decisions


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
