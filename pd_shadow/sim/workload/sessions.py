"""Agent sessions whose context grows from call to call, and the models a router gives their calls."""

import math
from typing import NamedTuple

import numpy as np

from pd_shadow.sim.workload.base import Call, Session
from pd_shadow.sim.workload.distributions import whole_tokens
from pd_shadow.sim.workload.profiles import SessionProfile
from pd_shadow.sim.workload.routers import Router

WINDOW_TOKENS = 131_072
"""The paper runs every model with its workloads' contexts, Gemma-7B (8K window) on GHCP-coding too."""
SUMMARY_TOKENS = 1_000
"""What a compaction leaves of the history (paper section 4)."""
LEAST_WINDOW_TOKENS = 4_096


class Step(NamedTuple):
    """A call that no model has been chosen for; its fields are those of `Call`."""

    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    gap_seconds: float


class UnroutedSession(NamedTuple):
    """A session before routing. `task` is what routers know it by."""

    task: str
    arrival: float
    steps: tuple[Step, ...]


def generate_sessions(
    profile: SessionProfile,
    router: Router,
    models: int,
    arrivals_per_second: float,
    seconds: float,
    rng: np.random.Generator,
    window: int = WINDOW_TOKENS,
) -> list[Session]:
    """Sessions that arrive in `seconds` as a Poisson process, routed over `models` models.

    `window` is the smallest context window, in tokens, that is to apply. From equal generators come equal steps and
    arrivals, whatever the router.

    Raises ValueError for arguments out of range, and as the router does.
    """
    unrouted = generate_unrouted(profile, arrivals_per_second, seconds, rng, window)
    return [assign(session, router, models, rng) for session in unrouted]


def generate_unrouted(
    profile: SessionProfile,
    arrivals_per_second: float,
    seconds: float,
    rng: np.random.Generator,
    window: int = WINDOW_TOKENS,
) -> list[UnroutedSession]:
    """Sessions as `generate_sessions` has them, before routing."""
    for name, value in (("arrivals_per_second", arrivals_per_second), ("seconds", seconds)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} {value}: must be a finite number, at least 0")
    if window < LEAST_WINDOW_TOKENS:
        raise ValueError(f"window {window}: must be at least {LEAST_WINDOW_TOKENS} tokens")
    arrivals = np.sort(rng.random(rng.poisson(arrivals_per_second * seconds))) * seconds
    return [_session(profile, arrival, window, rng) for arrival in arrivals.tolist()]


def assign(session: UnroutedSession, router: Router, models: int, rng: np.random.Generator) -> Session:
    """The session with a model for each of its calls.

    Raises ValueError as the router does.
    """
    chosen = router.route(session.task, len(session.steps), models, rng)
    calls = tuple(Call(model, *step) for model, step in zip(chosen, session.steps, strict=True))
    return Session(session.task, session.arrival, calls)


def _session(profile: SessionProfile, arrival: float, window: int, rng: np.random.Generator) -> UnroutedSession:
    task = profile.tasks[int(rng.integers(len(profile.tasks)))]
    count = min(math.ceil(profile.calls.draw(rng, 1)[0]), profile.most_calls)
    sigma = profile.step_scale_sigma
    scale = math.exp(sigma * rng.standard_normal() - sigma**2 / 2)
    # An output, and an input after a compaction, always fit.
    outputs = whole_tokens(profile.output.draw(rng, count), window // 4).tolist()
    inputs = whole_tokens(scale * profile.input.draw(rng, count), window // 4).tolist()
    tools = whole_tokens(scale * profile.tool.draw(rng, count), window).tolist()
    gaps = profile.gap.draw(rng, count).tolist()

    first = inputs[0] if profile.first is None else int(whole_tokens(profile.first.draw(rng, 1), window)[0])
    steps = [Step(min(first, window - outputs[0]), 0, outputs[0], 0.0)]
    for i in range(1, count):
        history = steps[-1].prompt_tokens + steps[-1].output_tokens
        prompt = history + tools[i] + inputs[i]
        shared = history
        if prompt + outputs[i] > window:
            # The summary replaces the history from its first token on: nothing of it survives at the front.
            prompt, shared = SUMMARY_TOKENS + inputs[i], 0
        steps.append(Step(prompt, shared, outputs[i], gaps[i]))
    return UnroutedSession(task, arrival, tuple(steps))
