"""Results as files: one per run, named by what was run, so that an interrupted experiment goes on where it stopped."""

import gzip
import hashlib
import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pd_shadow.sim.config import RunConfig
from pd_shadow.sim.engine import Usage
from pd_shadow.sim.feeder import Normal
from pd_shadow.sim.sessions import CallRecord
from pd_shadow.sim.simulation import InstanceUsage, RunResult

FORMAT = 1
"""Raised whenever an older result no longer means the same."""


def key(config: RunConfig) -> str:
    """Names a run: equal configurations have equal keys."""
    return hashlib.sha256(f"{FORMAT} {config.model_dump_json()}".encode()).hexdigest()[:24]


def path(folder: Path, config: RunConfig) -> Path:
    """Where the result of a run is kept."""
    return folder / f"{key(config)}.json.gz"


def save(folder: Path, result: RunResult) -> None:
    """Write a result; a crash leaves either all of it or nothing."""
    target = path(folder, result.config)
    part = target.with_suffix(".part")
    with gzip.open(part, "wt", compresslevel=1) as file:
        json.dump(_as_data(result), file)
    part.rename(target)


def load(folder: Path, config: RunConfig) -> RunResult | None:
    """A result saved earlier; None if there is none, or it cannot be read."""
    try:
        with gzip.open(path(folder, config), "rt") as file:
            return _from_data(json.load(file))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        return None


def _as_data(result: RunResult) -> dict[str, Any]:
    columns = list(zip(*result.calls, strict=True)) or [() for _ in CallRecord._fields]
    return {
        **{name: getattr(result, name) for name in _PLAIN},
        "config": result.config.model_dump(mode="json"),
        "calls": dict(zip(CallRecord._fields, columns, strict=True)),
        "normal": asdict(result.normal),
        "instances": [asdict(instance) for instance in result.instances],
    }


def _from_data(data: dict[str, Any]) -> RunResult:
    columns = [data["calls"][name] for name in CallRecord._fields]
    return RunResult(
        **{name: data[name] for name in _PLAIN},
        config=RunConfig.model_validate(data["config"]),
        calls=[CallRecord(*row) for row in zip(*columns, strict=True)],
        normal=Normal(**data["normal"]),
        instances=[
            InstanceUsage(instance["name"], instance["gpus"], Usage(**instance["usage"]))
            for instance in data["instances"]
        ],
    )


_PLAIN = (
    "good_calls", "lasted", "events", "overloaded", "normal_link_bytes", "shadow_link_bytes",
)  # fmt: skip
