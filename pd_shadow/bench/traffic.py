"""What the engines are asked: normal requests at seeded times, and contexts to shadow. Prompts are token ids.

All are random tokens, so that no two prompts share a block and nothing is found cached by accident.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pd_shadow.demo.models import ModelSpec

PROMPT_TOKENS = (128, 512)
"""Shortest and longest prompt of a normal request."""
OUTPUT_TOKENS = 24
ROUTED_OUTPUT_TOKENS = (128, 384)
"""Routed calls generate for longer: what is measured of them is their decode iterations."""
LEG_TOKENS = 4096
CONTEXT_TOKENS = 2 * LEG_TOKENS
"""About 8,000 tokens in whole legs, so that every engine computes the same of them."""


@dataclass(frozen=True)
class Request:
    """A normal request, `at` seconds after the start of its phase."""

    at: float
    prompt: list[int]
    output_tokens: int
    routed: bool = False
    cache_salt: str = ""


@dataclass(frozen=True)
class Context:
    """A session's context, to be shadowed in growing prefixes."""

    session: str
    prompt: list[int]

    def prefixes(self) -> Iterator[list[int]]:
        """The prompts of its legs."""
        for end in range(LEG_TOKENS, len(self.prompt) + 1, LEG_TOKENS):
            yield self.prompt[:end]


class Traffic:
    """Everything follows from the seed: equal arguments give equal requests, in every mode."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._tokens = range(len(spec.special_tokens), spec.vocab_size)
        self._seed = seed

    def arrivals(self, part: str, seconds: float, rate: float) -> list[Request]:
        """Poisson arrivals at `rate` requests per second for so many seconds; other parts get other requests."""
        rng = self._rng(part)
        requests = []
        now = rng.expovariate(rate)
        while now < seconds:
            requests.append(Request(now, self._prompt(rng, rng.randint(*PROMPT_TOKENS)), OUTPUT_TOKENS))
            now += rng.expovariate(rate)
        return requests

    def routed(self, count: int, cache_salt: str) -> list[Request]:
        """Routed calls, to be sent as earlier ones end. The same for every salt, which keeps their KV apart."""
        rng = self._rng("routed")
        return [
            Request(
                0.0,
                self._prompt(rng, rng.randint(*PROMPT_TOKENS)),
                rng.randint(*ROUTED_OUTPUT_TOKENS),
                True,
                cache_salt,
            )
            for _ in range(count)
        ]

    def request(self, name: str, prompt_tokens: int, output_tokens: int) -> Request:
        """One request of given lengths."""
        return Request(0.0, self._prompt(self._rng(name), prompt_tokens), output_tokens)

    def contexts(self) -> Iterator[Context]:
        """Endless sessions to shadow."""
        number = 0
        while True:
            session = f"shadow-{number}"
            yield Context(session, self._prompt(self._rng(session), CONTEXT_TOKENS))
            number += 1

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    def _prompt(self, rng: random.Random, tokens: int) -> list[int]:
        return rng.choices(self._tokens, k=tokens)
