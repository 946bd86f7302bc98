"""The stepped engine itself: repeatable, cached prefixes, aborts, and scenarios that fail."""

from dataclasses import asdict
from typing import Any

import pytest

from tests.pd_shadow.engine.vllm.stepping import BLOCK_SIZE, SteppedEngine, in_fresh_process, prompt

pytestmark = pytest.mark.engine


def one_prompt_three_times() -> dict[str, Any]:
    engine = SteppedEngine()
    blocks = engine.free_blocks
    context = prompt(1, 10 * BLOCK_SIZE + 5)
    first, second = engine.run(context, "first", 4), engine.run(context, "second", 4)
    other = engine.run(context, "other", 4, cache_salt="another tenant")
    engine.add(context, "aborted", 100)
    engine.step()
    engine.abort("aborted")
    engine.drain()
    seen = {
        "first": asdict(first), "second": asdict(second), "other": asdict(other),
        "aborted": engine.answers["aborted"].finish_reason,
        "computed": {name: engine.computed_tokens(name) for name in engine.answers},
        "steps of first": [step["first"] for step in engine.steps if "first" in step],
        "blocks back": engine.free_blocks == blocks,
    }  # fmt: skip
    engine.shutdown()
    return seen


def fails() -> None:
    raise ValueError("on purpose")


def test_steps_are_seen_and_a_second_run_finds_the_prefix() -> None:
    seen = in_fresh_process(one_prompt_three_times)
    assert seen["first"]["finish_reason"] == "length"
    assert seen["first"]["token_ids"] == seen["second"]["token_ids"] == seen["other"]["token_ids"]
    assert [seen[name]["cached_tokens"] for name in ("first", "second", "other")] == [0, 10 * BLOCK_SIZE, 0]
    # 325 prompt tokens at up to 256 an iteration, then one token each for the second to fourth.
    assert seen["steps of first"] == [256, 69, 1, 1, 1]
    assert seen["computed"]["second"] == 5 + 3
    assert seen["aborted"] == "abort"
    assert seen["blocks back"]


def test_a_failing_scenario_fails_its_test_and_shows_why() -> None:
    with pytest.raises(AssertionError, match="ValueError: on purpose"):
        in_fresh_process(fails)
