"""The models of the emulated demo: the pair of the paper's testbed that its introduction is about, on H100s."""

from pd_shadow.common.config import Config
from pd_shadow.perf import models
from pd_shadow.perf.gpus import H100

STRETCH = 4.0
"""Lengths of the workload, which is the paper's divided by eight: here by two."""
SPEED = 3.0
"""Tool gaps, iterations and transfers pass this much faster than they are: the demo fits into a minute and a half. What
is measured is told in emulated time, in which what this machine needs for HTTP and JSON is as much longer."""
CONCURRENT_SESSIONS = 4
BLOCK_SIZE = 64
"""Hashing shorter blocks would take a machine without GPUs longer than all else it does here."""
REQUESTS_PER_SECOND = 0.5
"""Normal traffic per model, in emulated time."""


class EmulatedModel(Config):
    """A model of the catalogue on GPUs of one instance."""

    name: str
    gpu: str
    tensor_parallel: int
    kv_bytes_per_token: int
    kv_tokens: int


def _named(label: str) -> EmulatedModel:
    spec = models.model(label)
    return EmulatedModel(
        name=spec.name,
        gpu=H100.name,
        tensor_parallel=spec.tensor_parallel(H100),
        kv_bytes_per_token=spec.kv_bytes_per_token,
        kv_tokens=spec.kv_capacity_tokens(H100),
    )


SMALL = _named("L8")
LARGE = _named("L70")
