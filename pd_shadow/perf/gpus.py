"""GPUs as the latency and energy models see them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuSpec:
    """One GPU and its links to the others of an instance. Peaks are the vendor's, dense bf16 and decimal units."""

    name: str
    flops: float
    # Bytes per second and bytes of HBM.
    bandwidth: float
    hbm_bytes: float
    # One all-reduce between tensor-parallel peers: a fixed time, and bytes per second on the ring.
    all_reduce_seconds: float
    all_reduce_bandwidth: float
    # Drawn while nothing runs, in decode-only and in compute-bound iterations.
    idle_watts: float
    decode_watts: float
    prefill_watts: float


H100 = GpuSpec(
    name="H100-80GB",
    # NVIDIA H100 SXM data sheet. 80 GB as 80e9 bytes: with the 85e9 a driver reports, Qwen3-Next-80B would fit four
    # GPUs by the paper's rule, which puts it on eight.
    flops=989e12,
    bandwidth=3.35e12,
    hbm_bytes=80e9,
    # Fitted to the kernel grid together with DENSE (kernels.py).
    all_reduce_seconds=3.9e-6,
    all_reduce_bandwidth=284e9,
    # splitwise-sim (MIT), configs/power_model/constant.yaml: constant watts per phase.
    idle_watts=75.0,
    decode_watts=380.0,
    prefill_watts=700.0,
)

H200 = GpuSpec(
    name="H200-141GB",
    # NVIDIA H200 SXM data sheet: the H100's arithmetic, NVLink and 700 W limit, more and faster HBM. All-reduce and
    # watts are therefore the H100's, assumed; nothing of it was fitted to measurements.
    flops=989e12,
    bandwidth=4.8e12,
    hbm_bytes=141e9,
    all_reduce_seconds=H100.all_reduce_seconds,
    all_reduce_bandwidth=H100.all_reduce_bandwidth,
    idle_watts=H100.idle_watts,
    decode_watts=H100.decode_watts,
    prefill_watts=H100.prefill_watts,
)
