"""Prometheus metrics of the plugin: per reason and leg, never per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from pd_shadow.common.address import split_address
from pd_shadow.engine.snapshot import EngineSnapshot
from pd_shadow.engine.steps import StepLog

PREFIX = "pd_shadow_engine_"


class PluginCollector(Collector):
    """Reads the log and the last snapshot at every scrape, so that no number is kept twice."""

    def __init__(self, log: StepLog, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._log = log
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        log, now = self._log, self._snapshot()
        steps = CounterMetricFamily(
            f"{PREFIX}steps", "Iterations with shadow work there, by why they carried it or not.", labels=["reason"]
        )
        for reason, count in dict(log.steps).items():
            steps.add_metric([reason.value], count)
        legs = CounterMetricFamily(f"{PREFIX}legs", "Shadow legs that ended, and why.", labels=["leg", "end"])
        for (kind, end), count in dict(log.legs).items():
            legs.add_metric([kind.value, end.value], count)
        yield from (steps, legs)
        for name, text, counted in (
            ("shadow_tokens", "Shadow tokens computed.", log.shadow_tokens),
            ("shadow_steps", "Iterations that carried shadow tokens.", log.shadow_steps),
            ("predicted_seconds", "What these were predicted to last.", log.predicted_seconds),
            ("real_seconds", "What they lasted.", log.real_seconds),
            ("over_budget_steps", "Those that lasted longer than their budget.", log.over_budget_steps),
            ("over_budget_seconds", "By how much.", log.over_budget_seconds),
            ("released_jobs", "Times a job gave its blocks back to other work.", log.released_jobs),
            ("evicted_blocks", "Cached blocks of sessions given up for other use.", log.evicted_blocks),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}", text, value=counted)
        for name, text, value in (
            ("class_blocks", "Blocks of the shadow class.", now.shadow_blocks),
            ("class_cap_blocks", "Most blocks it may have.", now.shadow_cap_blocks),
            ("pinned_blocks", "Blocks that shadow exports hold.", now.shadow_pinned_blocks),
            ("room_tokens", "Tokens of KV that shadow work may take.", now.shadow_room_tokens),
            ("jobs", "Shadow legs waiting and running.", now.shadow_jobs),
            ("credit_seconds", "Credit that routed calls, or Harvest, have left.", now.credit_seconds),
        ):
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)


def serve(listen: str, log: StepLog, snapshot: Callable[[], EngineSnapshot]) -> Callable[[], None]:
    """Serve the metrics at HOST:PORT from a thread of its own; returns what ends it. Raises OSError."""
    host, port = split_address(listen)
    registry = CollectorRegistry()
    registry.register(PluginCollector(log, snapshot))
    server, thread = start_http_server(port, host or "0.0.0.0", registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
