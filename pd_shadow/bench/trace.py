"""The plugin's own account of its iterations: its trace file, cut to the phases of a benchmark."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pd_shadow.bench.samples import Phase
from pd_shadow.engine.steps import StepRecord
from pd_shadow.policy.base import StepReason


def read(path: Path) -> list[StepRecord]:
    """The records of a trace file, in order. A last line that the engine did not finish is left out.

    Raises ValueError naming the line for any other that is no record, and OSError for a file that cannot be read.
    """
    lines = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            values = json.loads(line)
            record = StepRecord(**{field: values[field] for field in StepRecord._fields})
            records.append(record._replace(reason=StepReason(values["reason"])))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is no iteration of this version: {error!r}") from error
    return records


def during(records: Sequence[StepRecord], phases: Sequence[Phase]) -> list[StepRecord]:
    """The iterations that began within one of the phases; engine and benchmark read the same monotonic clock."""
    return [r for r in records if any(phase.opened <= r.at <= phase.closed for phase in phases)]


def figures(records: Sequence[StepRecord] | None) -> dict[str, Any]:
    """How iterations with shadow tokens kept their budget; all None where there is no trace.

    `over_budget_share`: of the iterations with shadow tokens, how many overran. `over_budget_seconds_mean`: by how
    much, over those that did. `steps_by_reason`: iterations in which shadow work ran or waited.
    """
    if records is None:
        return {"over_budget_share": None, "over_budget_seconds_mean": None, "steps_by_reason": None}
    carried = [record for record in records if record.shadow_tokens]
    over = [record.over for record in carried if record.over > 0]
    return {
        "over_budget_share": round(len(over) / len(carried), 6) if carried else None,
        "over_budget_seconds_mean": round(statistics.fmean(over), 6) if over else None,
        "steps_by_reason": dict(sorted(Counter(record.reason.value for record in records).items())),
    }
