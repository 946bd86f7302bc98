"""How close to its peaks a GPU runs the kernels of a model: the constants of the latency model.

Fitted by `tools/fit_latency.py` to a grid of iterations composed from H100 kernels that NVIDIA measured under vLLM
(aiconfigurator-core 0.12.0, Apache-2.0).
"""

from typing import NamedTuple

from pd_shadow.perf.models import ModelSpec


class Kernels(NamedTuple):
    """Shares of peak, and fixed times."""

    # Of peak FLOPS, and of peak bandwidth, in GEMMs that are long enough for either.
    gemm: float
    weight_read: float
    # Of peak FLOPS, and of peak bandwidth.
    prefill_attention: float
    decode_attention: float
    # Per layer: of every iteration, of every iteration with decodes, of every decoding sequence.
    layer_seconds: float = 0.0
    decode_layer_seconds: float = 0.0
    decode_sequence_seconds: float = 3.7e-8


DENSE = Kernels(gemm=0.701, weight_read=0.690, prefill_attention=0.667, decode_attention=0.913)
# Sixteen KV heads of 256: attention kernels of that shape are slow, and their decode kernel takes 0.2 ms however short
# the context is.
GEMMA_7B = DENSE._replace(gemm=0.535, prefill_attention=0.509, decode_layer_seconds=1.97e-4)
# Routing, sorting and the second kernel launch are the time per layer.
MOE = Kernels(gemm=0.522, weight_read=0.698, prefill_attention=0.636, decode_attention=1.0, layer_seconds=3.1e-5)
# More, smaller experts take longer to route to and get fewer tokens each, so their GEMMs are less efficient. Set by
# hand on four points of each GPT-OSS model from the same source (prompts of 2,048 and 64,512 tokens, 1 and 64 decodes
# at 1,024).
GPT_OSS_20B = MOE._replace(gemm=0.48, layer_seconds=6.3e-5)
GPT_OSS_120B = MOE._replace(gemm=0.36, weight_read=0.8, layer_seconds=6.3e-5)
MANY_EXPERTS = 128


def kernels_of(model: ModelSpec) -> Kernels:
    """The constants that fit a model; where the grid lacks it, those of the nearest kind."""
    if model.name == "Gemma-7B":
        return GEMMA_7B
    if model.name == "GPT-OSS-20B":
        return GPT_OSS_20B
    # Qwen3-Next-80B, of which nothing was measured, has a chunk's tokens per expert in common with GPT-OSS-120B.
    if model.experts >= MANY_EXPERTS:
        return GPT_OSS_120B
    return MOE if model.experts > 1 else DENSE
