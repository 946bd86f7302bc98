"""The plugin's trace, cut to phases and summed up."""

import json
from pathlib import Path

import pytest

from pd_shadow.bench import trace
from pd_shadow.bench.samples import Phase
from pd_shadow.engine.steps import StepLog, StepRecord
from pd_shadow.policy.base import StepReason


def step(at: float, real: float, shadow_tokens: int = 256, reason: StepReason = StepReason.IDLE) -> StepRecord:
    return StepRecord(at, reason, 0.05 if shadow_tokens else 0.0, shadow_tokens, 4, 0.04, real)


def test_what_the_engine_writes_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    records = [step(1.0, 0.04), step(2.0, 0.06, reason=StepReason.SLACK), step(3.0, 0.01, 0, StepReason.WAITING)]
    log = StepLog(file)
    for record in records:
        log.add(record)
    log.close()
    assert trace.read(file) == records


def test_an_unfinished_last_line_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = json.dumps({**step(1.0, 0.04)._asdict(), "reason": "idle"})
    file.write_text(f"{line}\n{line[:30]}")
    assert len(trace.read(file)) == 1
    file.write_text(f"{line[:30]}\n{line}\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl: line 1 is no iteration"):
        trace.read(file)
    file.write_text('{"at": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        trace.read(file)


def test_only_iterations_of_the_phases_count() -> None:
    records = [step(at, 0.04) for at in (0.5, 1.5, 2.5, 3.5)]
    assert [r.at for r in trace.during(records, [Phase(1.0, 2.0), Phase(3.0, 4.0)])] == [1.5, 3.5]


def test_overruns_are_of_iterations_that_carried_shadow_tokens() -> None:
    records = [step(1, 0.04), step(2, 0.06), step(3, 0.08), step(4, 0.05), step(5, 9.0, 0, StepReason.WAITING)]
    assert trace.figures(records) == {
        "over_budget_share": 0.5,
        "over_budget_seconds_mean": pytest.approx(0.02),
        "steps_by_reason": {"idle": 4, "waiting": 1},
    }


def test_without_a_trace_or_shadow_tokens_there_are_no_figures() -> None:
    assert set(trace.figures(None).values()) == {None}
    nothing = trace.figures([step(1, 9.0, 0, StepReason.WAITING)])
    assert (nothing["over_budget_share"], nothing["over_budget_seconds_mean"]) == (None, None)
