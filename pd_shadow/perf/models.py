"""The models of the paper's Tables 3 and 4, and its 22 simulated pairs."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pd_shadow.perf.gpus import H100, GpuSpec

TENSOR_PARALLEL_DEGREES = (1, 2, 4, 8)
MEMORY_UTILIZATION = 0.9
"""Share of HBM for weights and KV together; vLLM's default."""
BF16_BITS = 16.0
MXFP4_BITS = 4.25
"""Four bits per weight and an eight-bit scale for every 32 (OCP microscaling format)."""


@dataclass(frozen=True)
class ModelSpec:
    """What latency, memory and price of a model depend on. Architecture as in its published config.json."""

    name: str
    # As in the paper's figures.
    label: str
    # All weights, embeddings included: what memory holds.
    parameters: float
    # Weights of the layers alone, all of them and those one token passes through: what GEMMs read and multiply.
    layer_parameters: float
    active_layer_parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    # Tokens, with the extension its makers document (YaRN for Qwen2.5). The paper runs longer contexts than this on
    # Gemma, Granite, Mistral-7B and Mixtral; who simulates those decides.
    context_window: int
    experts: int = 1
    experts_per_token: int = 1
    expert_bits: float = BF16_BITS
    # Layers that attend to the whole context, where not all do. The others (a window of 128 tokens in GPT-OSS, linear
    # attention in Qwen3-Next) cost about the same at any length and are taken to hold and read no KV.
    full_attention_layers: int | None = None

    @property
    def attention_layers(self) -> int:
        return self.layers if self.full_attention_layers is None else self.full_attention_layers

    @property
    def expert_parameters(self) -> float:
        """Weights of one expert, over all layers; 0 in a dense model."""
        idle = self.experts - self.experts_per_token
        return (self.layer_parameters - self.active_layer_parameters) / idle if idle else 0.0

    @property
    def shared_layer_parameters(self) -> float:
        """Layer weights every token passes through."""
        return self.active_layer_parameters - self.experts_per_token * self.expert_parameters

    @property
    def weight_bytes(self) -> float:
        """All weights: bf16, and experts at their own width."""
        routed = self.experts * self.expert_parameters
        return ((self.parameters - routed) * BF16_BITS + routed * self.expert_bits) / 8

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in bf16, over all GPUs, without copies."""
        return 2 * 2 * self.attention_layers * self.kv_heads * self.head_dim

    def tensor_parallel(self, gpu: GpuSpec = H100) -> int:
        """The smallest degree at which weights take at most half of HBM (paper appendix B).

        Raises ValueError where even the largest does not suffice.
        """
        for degree in TENSOR_PARALLEL_DEGREES:
            if self.weight_bytes <= degree * gpu.hbm_bytes / 2:
                return degree
        raise ValueError(
            f"{self.name}: {self.weight_bytes / 1e9:.0f} GB of weights fill more than half the HBM of "
            f"{TENSOR_PARALLEL_DEGREES[-1]} {gpu.name}; state tensor_parallel"
        )

    def kv_shards(self, tensor_parallel: int) -> int:
        """GPUs among which KV is split: beyond one KV head each, GPUs hold copies."""
        return min(tensor_parallel, self.kv_heads)

    def kv_capacity_tokens(self, gpu: GpuSpec = H100, tensor_parallel: int | None = None) -> int:
        """Tokens of KV one instance holds: what weights leave of the usable HBM.

        Raises ValueError if they leave nothing.
        """
        degree = tensor_parallel or self.tensor_parallel(gpu)
        free = MEMORY_UTILIZATION * gpu.hbm_bytes - self.weight_bytes / degree
        if free <= 0:
            raise ValueError(
                f"tensor_parallel={degree}: the weights of {self.name} leave no room for KV on {gpu.name}; raise it"
            )
        return int(free * self.kv_shards(degree) / self.kv_bytes_per_token)


_QWEN_7B = ModelSpec(
    "Qwen2.5-7B-Instruct", "Q2.5-7B", 7.616e9, 6.525e9, 6.525e9, 28, 3584, 28, 4, 128, 152_064, 131_072
)  # fmt: skip
_LLAMA_70B = ModelSpec(
    "Llama-3.1-70B-Instruct", "L3.1-70B", 70.55e9, 68.45e9, 68.45e9, 80, 8192, 64, 8, 128, 128_256, 131_072
)  # fmt: skip

_ALL = (
    _QWEN_7B,
    ModelSpec("Llama-3.1-8B-Instruct", "L3.1-8B", 8.03e9, 6.98e9, 6.98e9, 32, 4096, 32, 8, 128, 128_256, 131_072),
    ModelSpec("Mistral-7B-Instruct-v0.3", "M-7B", 7.248e9, 6.98e9, 6.98e9, 32, 4096, 32, 8, 128, 32_768, 32_768),
    ModelSpec(
        "Mistral-Nemo-12B-Instruct", "Nemo-12B", 12.25e9, 10.91e9, 10.91e9, 40, 5120, 32, 8, 128, 131_072, 131_072
    ),
    ModelSpec("Gemma-7B", "G-7B", 8.538e9, 7.751e9, 7.751e9, 28, 3072, 16, 16, 256, 256_000, 8192),
    # Every second layer of Gemma 2 has a window of 4,096 tokens; like the grid, this takes all for full attention.
    ModelSpec("Gemma-2-9B-IT", "G2-9B", 9.242e9, 8.324e9, 8.324e9, 42, 3584, 16, 8, 256, 256_000, 8192),
    ModelSpec("Gemma-2-27B-IT", "G2-27B", 27.23e9, 26.05e9, 26.05e9, 46, 4608, 32, 16, 128, 256_000, 8192),
    ModelSpec(
        "Granite-34B-Code-Instruct", "Granite-34B", 33.71e9, 33.36e9, 33.36e9, 88, 6144, 48, 1, 128, 49_152, 8192
    ),
    _LLAMA_70B,
    ModelSpec(
        "Llama-3.3-70B-Instruct", "L3.3-70B", 70.55e9, 68.45e9, 68.45e9, 80, 8192, 64, 8, 128, 128_256, 131_072
    ),
    ModelSpec(
        "Mixtral-8x7B-Instruct-v0.1", "Mx-8x7B", 46.70e9, 46.44e9, 12.62e9, 32, 4096, 32, 8, 128, 32_000, 32_768,
        experts=8, experts_per_token=2,
    ),
    ModelSpec(
        "Mixtral-8x22B-Instruct-v0.1", "Mx-8x22B", 140.6e9, 140.2e9, 38.76e9, 56, 6144, 48, 8, 128, 32_768, 65_536,
        experts=8, experts_per_token=2,
    ),
    ModelSpec(
        "GPT-OSS-20B", "OSS-20B", 20.91e9, 19.75e9, 3.03e9, 24, 2880, 64, 8, 64, 201_088, 131_072,
        experts=32, experts_per_token=4, expert_bits=MXFP4_BITS, full_attention_layers=12,
    ),
    ModelSpec(
        "GPT-OSS-120B", "OSS-120B", 116.8e9, 115.6e9, 4.55e9, 36, 2880, 64, 8, 64, 201_088, 131_072,
        experts=128, experts_per_token=4, expert_bits=MXFP4_BITS, full_attention_layers=18,
    ),
    # Totals from the paper's Table 3, less the embeddings; a shared expert counts as always active.
    ModelSpec(
        "Qwen3-Next-80B-A3B-Instruct", "Q3N-80B", 81.3e9, 80.7e9, 3.5e9, 48, 2048, 16, 2, 256, 151_936, 262_144,
        experts=512, experts_per_token=10, full_attention_layers=12,
    ),
    # Testbed only (Table 4). The two SWE-agent-LM models are fine-tuned from Qwen2.5-Coder of the same size.
    ModelSpec("SWE-agent-LM-7B", "S7", 7.616e9, 6.525e9, 6.525e9, 28, 3584, 28, 4, 128, 152_064, 131_072),
    ModelSpec("SWE-agent-LM-32B", "S32", 32.76e9, 31.21e9, 31.21e9, 64, 5120, 40, 8, 128, 152_064, 131_072),
    ModelSpec("Qwen2.5-72B-Instruct", "Q72", 72.71e9, 70.21e9, 70.21e9, 80, 8192, 64, 8, 128, 152_064, 131_072),
)  # fmt: skip

MODELS: Mapping[str, ModelSpec] = {model.name: model for model in _ALL}
"""By full name."""

_BY_ANY_NAME: Mapping[str, ModelSpec] = {
    **MODELS,
    **{model.label: model for model in _ALL},
    # The testbed's labels of models that are simulated too.
    "Q7": _QWEN_7B,
    "L8": MODELS["Llama-3.1-8B-Instruct"],
    "L70": _LLAMA_70B,
}


def model(name: str) -> ModelSpec:
    """The model of that full name or figure label. Raises ValueError with the nearest valid one."""
    found = _BY_ANY_NAME.get(name)
    if found is None:
        raise ValueError(_unknown("model", name, _BY_ANY_NAME, MODELS))
    return found


class Trace(StrEnum):
    """Where a pair's agent sessions come from (paper Table 3)."""

    XROUTEBENCH = "xRouteBench"
    FUSIONBENCH = "FusionBench"
    ROUTER_R1 = "Router-R1"
    GHCP_CODING = "GHCP-coding"


