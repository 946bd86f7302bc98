"""What holds of a core at any time, and once nothing is in flight; each check raises AssertionError."""

from __future__ import annotations

from collections import Counter

from controller.core.cluster import Cluster
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.api.v1 import placement_pb2


def shadow_tokens_are_conserved(cluster: Cluster) -> None:
    ledger = cluster.shadow_ledger
    resident = sum(b.shadow_resident for s in cluster.sessions for b in s.bindings.values())
    assert ledger.resident == resident >= 0
    for session in cluster.sessions:
        for binding in session.bindings.values():
            assert 0 <= binding.shadow_resident <= binding.prefill_tokens - binding.normal_tokens


def reservations_match_what_is_in_flight(cluster: Cluster) -> None:
    instances = list(cluster.registry)
    legs = [leg for i in instances for leg in (*i.shadow_legs, i.fetch_leg) if leg]
    assert len(legs) == len(set(legs)) == cluster.jobs.legs_in_flight
    chunks = sum(i.gate.shadow_chunks for i in instances)
    pushing = sum(1 for j in cluster.jobs if j.leg and j.leg.kind != pb.LEG_KIND_PREFILL)
    assert chunks == pushing
    moving = Counter(
        call.decode.instance
        for call in cluster.calls.values()
        if call.phase == placement_pb2.CALL_PHASE_TRANSFER and call.prefill is not None and not call.colocated
    )
    for instance in instances:
        assert instance.gate.shadow_chunks <= 1
        assert instance.gate.normal_transfers == moving[instance], f"{instance.name}: gate"
        assert set(instance.prefill_calls) | instance.decode_calls <= set(cluster.calls)
        if instance.colocated:
            assert instance.gate.normal_transfers == instance.gate.shadow_chunks == 0


def legs_book_what_they_covered_and_no_more(cluster: Cluster) -> None:
    for job in cluster.jobs:
        if job.leg is not None:
            assert job.leg.booked <= job.leg.covered <= job.leg.chunk.end


def a_stream_belongs_to_a_living_instance_with_the_plugin(cluster: Cluster) -> None:
    for instance in cluster.registry:
        assert not instance.stream or (instance.alive and not instance.request_level)


def sessions_are_counted_where_they_are_bound(cluster: Cluster) -> None:
    bound: Counter[str] = Counter()
    for session in cluster.sessions:
        for binding in session.bindings.values():
            for ref in (binding.prefill, binding.decode):
                if ref is not None and cluster.registry.live(ref) is not None:
                    bound[ref.name] += 1
    assert {i.name: i.sessions for i in cluster.registry if i.sessions and i.alive} == dict(bound)


def bindings_name_an_instance_of_their_model_and_side(cluster: Cluster) -> None:
    for session in cluster.sessions:
        for model, binding in session.bindings.items():
            for ref, roles in (
                (binding.prefill, (pb.ROLE_PREFILL, pb.ROLE_COLOCATED)),
                (binding.decode, (pb.ROLE_DECODE,)),
            ):
                instance = cluster.registry.live(ref)
                assert ref is None or instance is not None, f"{session.key} is bound to {ref}, which is no more"
                assert instance is None or (instance.model == model and instance.role in roles)


def legs_run_on_living_instances(cluster: Cluster) -> None:
    for job in cluster.jobs:
        if job.leg is not None:
            assert cluster.registry.live(job.leg.instance.ref) is job.leg.instance


def a_probe_is_in_flight(cluster: Cluster) -> None:
    """Who holds a link's probe still uses the link, so that the link cannot stay closed for good."""
    jobs = {id(job) for job in cluster.jobs if job.leg is not None}
    calls = {id(call) for call in cluster.calls.values()}
    for link in cluster.links:
        assert link.probe is None or id(link.probe) in jobs | calls
        assert cluster.registry.live(link.key.prefill) is not None
        assert cluster.registry.live(link.key.decode) is not None


def session_calls_are_counted(cluster: Cluster) -> None:
    counted = Counter(call.session for call in cluster.calls.values() if call.session is not None)
    for session in cluster.sessions:
        assert session.calls_in_flight == counted[session.key]


def maps_are_bounded(cluster: Cluster) -> None:
    limits = cluster.config.limits
    # A session with a call in flight is never evicted.
    assert len(cluster.sessions) <= limits.max_sessions + limits.max_calls_in_flight
    assert len(cluster.calls) <= limits.max_calls_in_flight
    models = len(cluster.registry.models())
    assert len(list(cluster.jobs)) <= len(cluster.sessions) * models
    assert len(cluster.events()) <= limits.events_kept
    assert len(cluster.links) <= len(list(cluster.registry)) ** 2


ALWAYS = (
    shadow_tokens_are_conserved,
    reservations_match_what_is_in_flight,
    legs_book_what_they_covered_and_no_more,
    a_stream_belongs_to_a_living_instance_with_the_plugin,
    sessions_are_counted_where_they_are_bound,
    bindings_name_an_instance_of_their_model_and_side,
    legs_run_on_living_instances,
    a_probe_is_in_flight,
    session_calls_are_counted,
    maps_are_bounded,
)


def sessions_fit(cluster: Cluster) -> None:
    """After a tick: only calls in flight keep more sessions than the cap allows."""
    called = sum(1 for session in cluster.sessions if session.calls_in_flight)
    assert len(cluster.sessions) <= max(cluster.config.limits.max_sessions, called)


def nothing_is_in_flight(cluster: Cluster) -> None:
    """Every reservation, gate and leg is given back."""
    assert not cluster.calls
    assert cluster.jobs.legs_in_flight == 0
    for instance in cluster.registry:
        assert not instance.prefill_calls, f"{instance.name} has prefill slots left"
        assert not instance.decode_calls, f"{instance.name} has decode slots left"
        assert not instance.shadow_legs
        assert instance.fetch_leg is None
        assert instance.gate.normal_transfers == instance.gate.shadow_chunks == 0, f"{instance.name}: gate"


def nothing_is_remembered(cluster: Cluster) -> None:
    """Of sessions that all expired."""
    assert len(cluster.sessions) == 0
    assert list(cluster.jobs) == []
    assert cluster.shadow_ledger.resident == 0
