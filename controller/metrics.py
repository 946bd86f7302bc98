"""Prometheus metrics of the controller: per model, instance and reason, never per session."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.reasons import label

PREFIX = "pd_shadow_controller_"


class ClusterCollector(Collector):
    """Reads the core at every scrape, so that no number is kept twice."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    def collect(self) -> Iterator[Metric]:
        leads = float(self._plane.leading())
        yield GaugeMetricFamily(f"{PREFIX}leader", "1 while this controller leads.", value=leads)
        yield from self._instances()
        yield from self._links()
        yield from self._calls()
        yield from self._shadow()

    def _instances(self) -> Iterator[Metric]:
        names = ["instance", "model", "role"]
        up = GaugeMetricFamily(f"{PREFIX}instance_ready", "1 while the instance takes calls.", labels=names)
        calls = GaugeMetricFamily(f"{PREFIX}instance_calls", "Normal calls placed here.", labels=names)
        pending = GaugeMetricFamily(
            f"{PREFIX}instance_pending_prefill_tokens", "Prompt tokens placed here, not yet computed.", labels=names
        )
        failed = CounterMetricFamily(
            f"{PREFIX}instance_failed_transfers", "KV transfers that failed under D, by its own count.", labels=names
        )
        expired = CounterMetricFamily(
            f"{PREFIX}instance_expired_exports", "Exports on P that no D came for, by its own count.", labels=names
        )
        draining = GaugeMetricFamily(f"{PREFIX}instance_draining", "1 while an operator drains the name.", labels=names)
        paused = GaugeMetricFamily(
            f"{PREFIX}instance_shadow_paused", "1 while operators let no shadow work begin here.", labels=names
        )
        sessions = GaugeMetricFamily(f"{PREFIX}instance_sessions", "Sessions bound here.", labels=names)
        info = GaugeMetricFamily(
            f"{PREFIX}instance_info",
            "1 per attached engine: its versions of vLLM and of the plugin.",
            labels=[*names, "vllm_version", "plugin_version"],
        )
        for instance in self._plane.cluster.registry:
            labels = [instance.name, instance.model, label(pb.Role.DESCRIPTOR, instance.role)]
            up.add_metric(labels, float(instance.ready))
            calls.add_metric(labels, instance.calls)
            pending.add_metric(labels, instance.pending_prefill_tokens)
            sessions.add_metric(labels, instance.sessions)
            draining.add_metric(labels, float(instance.draining))
            paused.add_metric(labels, float(instance.paused))
            failed.add_metric(labels, instance.load.failed_transfers)
            expired.add_metric(labels, instance.load.expired_exports)
            if instance.facts.vllm_version:
                info.add_metric([*labels, instance.facts.vllm_version, instance.facts.plugin_version], 1.0)
        yield from (info, up, calls, pending, sessions, draining, paused, failed, expired)

    def _links(self) -> Iterator[Metric]:
        seconds = CounterMetricFamily(
            f"{PREFIX}link_seconds", "Seconds D's inbound link carried each kind.", labels=["instance", "kind"]
        )
        now = self._plane.now()
        for instance in self._plane.cluster.registry:
            if instance.role == pb.ROLE_DECODE:
                instance.link.settle(now)
                seconds.add_metric([instance.name, "normal"], instance.link.normal_seconds)
                seconds.add_metric([instance.name, "shadow"], instance.link.shadow_seconds)
                seconds.add_metric([instance.name, "idle"], instance.link.idle_seconds)
        yield seconds
        quarantined = GaugeMetricFamily(
            f"{PREFIX}links_quarantined", "Pairs of P and D in quarantine now.", labels=["model"]
        )
        cluster = self._plane.cluster
        counts = Counts(link.model for link in cluster.links if link.quarantined)
        for model in cluster.registry.models():
            quarantined.add_metric([model], counts[model])
        quarantines = CounterMetricFamily(
            f"{PREFIX}link_quarantines",
            "Pairs of P and D put in quarantine, failed probes included.",
            labels=["model"],
        )
        for model, count in cluster.call_ledger.quarantines.items():
            quarantines.add_metric([model], count)
        yield from (quarantined, quarantines)

    def _calls(self) -> Iterator[Metric]:
        cluster = self._plane.cluster
        ledger = cluster.call_ledger
        yield GaugeMetricFamily(f"{PREFIX}calls_in_flight", "Calls begun and not ended.", value=len(cluster.calls))
        yield GaugeMetricFamily(f"{PREFIX}sessions", "Sessions remembered.", value=len(cluster.sessions))
        outcomes = CounterMetricFamily(f"{PREFIX}calls", "Calls ended, by outcome.", labels=["model", "outcome"])
        for (model, outcome), count in ledger.outcomes.items():
            outcomes.add_metric([model, label(pb.CallOutcome.DESCRIPTOR, outcome)], count)
        placements = CounterMetricFamily(
            f"{PREFIX}placements", "Placements, by reason.", labels=["model", "role", "reason"]
        )
        for (model, role, reason), count in ledger.placements.items():
            placements.add_metric(
                [model, label(pb.Role.DESCRIPTOR, role), label(pb.PlacementReason.DESCRIPTOR, reason)], count
            )
        handed_off = CounterMetricFamily(f"{PREFIX}handed_off", "D legs that received their KV.", labels=["model"])
        for model, count in ledger.handed_off_by_model.items():
            handed_off.add_metric([model], count)
        recomputed = CounterMetricFamily(
            f"{PREFIX}recomputed", "D legs that computed their prompt, by reason.", labels=["model", "reason"]
        )
        for (model, why), count in ledger.recompute_reasons.items():
            recomputed.add_metric([model, label(pb.RecomputeReason.DESCRIPTOR, why)], count)
        yield from (outcomes, placements, handed_off, recomputed)

    def _shadow(self) -> Iterator[Metric]:
        cluster = self._plane.cluster
        ledger = cluster.shadow_ledger
        tokens = CounterMetricFamily(
            f"{PREFIX}shadow_tokens", "Shadow tokens, by what became of them.", labels=["event"]
        )
        for event in ("prefilled", "pushed", "hit", "wasted"):
            tokens.add_metric([event], getattr(ledger, event))
        wasted = CounterMetricFamily(
            f"{PREFIX}shadow_wasted_tokens", "Shadow tokens lost before use, by reason.", labels=["reason"]
        )
        for reason, count in ledger.by_waste_reason.items():
            wasted.add_metric([label(pb.ShadowReason.DESCRIPTOR, reason)], count)
        legs = CounterMetricFamily(
            f"{PREFIX}shadow_legs", "Shadow legs ended, by outcome.", labels=["model", "kind", "outcome"]
        )
        for (model, kind, outcome), count in cluster.call_ledger.legs.items():
            legs.add_metric(
                [model, label(pb.LegKind.DESCRIPTOR, kind), label(pb.LegOutcome.DESCRIPTOR, outcome)], count
            )
        jobs = GaugeMetricFamily(f"{PREFIX}shadow_jobs", "Shadow jobs, by reason.", labels=["model", "reason"])
        counts: dict[tuple[str, str], int] = {}
        for job in cluster.jobs:
            key = (job.model, label(pb.ShadowReason.DESCRIPTOR, job.reason))
            counts[key] = counts.get(key, 0) + 1
        for (model, why), count in counts.items():
            jobs.add_metric([model, why], count)
        yield from (tokens, wasted, legs, jobs)
        yield GaugeMetricFamily(
            f"{PREFIX}shadow_legs_in_flight", "Shadow legs running.", value=cluster.jobs.legs_in_flight
        )


class AccessMetrics:
    """What the server counts before the core hears of a call. Label values are fields and reasons of this API."""

    def __init__(self) -> None:
        self.refused = Counter(f"{PREFIX}refused_rpcs", "RPCs without the right token.", ["reason"], registry=None)
        self.stale_credentials = Counter(
            f"{PREFIX}stale_credentials",
            "Changed credential files that could not be used, so that the older content stays in force.",
            ["field"],
            registry=None,
        )


def registry_for(plane: Plane, access: AccessMetrics) -> CollectorRegistry:
    """A registry with the controller's metrics and nothing else."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(plane))
    registry.register(access.refused)
    registry.register(access.stale_credentials)
    return registry
