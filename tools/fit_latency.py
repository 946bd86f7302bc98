"""Print the constants of the latency model, fitted anew. `kernels`: to the grid the tests hold it to, for
pd_shadow/perf/kernels.py and gpus.py; `overhead`: what slowdown and constant make of the testbed's capacities.

Run with PYTHONPATH=. from the repository's root.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pd_shadow.perf.gpus import H100
from pd_shadow.perf.kernels import DENSE, GEMMA_7B, MOE, Kernels
from pd_shadow.perf.latency import IterationLatency
from pd_shadow.perf.models import MODELS
from tests.pd_shadow.perf import capacity
from tests.pd_shadow.perf.grid import Measured, rows

ALL_REDUCE = ("all_reduce_seconds", "all_reduce_bandwidth")
ROUNDS = 25


def log_errors(measured: Sequence[Measured], start: Kernels, values: dict[str, float]) -> np.ndarray:
    """ln(predicted / measured), shape [rows]."""
    gpu = replace(
        H100,
        all_reduce_seconds=values.get("all_reduce_seconds", H100.all_reduce_seconds),
        all_reduce_bandwidth=values.get("all_reduce_bandwidth", H100.all_reduce_bandwidth),
    )
    kernels = start._replace(**{name: value for name, value in values.items() if name not in ALL_REDUCE})
    latencies = {
        row.model.name: IterationLatency(row.model, gpu, row.tensor_parallel, slowdown=1, kernels=kernels)
        for row in measured
    }
    return np.log([latencies[row.model.name].seconds(row.work) / row.seconds for row in measured])


def fit(measured: Sequence[Measured], start: Kernels, free: Sequence[str]) -> dict[str, float]:
    """Least squares on log errors: Levenberg-Marquardt steps in the logarithms of the constants."""
    values = {name: getattr(H100 if name in ALL_REDUCE else start, name) for name in free}
    errors, damping = log_errors(measured, start, values), 1e-3
    for _ in range(ROUNDS):
        step = 1e-3
        jacobian = np.column_stack(
            [
                (log_errors(measured, start, {**values, name: value * math.exp(step)}) - errors) / step
                for name, value in values.items()
            ]
        )
        normal = jacobian.T @ jacobian + damping * np.eye(len(values))
        move = np.clip(np.linalg.solve(normal, -jacobian.T @ errors), -0.5, 0.5)
        moved = {name: value * math.exp(by) for (name, value), by in zip(values.items(), move, strict=True)}
        after = log_errors(measured, start, moved)
        if after @ after < errors @ errors:
            values, errors, damping = moved, after, damping / 3
        else:
            damping *= 5
    return values


def fit_kernels() -> None:
    grid = rows()
    gemma = [row for row in grid if row.model.name == "Gemma-7B"]
    moe = [row for row in grid if row.model.experts > 1]
    dense = [row for row in grid if row.model.experts == 1 and row.model.name != "Gemma-7B"]
    efficiencies = ("gemm", "weight_read", "prefill_attention")
    for title, measured, start, free in (
        ("DENSE", dense, DENSE, (*efficiencies, "decode_attention", "decode_sequence_seconds", *ALL_REDUCE)),
        # Decode attention of Mixtral comes out above the peak; it stays at 1.
        ("MOE", moe, MOE, (*efficiencies, "layer_seconds")),
        ("GEMMA_7B", gemma, GEMMA_7B, ("gemm", "prefill_attention", "decode_layer_seconds")),
    ):
        values = fit(measured, start, free)
        error = np.abs(np.expm1(log_errors(measured, start, values))).mean()
        constants = ", ".join(f"{name}={value:.3g}" for name, value in values.items())
        print(f"{title}: {constants}; mean error {error:.1%}")


def fit_overhead() -> None:
    names = list(capacity.TESTBED_REQUESTS_PER_SECOND)
    print("our capacity / the testbed's:", ", ".join(names))
    for slowdown, overhead in ((1, 0), (1, 1e-3), (1, 3e-3), (1.3, 0), (1.34, 0), (1.38, 0), (1.42, 0), (1.34, 2e-3)):
        ratios = [
            capacity.capacity(IterationLatency(MODELS[name], slowdown=slowdown, overhead_seconds=overhead)) / testbed
            for name, testbed in capacity.TESTBED_REQUESTS_PER_SECOND.items()
        ]
        spread = math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))
        listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"slowdown {slowdown} + {overhead * 1e3:.0f} ms: {listed}; rms of logarithms {spread:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kernels", "overhead"))
    {"kernels": fit_kernels, "overhead": fit_overhead}[parser.parse_args().what]()
