"""LLMRouter's score matrix: how well each of nine models answered each query of a benchmark, and at what price.

Four of the paper's models have a column of their own; for the others another model stands in.
"""

import csv
import functools
import importlib.resources
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

PARAMETERS_BILLIONS: Mapping[str, float] = {
    "codegemma-7b": 8.5,
    "gemma-2-9b-it": 9.2,
    "llama-3.1-8b-instruct": 8.0,
    "llama-3.1-nemotron-51b-instruct": 51.5,
    "llama-3.3-nemotron-super-49b-v1": 49.9,
    "llama3-chatqa-1.5-70b": 70.6,
    "llama3-chatqa-1.5-8b": 8.0,
    "mistral-7b-instruct-v0.3": 7.2,
    "qwen2.5-7b-instruct": 7.6,
}
"""The matrix's models, in the order of its columns. The size is what a token costs: the matrix names no prices."""
SCORED = tuple(PARAMETERS_BILLIONS)

_NEMOTRON_49B, _NEMOTRON_51B = "llama-3.3-nemotron-super-49b-v1", "llama-3.1-nemotron-51b-instruct"
_LARGE_49B = (_NEMOTRON_49B, _NEMOTRON_51B, "llama3-chatqa-1.5-70b")
_LARGE_51B = (_NEMOTRON_51B, _NEMOTRON_49B, "llama3-chatqa-1.5-70b")

STAND_INS: Mapping[str, tuple[str, ...]] = {
    # In the matrix themselves.
    "qwen2.5-7b-instruct": ("qwen2.5-7b-instruct",),
    "llama-3.1-8b-instruct": ("llama-3.1-8b-instruct",),
    "mistral-7b-instruct-v0.3": ("mistral-7b-instruct-v0.3",),
    "gemma-2-9b-it": ("gemma-2-9b-it",),
    # CodeGemma is Gemma-7B trained on code. The Nemotrons are pruned from these two Llamas.
    "gemma-7b": ("codegemma-7b",),
    "llama-3.1-70b-instruct": _LARGE_51B,
    "llama-3.3-70b-instruct": _LARGE_49B,
    # Another Qwen2.5 of the same size stands in for the one tuned on SWE-agent.
    "swe-agent-lm-7b": ("qwen2.5-7b-instruct",),
    # Of the small models the likeliest in size.
    "gpt-oss-20b": ("gemma-2-9b-it", "llama-3.1-8b-instruct"),
    "mistral-nemo-12b-instruct": ("gemma-2-9b-it", "mistral-7b-instruct-v0.3"),
    # Large models of other families.
    "gpt-oss-120b": _LARGE_51B,
    "qwen3-next-80b-a3b-instruct": _LARGE_51B,
    "mixtral-8x22b-instruct-v0.1": _LARGE_49B,
    "mixtral-8x7b-instruct-v0.1": _LARGE_49B,
    "gemma-2-27b-it": _LARGE_51B,
    "granite-34b-code-instruct": _LARGE_51B,
    "swe-agent-lm-32b": _LARGE_51B,
    "qwen2.5-72b-instruct": _LARGE_49B,
}
"""The paper's models (Tables 3 and 4, lower case) and the columns that may stand for them, best first."""


def stand_ins(models: Sequence[str]) -> tuple[str, ...]:
    """A column for each model, no two the same: a column's own model first, then the others in the order given.

    Names are those of `STAND_INS` or of columns, in any case. Raises ValueError for other names, and when no column is
    left for a model.
    """
    names = [model.lower() for model in models]
    for model, name in zip(models, names, strict=True):
        if name not in STAND_INS and name not in PARAMETERS_BILLIONS:
            raise ValueError(f"model {model!r} has no scores; known: {', '.join(sorted({*STAND_INS, *SCORED}))}")
    chosen: dict[int, str] = {}
    for own in (True, False):
        for i, name in enumerate(names):
            if (name in PARAMETERS_BILLIONS) != own:
                continue
            free = [column for column in STAND_INS.get(name, (name,)) if column not in chosen.values()]
            if not free:
                raise ValueError(f"model {models[i]!r}: its stand-ins are taken by the other models; leave one out")
            chosen[i] = free[0]
    return tuple(chosen[i] for i in range(len(names)))


@functools.cache
def scores() -> Mapping[str, NDArray[np.float64]]:
    """Per task an array of (queries, 9) scores, 0 to 1, in the source's order; columns as `SCORED`."""
    text = importlib.resources.files("pd_shadow.sim.workload").joinpath("data", "routing_scores.csv").read_text()
    by_task: dict[str, list[list[float]]] = defaultdict(list)
    for row in csv.DictReader(text.splitlines()):
        by_task[row["task"]].append([float(row[column]) for column in SCORED])
    return {task: np.array(rows) for task, rows in by_task.items()}


def accuracy(task: str, columns: Sequence[str], chosen: NDArray[np.int64]) -> float:
    """Mean score, 0 to 1, of answering each query of the task by the model chosen for it, an index into `columns`."""
    values = scores()[task][:, [SCORED.index(column) for column in columns]]
    return float(values[np.arange(len(values)), chosen].mean())


def best(task: str, columns: Sequence[str], *, per_cost: bool) -> NDArray[np.int64]:
    """For each query of the task the index into `columns` of the model to send it to.

    The one with the highest score (per cost, if so asked); among equals the cheapest. Raises ValueError for a task or a
    column that the matrix has not.
    """
    if task not in scores():
        raise ValueError(f"task {task!r} has no scores; known: {', '.join(sorted(scores()))}")
    for column in columns:
        if column not in PARAMETERS_BILLIONS:
            raise ValueError(f"column {column!r} is not in the score matrix; known: {', '.join(SCORED)}")
    costs = np.array([PARAMETERS_BILLIONS[column] for column in columns])
    values = scores()[task][:, [SCORED.index(column) for column in columns]]
    cheapest_first = np.argsort(costs, kind="stable")
    ranked = (values / costs if per_cost else values)[:, cheapest_first]
    return np.asarray(cheapest_first[np.argmax(ranked, axis=1)], dtype=np.int64)
