"""What moving KV costs on this machine: two processes, chunks of real models' KV, and the machine's own limits.

Measures with `transfer.bench`, which knows neither models nor reports.
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_shadow.bench import transfer_report
from pd_shadow.perf import models
from transfer.bench import contention, drills
from transfer.bench.row import Row
from transfer.bench.sweep import Case, default_cases, run_case
from transfer.bench.ucx_log import UcxLog
from transfer.chunks import CHUNK_TOKENS
from transfer.layouts import KvLayout
from transfer.transport.base import Operation

BLOCK_TOKENS = (16, 128)
"""vLLM's blocks on GPUs and on CPUs."""
MODELS = ("Llama-3.1-8B-Instruct", "Qwen2.5-7B-Instruct")
CHUNK_BYTES_MOST = 2**31 - 2**20
"""What the kernel copies in one call."""
MEMORY_SHARE = 0.7


@dataclass(frozen=True)
class Sweep:
    """Every combination of these is a row. Raises ValueError naming the option.

    `block_bytes`, where given, is the size of one block in one layer, instead of the model's. A run length of 0 stands
    for blocks that all lie side by side; `layers` cuts the model down.
    """

    models: Sequence[str] = MODELS[:1]
    block_tokens: Sequence[int] = BLOCK_TOKENS[:1]
    block_bytes: int | None = None
    layers: int | None = None
    layouts: Sequence[str] = ("plane-major",)
    directions: Sequence[str] = ("write",)
    backends: Sequence[str] = ("ucx",)
    chunk_tokens: Sequence[int] = (CHUNK_TOKENS,)
    concurrency: Sequence[int] = (1,)
    run_lengths: Sequence[int] = (1,)

    def cases(self) -> list[Case]:
        for tokens, chunk in itertools.product(self.block_tokens, self.chunk_tokens):
            if chunk % tokens:
                raise ValueError(f"--chunk-tokens: {chunk} are no whole blocks of {tokens} tokens; take a multiple")
        return [
            Case(
                kv_layout(model, tokens, self.block_bytes, self.layers),
                run,
                chunk,
                Operation[direction.upper()],
                layout == "block-major",
                backend == "tcp",
                at_once,
                model,
            )
            for model, tokens, layout, direction, backend, chunk, at_once, run in itertools.product(
                self.models, self.block_tokens, self.layouts, self.directions, self.backends, self.chunk_tokens,
                self.concurrency, self.run_lengths,
            )
        ]  # fmt: skip


def kv_layout(model: str, block_tokens: int, block_bytes: int | None = None, layers: int | None = None) -> KvLayout:
    """A model's KV in bfloat16 as one rank holds it: a plane per layer, K beside V.

    Raises ValueError for a model that is not in the catalogue and for sizes that do not fit it.
    """
    spec = models.model(model)
    planes = spec.attention_layers if layers is None else layers
    if not 1 <= planes <= spec.attention_layers:
        raise ValueError(f"--layers: {planes} is not in 1…{spec.attention_layers}, the layers of {spec.name} with KV")
    if block_bytes is None:
        return KvLayout(planes, spec.kv_heads, 2 * 2 * spec.head_dim, block_tokens)
    if block_bytes < 1 or block_bytes % block_tokens:
        raise ValueError(f"--block-bytes: {block_bytes} are no whole bytes for each of {block_tokens} tokens")
    return KvLayout(planes, 1, block_bytes // block_tokens, block_tokens)


def usual_cases(
    chosen: Sequence[str] = MODELS, chunk_tokens: int = CHUNK_TOKENS, layers: int | None = None
) -> list[Case]:
    """Both block sizes, from coalesced to scattered, a read, and TCP."""
    layouts = {(model, tokens): kv_layout(model, tokens, layers=layers) for model in chosen for tokens in BLOCK_TOKENS}
    return list(default_cases(layouts, chunk_tokens))


@dataclass(frozen=True)
class Plan:
    """What is measured. `contention_transfers` are per side, without and with shadow chunks; 0 leaves the part out."""

    cases: Sequence[Case] = field(default_factory=usual_cases)
    repeats: int = 10
    warm_up: int = 1
    seed: int = 1
    drills: bool = False
    contention_transfers: int = 0

    def check(self, available_bytes: int) -> None:
        """Raises ValueError, naming the option to change, where a case does not fit into memory or into one call."""
        for case in self.cases:
            size = case.chunk_tokens * case.layout.block_bytes // case.layout.block_tokens
            if size > CHUNK_BYTES_MOST:
                raise ValueError(f"--chunk-tokens: a chunk of {size / 1e9:.1f} GB is too large; lower it, or --layers")
            # On both sides.
            needed = 2 * case.shape.bytes
            if needed > MEMORY_SHARE * available_bytes:
                raise ValueError(
                    f"--chunk-tokens: {case.chunk_tokens} tokens of {case.model}, {case.concurrency} at a time, need "
                    f"{needed / 1e9:.1f} GB of memory and {available_bytes / 1e9:.1f} GB are free; lower it, "
                    "--concurrency or --layers"
                )


def available_bytes() -> int:
    """Memory that can be used without swapping; all there is where the kernel does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe(case: Case) -> str:
    """A case in the words of the options."""
    run = "coalesced" if case.run_blocks in (0, case.blocks) else f"runs of {case.run_blocks}"
    backend, direction = "tcp" if case.tcp else "ucx", case.operation.value.lower()
    return f"{case.model or 'KV'}, blocks of {case.layout.block_tokens}, {run}, {direction}, {backend}"


Step = Callable[[str], None]
"""Told what begins."""


def steps(plan: Plan) -> int:
    return len(plan.cases) + len(_DRILLS) * plan.drills + bool(plan.contention_transfers)


_DRILLS: Mapping[str, Callable[[], drills.Drill]] = {
    "peer killed": drills.peer_killed,
    "peer hung": drills.peer_hung,
    "release in flight": drills.release_in_flight,
    "restart under the same name": drills.restart_same_name,
}


def run(plan: Plan, on_step: Step) -> dict[str, Any]:
    """Measure and return the figures. Raises TransportError when something does not arrive, OSError, TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="pd-shadow-ucx-") as folder:
        log = UcxLog(Path(folder))
        rows = list(_rows(plan, log, on_step))
    crossed: contention.Contention | None = None
    if plan.contention_transfers:
        on_step("normal transfers without and with shadow chunks")
        crossed = contention.run(plan.contention_transfers)
    drilled = []
    for name, drill in _DRILLS.items() if plan.drills else ():
        on_step(f"drill: {name}")
        drilled.append(drill())
    return transfer_report.build(rows, crossed, drilled, plan.seed)


def _rows(plan: Plan, log: UcxLog, on_step: Step) -> Iterator[Row]:
    for case in plan.cases:
        on_step(describe(case))
        yield run_case(case, plan.repeats, plan.seed, warm_up=plan.warm_up, log=log)
