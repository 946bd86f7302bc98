"""Which prefill instance takes a call: the lowest estimated prefill completion, counting uncached tokens only.

Paper section 3.1: a call therefore lands on the instance that holds its prefix, unless that instance is so busy that a
cold prefill elsewhere would finish first.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """One instance that could take the call."""

    name: str
    # Normal prompt tokens placed on the instance and not computed yet.
    pending_tokens: int
    tokens_per_second: float
    # Tokens of this call's prompt that the instance is expected to hold.
    warm_tokens: int
    # Sessions bound to the instance; spreads sessions when nothing else tells instances apart.
    sessions: int
    # Normal calls on the instance: tells colocated ones apart that decode and have nothing left to compute.
    calls: int = 0


class Choice(NamedTuple):
    name: str
    completion_seconds: float
    uncached_tokens: int


def completion_seconds(candidate: Candidate, prompt_tokens: int) -> float:
    """Estimated seconds until the prompt is computed, work already placed included."""
    uncached = max(0, prompt_tokens - candidate.warm_tokens)
    return (candidate.pending_tokens + uncached) / candidate.tokens_per_second


def choose(candidates: Sequence[Candidate], prompt_tokens: int, sticky: str | None = None) -> Choice:
    """Pick an instance; ties go to the sticky one, then to the fewest calls, the fewest sessions, and by name.

    Raises ValueError without candidates.
    """
    if not candidates:
        raise ValueError("no candidate instance")
    seconds = [completion_seconds(candidate, prompt_tokens) for candidate in candidates]
    least = min(seconds)
    tied = [candidate for candidate, its in zip(candidates, seconds, strict=True) if its == least]
    best = tied[0] if len(tied) == 1 else min(tied, key=lambda c: (c.name != sticky, c.calls, c.sessions, c.name))
    return Choice(best.name, least, max(0, prompt_tokens - min(best.warm_tokens, prompt_tokens)))
