"""What a stock vLLM says on /metrics, as far as the controller needs it."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_CACHE_CONFIG = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_WANTED = (_RUNNING, _WAITING, _KV_USAGE, _CACHE_CONFIG, _STARTED)
# Only engines with a NIXL connector have these.
_FAILED_TRANSFERS = "vllm:nixl_num_failed_transfers_total"
_EXPIRED_EXPORTS = "vllm:nixl_num_kv_expired_reqs_total"


class VllmMetrics(NamedTuple):
    """One look. Sums over the engines behind one server; `kv_usage` is their maximum, 0 to 1.

    `failed_transfers` (D) and `expired_exports` (P) count since the engine started.
    """

    process_start: str
    running: int
    waiting: int
    kv_usage: float
    block_size: int
    hash_algorithm: str
    failed_transfers: int
    expired_exports: int


def parse(text: str) -> VllmMetrics:
    """Read the exposition text; raises ValueError, naming the metric, when one is missing.

    Only the wanted lines are parsed: the whole page is hundreds of histogram buckets, and this runs again and again.
    """
    lines = [line for line in text.splitlines() if line.startswith((*_WANTED, _FAILED_TRANSFERS, _EXPIRED_EXPORTS))]
    values: dict[str, list[float]] = {}
    cache: dict[str, str] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == _CACHE_CONFIG:
                cache = sample.labels
    for name in _WANTED:
        if name not in values:
            raise ValueError(f"metric {name} is missing; is this a vLLM server?")
    block_size = cache.get("block_size", "")
    if not block_size.isdigit():
        raise ValueError(f"{_CACHE_CONFIG} has no numeric block_size: {block_size!r}")
    return VllmMetrics(
        process_start=f"{values[_STARTED][0]:.2f}",
        running=int(sum(values[_RUNNING])),
        waiting=int(sum(values[_WAITING])),
        kv_usage=max(values[_KV_USAGE]),
        block_size=int(block_size),
        hash_algorithm=cache.get("prefix_caching_hash_algo", ""),
        failed_transfers=int(sum(values.get(_FAILED_TRANSFERS, []))),
        expired_exports=int(sum(values.get(_EXPIRED_EXPORTS, []))),
    )
