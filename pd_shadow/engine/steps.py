"""What every iteration carried and how long it took, predicted and real."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import IO, NamedTuple

from pd_shadow.engine.jobs import LegEnd
from pd_shadow.engine.tags import LegKind
from pd_shadow.policy.base import StepReason


class StepRecord(NamedTuple):
    """One iteration in which shadow work ran or waited. Times in seconds."""

    # Monotonic time of its start.
    at: float
    reason: StepReason
    # How long it was allowed to last; 0 where no shadow tokens were granted.
    budget: float
    shadow_tokens: int
    normal_tokens: int
    predicted: float
    real: float

    @property
    def over(self) -> float:
        """By how much it overran its budget."""
        return max(0.0, self.real - self.budget) if self.shadow_tokens else 0.0


class StepLog:
    """Counts over the engine's life, and the trace file if one is wanted."""

    def __init__(self, trace_file: Path | None = None) -> None:
        self.steps: Counter[StepReason] = Counter()
        self.legs: Counter[tuple[LegKind, LegEnd]] = Counter()
        self.shadow_tokens = 0
        self.shadow_steps = 0
        self.predicted_seconds = 0.0
        self.real_seconds = 0.0
        self.over_budget_steps = 0
        self.over_budget_seconds = 0.0
        self.released_jobs = 0
        self.evicted_blocks = 0
        self.last: StepRecord | None = None
        self._trace: IO[str] | None = trace_file.open("a", buffering=1) if trace_file else None

    def add(self, record: StepRecord) -> None:
        self.last = record
        self.steps[record.reason] += 1
        if record.shadow_tokens:
            self.shadow_steps += 1
            self.shadow_tokens += record.shadow_tokens
            self.predicted_seconds += record.predicted
            self.real_seconds += record.real
            self.over_budget_steps += record.over > 0
            self.over_budget_seconds += record.over
        if self._trace is not None:
            self._trace.write(json.dumps({**record._asdict(), "reason": record.reason.value, "over": record.over}))
            self._trace.write("\n")

    def close(self) -> None:
        """Flush the trace file."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
