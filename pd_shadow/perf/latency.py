"""How long an iteration takes on a given GPU: the form of the paper's appendix B with constants fitted to kernels."""

from math import hypot

from pd_shadow.perf.gpus import H100, GpuSpec
from pd_shadow.perf.kernels import Kernels, kernels_of
from pd_shadow.perf.models import TENSOR_PARALLEL_DEGREES, ModelSpec
from pd_shadow.perf.online import StepWork

SLOWDOWN = 1.34
"""How much longer serving takes than its kernels: an instance of this model then reaches the capacities of the paper's
testbed (appendix D.1) within 7 %, with other random
arrivals within 11 % (`tools/fit_latency.py overhead`).

A factor, because a constant cannot: the SLOs are multiples of batch-1 decode time on the same instance, so a constant
loosens them as fast as it slows the instance. Kernels and host are not told apart by this, nor is it known what the
testbed's clocks, settings and tested rates were; 1 is the sum of the kernels.
"""
BF16_BYTES = 2
PREFILL_CHUNK_TOKENS = 2048
"""Default token budget of an iteration (paper section 4)."""


class IterationLatency:
    """Seconds per iteration of one instance; immutable.

    Appendix B takes the longer of a GEMM's arithmetic and its weight reads; the root of their squares' sum is the same
    far from the knee and closer to the kernels at it. Prefill attention is arithmetic (its KV reads, shared by the
    tokens of a chunk, hide behind it), decode attention KV reads and a time per sequence. Tensor parallelism splits
    all of that and adds two all-reduces per layer. Of MoE weights, those of the experts that the tokens are expected
    to touch are read. The logits of every decode and of one prefill chunk are computed.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec = H100,
        tensor_parallel: int | None = None,
        *,
        overhead_seconds: float = 0.0,
        slowdown: float = SLOWDOWN,
        kernels: Kernels | None = None,
    ) -> None:
        """By default the model's own degree (`ModelSpec.tensor_parallel`) and kernels.

        `slowdown` multiplies the time of all kernels, `overhead_seconds` comes on top in every iteration. Raises
        ValueError for a degree other than 1, 2, 4, 8, for negative overhead and for a slowdown that is not positive.
        """
        degree = model.tensor_parallel(gpu) if tensor_parallel is None else tensor_parallel
        if degree not in TENSOR_PARALLEL_DEGREES:
            raise ValueError(f"tensor_parallel={degree}: must be one of {', '.join(map(str, TENSOR_PARALLEL_DEGREES))}")
        if overhead_seconds < 0:
            raise ValueError(f"overhead_seconds={overhead_seconds}: must not be negative")
        if slowdown <= 0:
            raise ValueError(f"slowdown={slowdown}: must be positive; 1 leaves kernels as fast as they are")
        kernels = kernels or kernels_of(model)
        self.model = model
        self.gpu = gpu
        self.tensor_parallel = degree
        peak_flops, peak_bandwidth = gpu.flops / slowdown, gpu.bandwidth / slowdown
        flops = degree * peak_flops * kernels.gemm
        read = degree * peak_bandwidth * kernels.weight_read
        self._gemm_token = 2 * model.active_layer_parameters / flops
        self._shared_read = BF16_BYTES * model.shared_layer_parameters / read
        self._experts_read = model.experts * model.expert_parameters * model.expert_bits / 8 / read
        # Share of the experts that one token does not touch.
        self._missed = 1 - model.experts_per_token / model.experts
        logits = model.vocabulary * model.hidden
        self._logits_sequence = 2 * logits / flops
        self._logits_read = BF16_BYTES * logits / read
        heads = model.heads * model.head_dim * model.attention_layers
        self._pair = 4 * heads / (degree * peak_flops * kernels.prefill_attention)
        kv_bandwidth = model.kv_shards(degree) * peak_bandwidth * kernels.decode_attention
        self._kv_token = model.kv_bytes_per_token / kv_bandwidth
        layers = slowdown * model.layers
        self._decode = kernels.decode_sequence_seconds * layers
        self._decode_start = kernels.decode_layer_seconds * layers
        self._fixed = overhead_seconds + kernels.layer_seconds * layers
        self._token = 0.0
        if degree > 1:
            self._fixed += 2 * layers * gpu.all_reduce_seconds
            ring_bytes = 2 * (degree - 1) / degree * model.hidden * BF16_BYTES
            self._token = 2 * layers * ring_bytes / gpu.all_reduce_bandwidth

    def seconds(self, work: StepWork) -> float:
        """Seconds of one iteration; 0 for one without work. Does not fall as work grows."""
        prefill_tokens, pairs, decodes, kv_tokens = work
        tokens = prefill_tokens + decodes
        if not tokens:
            return 0.0
        read = self._shared_read
        if self._experts_read:
            read += self._experts_read * (1 - self._missed**tokens)
        sequences = decodes + 1 if prefill_tokens else decodes
        total = (
            self._fixed
            + hypot(self._gemm_token * tokens, read)
            + hypot(self._logits_sequence * sequences, self._logits_read)
            + self._token * tokens
            + self._pair * pairs
        )
        if decodes:
            total += self._decode_start + self._decode * decodes + self._kv_token * kv_tokens
        return total

    def decode_run(self, decodes: int, kv_tokens: int, iterations: int) -> float:
        """Seconds of so many decode-only iterations in a row.

        `kv_tokens`: what the sequences attend to in the first of them, together; each grows by one per iteration.
        """
        if not decodes or not iterations:
            return 0.0
        grown = decodes * (iterations * (iterations - 1) // 2)
        return iterations * self.seconds(StepWork(0, 0.0, decodes, kv_tokens)) + self._kv_token * grown

    def isolated_prefill_seconds(self, prompt_tokens: int, chunk: int = PREFILL_CHUNK_TOKENS) -> float:
        """Seconds to prefill a prompt, nothing cached, in chunks on an instance that does nothing else."""
        whole, rest = divmod(prompt_tokens, chunk)
        total = whole * self.seconds(StepWork(chunk)) + self.seconds(StepWork(rest))
        return total + self._pair * prompt_tokens * prompt_tokens / 2

    def decode_seconds(self, context_tokens: int) -> float:
        """Seconds to decode one token of a single sequence of that length."""
        return self.seconds(StepWork(0, 0.0, 1, context_tokens))

    def compute_bound_fraction(self, work: StepWork) -> float:
        """Share of the iteration, 0 to 1, in which arithmetic is what it waits for.

        That is prefill attention, and of GEMMs what they take beyond reading their weights.
        """
        total = self.seconds(work)
        if not total:
            return 0.0
        read = self._layer_read(work.tokens)
        return (self._pair * work.prefill_pairs + hypot(self._gemm_token * work.tokens, read) - read) / total

    def memory_bound(self, work: StepWork) -> bool:
        """Whether the iteration only decodes, and reads weights and KV for longer than it computes."""
        if work.prefill_tokens or not work.decodes:
            return False
        reads = self._layer_read(work.decodes) + self._kv_token * work.decode_kv_tokens
        return reads >= self._gemm_token * work.decodes

    def _layer_read(self, tokens: int) -> float:
        """Seconds to read the weights of all layers that so many tokens touch."""
        return self._shared_read + self._experts_read * (1 - self._missed**tokens)
