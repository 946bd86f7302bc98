"""What an emulated engine says on /metrics, under vLLM's names as far as the product and its dashboards read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from pd_shadow.engine.emulated.block_pool import HASH_ALGORITHM
from pd_shadow.engine.settings import Role

if TYPE_CHECKING:
    from pd_shadow.engine.emulated.engine import Engine


class EngineCollector(Collector):
    """Reads the instance at every scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, config = self._engine, self._engine.config
        counts = engine.instance.counts
        now = engine.instance.snapshot(engine.clock.now())
        label = {"model_name": config.served_name, "engine": "0"}
        for name, text, value in (
            ("num_requests_running", "Requests in iterations.", now.running),
            ("num_requests_waiting", "Requests that wait, for room or for their KV.", now.waiting),
            ("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", now.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(label))
            gauge.add_metric(list(label.values()), value)
            yield gauge
        cache = {
            "block_size": str(config.block_size),
            "prefix_caching_hash_algo": HASH_ALGORITHM,
            "num_gpu_blocks": str(config.blocks),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV pool.", labels=[*label, *cache])
        info.add_metric([*label.values(), *cache.values()], 1.0)
        yield info
        for name, text, key in (
            ("prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
            ("generation_tokens", "Tokens generated.", "generated_tokens"),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
            ("prefix_cache_hits", "Prompt tokens found in it.", "prefix_hits"),
        ):
            yield _counter(name, text, label, counts[key])
        if config.role is not Role.COLOCATED:
            yield _counter("nixl_num_failed_transfers", "KV that did not come.", label, counts["failed_transfers"])
            expired = engine.instance.exports.expired
            yield _counter("nixl_num_kv_expired_reqs", "Handed-out KV that nobody read.", label, expired)
            moved = SummaryMetricFamily("vllm:nixl_bytes_transferred", "Bytes of KV per transfer.", labels=list(label))
            moved.add_metric(list(label.values()), counts["transfers"], counts["transferred_bytes"])
            yield moved
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start of the engine, in seconds since the epoch.", engine.started_at
        )


def page(engine: Engine) -> bytes:
    """The text exposition."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine))
    return generate_latest(registry)


def _counter(name: str, text: str, label: dict[str, str], value: float) -> CounterMetricFamily:
    counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(label))
    counter.add_metric(list(label.values()), value)
    return counter