class ModelPair(NamedTuple):
    """Two models a router chooses between; small and large by total parameters."""

    trace: Trace
    small: ModelSpec
    large: ModelSpec

    @property
    def label(self) -> str:
        """As in the paper's figures; the same pair may stand under several traces."""
        return f"{self.small.label} / {self.large.label}"


_PAIR_LABELS: Mapping[Trace, tuple[str, ...]] = {
    Trace.XROUTEBENCH: (
        "OSS-20B / OSS-120B",
        "OSS-20B / L3.3-70B",
        "L3.3-70B / OSS-120B",
        "Q2.5-7B / L3.3-70B",
        "Q2.5-7B / Q3N-80B",
    ),
    Trace.FUSIONBENCH: (
        "L3.1-8B / L3.1-70B",
        "L3.1-8B / Nemo-12B",
        "M-7B / L3.1-70B",
        "M-7B / Mx-8x22B",
        "Q2.5-7B / L3.1-70B",
    ),
    Trace.ROUTER_R1: (
        "L3.1-70B / Mx-8x22B",
        "L3.1-8B / L3.1-70B",
        "M-7B / G2-27B",
        "M-7B / L3.1-70B",
        "Q2.5-7B / L3.1-70B",
        "Q2.5-7B / Mx-8x22B",
    ),
    Trace.GHCP_CODING: (
        "G2-9B / Granite-34B",
        "G2-9B / Mx-8x7B",
        "G-7B / Mx-8x7B",
        "L3.1-8B / L3.1-70B",
        "M-7B / Mx-8x22B",
        "Q2.5-7B / L3.1-70B",
    ),
}

PAIRS: tuple[ModelPair, ...] = tuple(
    ModelPair(trace, *(model(part) for part in label.split(" / ")))
    for trace, labels in _PAIR_LABELS.items()
    for label in labels
)
"""The 22 simulated pairs, in the order of Table 3."""


def pair(trace: Trace | str, label: str) -> ModelPair:
    """The pair of that trace and figure label. Raises ValueError with the nearest valid one."""
    if trace not in list(Trace):
        raise ValueError(_unknown("trace", trace, list(Trace), list(Trace)))
    of_trace = {one.label: one for one in PAIRS if one.trace == trace}
    if label not in of_trace:
        raise ValueError(f"{trace}: {_unknown('pair', label, of_trace, of_trace)}")
    return of_trace[label]


def _unknown(what: str, name: str, known: Iterable[str], valid: Iterable[str]) -> str:
    """With the nearest of all `known` names; `valid` are the ones worth listing."""
    nearest = difflib.get_close_matches(name, [str(one) for one in known], n=1, cutoff=0.0)[0]
    return f"unknown {what} {name!r}; did you mean {nearest!r}? Valid: {', '.join(valid)}"
