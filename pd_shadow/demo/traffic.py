"""Normal background traffic: Poisson arrivals, real conversation lengths, no session id."""

import csv
import functools
import importlib.resources
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pd_shadow.demo.models import stdlib_sources
from pd_shadow.demo.workload import CHARACTERS_PER_TOKEN

PROMPT_CAP_TOKENS = 1200
OUTPUT_CAP_TOKENS = 32
REQUESTS_PER_SECOND = 0.15
"""Per model. Two cores hold sixteen processes here; more would measure the queue, not the shadow."""


@dataclass(frozen=True)
class NormalRequest:
    """One request at `at_seconds` after the start of the run."""

    number: int
    at_seconds: float
    model: str
    prompt: str
    max_tokens: int


def requests(seed: int, models: Sequence[str], rate: float = REQUESTS_PER_SECOND) -> Iterator[NormalRequest]:
    """Endless arrivals over all `models`, `rate` requests per second for each, the same for one seed."""
    rng = random.Random(f"{seed}/normal")
    files = stdlib_sources()
    lengths = conversation_lengths()
    now = 0.0
    number = 0
    while True:
        now += rng.expovariate(rate * len(models))
        prompt, output = rng.choice(lengths)
        text = rng.choice(files).read_text(encoding="utf-8", errors="replace")
        characters = int(min(prompt, PROMPT_CAP_TOKENS) * CHARACTERS_PER_TOKEN)
        question = f"Question {number}. Explain:\n{text[:characters]}"
        yield NormalRequest(number, now, rng.choice(list(models)), question, max(2, min(output, OUTPUT_CAP_TOKENS)))
        number += 1


@functools.cache
def conversation_lengths() -> tuple[tuple[int, int], ...]:
    """(prompt, generated) tokens of real requests."""
    data = importlib.resources.files("pd_shadow.demo").joinpath("data", "conversation_lengths.csv").read_text()
    return tuple((int(row["prompt_tokens"]), int(row["generated_tokens"])) for row in csv.DictReader(data.splitlines()))
