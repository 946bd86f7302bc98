"""The gateway's Prometheus metrics; label values come from enums and from the cluster's own model names."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """One registry per gateway, so that tests can run several in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "pd_shadow_gateway"
        self.requests = self._counter(f"{prefix}_requests", "Calls by how they ended.", "model", "endpoint", "outcome")
        self.ttft = Histogram(
            f"{prefix}_ttft_seconds",
            "Seconds from a streaming call's arrival to its first token.",
            ["model"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.handoffs = self._counter(
            f"{prefix}_handoffs", "Calls by whether D received the prompt's KV.", "model", "result"
        )
        self.recomputed = self._counter(
            f"{prefix}_recomputed", "Calls whose prompt D computed itself.", "model", "reason"
        )
        self.shadow_legs = self._counter(f"{prefix}_shadow_legs", "Shadow legs by how they ended.", "kind", "outcome")
        self.controller_fallbacks = self._counter(
            f"{prefix}_controller_fallbacks", "Calls placed by rendezvous hash because the controller was away."
        )
        self.renderings = self._counter(
            f"{prefix}_renderings", "Renderings of conversations for other models.", "model", "result"
        )
        self.not_append_only = self._counter(
            f"{prefix}_not_append_only",
            "Real prompts that left their rendering before its last whole block.",
            "model",
        )
        self.stale_credentials = self._counter(
            f"{prefix}_stale_credentials",
            "Changed credential files that could not be used, so that the older content stays in force.",
            "field",
        )
        self.lost_reports = self._counter(f"{prefix}_lost_reports", "Reports to the controller given up on.", "kind")
        self.in_flight = Gauge(f"{prefix}_in_flight_calls", "Calls running now.", registry=self.registry)
        self.sessions = Gauge(f"{prefix}_sessions", "Sessions held for shadow legs.", registry=self.registry)

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)
