"""Iterations whose time NVIDIA's measured H100 kernels add up to; data/README.md says where they are from."""

import csv
from pathlib import Path
from typing import NamedTuple

from pd_shadow.perf.models import ModelSpec, model
from pd_shadow.perf.online import StepWork

PATH = Path(__file__).parent / "data" / "h100_vllm_grid.csv"


class Measured(NamedTuple):
    model: ModelSpec
    tensor_parallel: int
    work: StepWork
    seconds: float


def rows() -> list[Measured]:
    """All 1,008 of them."""
    with PATH.open() as lines:
        return [_measured(row) for row in csv.DictReader(lines)]


def _measured(row: dict[str, str]) -> Measured:
    decodes = int(row["decodes"])
    work = StepWork(decodes=decodes, decode_kv_tokens=decodes * int(row["context_tokens"]))
    work = work.with_prefill(int(row["prefill_tokens"]), int(row["cached_tokens"]))
    return Measured(model(row["model"]), int(row["tensor_parallel"]), work, float(row["milliseconds"]) / 1e3)
