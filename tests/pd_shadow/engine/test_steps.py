"""The step log: its counts, and the lines of the trace file."""

import json
from pathlib import Path

import pytest

from pd_shadow.engine.steps import StepLog, StepRecord
from pd_shadow.policy.base import StepReason

IDLE = StepRecord(10.0, StepReason.IDLE, 0.05, 256, 0, 0.04, 0.06)
SLACK = StepRecord(11.0, StepReason.SLACK, 0.05, 100, 12, 0.05, 0.04)
WAITING = StepRecord(12.0, StepReason.WAITING, 0.0, 0, 300, 0.02, 0.5)


def test_only_steps_that_carry_shadow_tokens_can_overrun() -> None:
    assert [record.over for record in (IDLE, SLACK, WAITING)] == [pytest.approx(0.01), 0.0, 0.0]


def test_counts() -> None:
    log = StepLog()
    for record in (IDLE, SLACK, WAITING, WAITING):
        log.add(record)
    assert log.steps == {StepReason.IDLE: 1, StepReason.SLACK: 1, StepReason.WAITING: 2}
    assert (log.shadow_steps, log.shadow_tokens, log.over_budget_steps) == (2, 356, 1)
    assert log.over_budget_seconds == pytest.approx(0.01)
    assert log.last is WAITING


def test_the_trace_is_one_json_object_per_line(tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    log = StepLog(trace)
    log.add(IDLE)
    log.add(WAITING)
    log.close()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert lines == [
        {
            "at": 10.0, "reason": "idle", "budget": 0.05, "shadow_tokens": 256, "normal_tokens": 0, "predicted": 0.04,
            "real": 0.06, "over": pytest.approx(0.01),
        },
        {
            "at": 12.0, "reason": "waiting", "budget": 0.0, "shadow_tokens": 0, "normal_tokens": 300,
            "predicted": 0.02, "real": 0.5, "over": 0.0,
        },
    ]  # fmt: skip


def test_a_trace_goes_on_where_an_earlier_run_ended(tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    for record in (IDLE, SLACK):
        log = StepLog(trace)
        log.add(record)
        log.close()
    assert [json.loads(line)["reason"] for line in trace.read_text().splitlines()] == ["idle", "slack"]


def test_a_closed_log_still_counts(tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    log = StepLog(trace)
    log.close()
    log.close()
    log.add(IDLE)
    assert log.shadow_steps == 1
    assert trace.read_text() == ""
