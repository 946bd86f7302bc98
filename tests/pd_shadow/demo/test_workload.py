"""Sessions and normal traffic: deterministic, scaled to the window, with the data's switch decisions."""

import itertools
import statistics
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pd_shadow.demo import traffic
from pd_shadow.demo.demo import Plan
from pd_shadow.demo.models import LARGE, SMALL, ModelSpec, build
from pd_shadow.demo.workload import (
    CALLS_LIMITS,
    CHARACTERS_PER_TOKEN,
    CODING_TASKS,
    CONTEXT_CAP_TOKENS,
    FIRST_LIMITS_TOKENS,
    GAP_LIMITS_SECONDS,
    Session,
    build_sessions,
    prefers_large,
    routing_scores,
)


def test_one_seed_gives_one_workload() -> None:
    assert build_sessions(2, 7, "s", "l") == build_sessions(2, 7, "s", "l")
    assert build_sessions(2, 7, "s", "l") != build_sessions(2, 8, "s", "l")


def test_sessions_grow_within_the_window_and_switch() -> None:
    for session in build_sessions(12, 0, "s", "l"):
        assert len(session.steps) <= CALLS_LIMITS[1]
        assert {step.model for step in session.steps} <= {"s", "l"}
        tokens = sum(len(step.content) for step in session.steps) / CHARACTERS_PER_TOKEN
        assert FIRST_LIMITS_TOKENS[0] <= tokens < CONTEXT_CAP_TOKENS + 500
        assert all(GAP_LIMITS_SECONDS[0] <= step.gap_seconds <= GAP_LIMITS_SECONDS[1] for step in session.steps)


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=lambda spec: spec.name)
def test_every_context_fits_both_models(spec: ModelSpec, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(build(spec, tmp_path) / "tokenizer.json"))
    for seed in range(4):
        for session in build_sessions(6, seed, "s", "l"):
            text = "".join([session.system, *(step.content for step in session.steps)])
            # Templates and answers come on top.
            assert len(tokenizer.encode(text).ids) + len(session.steps) * 50 < spec.max_model_len


def test_the_cheaper_model_wins_ties_and_equal_quality() -> None:
    assert not prefers_large(0.0, 0.0)
    assert not prefers_large(1.0, 1.0)
    assert prefers_large(0.0, 1.0)


def test_the_shipped_scores_switch_as_the_data_does() -> None:
    pairs = [
        (prefers_large(*a), prefers_large(*b))
        for task in CODING_TASKS
        for a, b in itertools.pairwise(routing_scores()[task])
    ]
    assert 0.15 < sum(a != b for a, b in pairs) / len(pairs) < 0.36


def test_normal_traffic_is_poisson_and_capped() -> None:
    first = list(itertools.islice(traffic.requests(3, ["s", "l"], rate=0.5), 400))
    assert first == list(itertools.islice(traffic.requests(3, ["s", "l"], rate=0.5), 400))
    assert 320 < first[-1].at_seconds < 480
    assert {request.model for request in first} == {"s", "l"}
    assert max(request.max_tokens for request in first) <= traffic.OUTPUT_CAP_TOKENS
    limit = traffic.PROMPT_CAP_TOKENS * CHARACTERS_PER_TOKEN + 100
    assert max(len(request.prompt) for request in first) <= limit


def test_the_default_sessions_resemble_the_workload_at_large() -> None:
    ours = _shape(build_sessions(Plan().sessions, Plan().seed, "s", "l"))
    at_large = _shape([session for seed in range(100, 130) for session in build_sessions(4, seed, "s", "l")])
    for mine, expected in zip(ours, at_large, strict=True):
        assert 0.75 < mine / expected < 1.25


def _shape(sessions: list[Session]) -> tuple[float, float]:
    """Switches per call, and the median of tokens a switch finds uncovered without shadow."""
    uncovered = []
    for session in sessions:
        context, held, previous = 0.0, dict.fromkeys("sl", 0.0), ""
        for step in session.steps:
            context += len(step.content) / CHARACTERS_PER_TOKEN
            if previous not in ("", step.model):
                uncovered.append(context - held[step.model])
            held[step.model], previous = context, step.model
    return len(uncovered) / sum(len(session.steps) for session in sessions), statistics.median(uncovered)
