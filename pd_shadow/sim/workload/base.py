"""The requests of a run, as plain values: times in seconds, lengths in tokens."""

from typing import NamedTuple


class NormalRequest(NamedTuple):
    """A request outside every routed session."""

    arrival: float  # seconds from the start of the run
    prompt_tokens: int
    output_tokens: int  # at least 1
    # Requests of one context extend each other: the first `shared_tokens` of this prompt are the beginning of what
    # the context's last request left (prompt and output). None: nothing to reuse, ever.
    context: int | None = None
    shared_tokens: int = 0


class Call(NamedTuple):
    """One LLM call of a session."""

    model: int  # index into the models of the run
    prompt_tokens: int  # the whole prompt
    # Longest common prefix with the previous call's prompt + output; 0 on the first call; after a compaction of the
    # history only what survives at the front.
    shared_tokens: int
    output_tokens: int  # at least 1
    gap_seconds: float  # tool time between the previous call's end and this call's arrival; 0 on the first


class Session(NamedTuple):
    """An agent's calls, in order: each arrives `gap_seconds` after the one before it has ended."""

    task: str
    arrival: float  # of its first call
    calls: tuple[Call, ...]
