"""Which pods are instances, whatever the order of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.registry import Declared
from controller.discovery.pods import Pods, Standing, read
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.kubernetes.api_server import pod


def applied(*events: tuple[str, dict[str, Any]], **settings: Any) -> Pods:
    found = Pods(**settings)
    for kind, what in events:
        (found.remove if kind == "DELETED" else found.put)(read(what))
    return found


def uids(pods: Pods) -> dict[str, str]:
    return {name: target.uid for name, target in pods.view().targets.items()}


def test_a_ready_pod_is_an_instance_and_annotations_win() -> None:
    annotations = {
        "pdshadow.dev/model": "org/Model-7B:tuned",
        "pdshadow.dev/port": "8100",
        "pdshadow.dev/hardware": "gpu-3",
    }
    found = applied(
        ("ADDED", pod("a", role="colocated", model="label", ip="fd00::7", annotations=annotations)),
        ("ADDED", pod("b", ip="10.0.0.2")),
    )
    targets = found.view().targets
    assert targets["a"].declared == Declared(
        "a", "org/Model-7B:tuned", pb.ROLE_COLOCATED, "http://[fd00::7]:8100", "gpu-3"
    )
    assert targets["b"].declared == Declared("b", "m", pb.ROLE_PREFILL, "http://10.0.0.2:8000")


def test_only_pods_that_were_ready_and_have_not_ended_are_taken() -> None:
    found = applied(
        ("ADDED", pod("starting", ready=False, ip="10.0.0.1")),
        ("ADDED", pod("leaving", terminating=True, ip="10.0.0.2")),
        ("ADDED", pod("evicted", phase="Failed", ip="10.0.0.3")),
        ("ADDED", pod("unplaced", ip="")),
        ("ADDED", pod("good", ip="10.0.0.4")),
    )
    assert uids(found) == {"good": "good-1"}
    for event, standing in (
        (pod("good", ready=False, ip="10.0.0.4"), Standing.UNREADY),
        (pod("good", ready=False, terminating=True, ip="10.0.0.4"), Standing.TERMINATING),
    ):
        found.put(read(event))
        assert found.view().targets["good"].standing is standing
    found.put(read(pod("good", phase="Succeeded", ip="10.0.0.4")))
    assert not found.view().targets


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"role": "prefil"}, "pod ns/x: label pdshadow.dev/role is 'prefil'; make it prefill, decode or colocated"),
        ({"role": None}, "label pdshadow.dev/role is ''"),
        ({"model": None}, "it has no model; set the label or, for any name, the annotation pdshadow.dev/model"),
        ({"annotations": {"pdshadow.dev/model": "m" * 257}}, "at most 256 printable"),
        ({"annotations": {"pdshadow.dev/model": "m\n"}}, "at most 256 printable"),
        ({"port": "80a"}, "annotation pdshadow.dev/port is '80a'; make it a port, 1 to 65535"),
        ({"port": 0}, "make it a port"),
        ({"port": "9" * 5000}, "make it a port"),
        ({"annotations": {"pdshadow.dev/hardware": "g" * 129}}, "annotation pdshadow.dev/hardware"),
        ({"name": "taken"}, "pod ns/taken: discovery.static has an instance of this name; rename one"),
    ],
)
def test_a_mistake_names_the_pod_and_the_fix_and_stops_nobody_else(wrong: dict[str, Any], says: str) -> None:
    given_ = {"name": "x", "ip": "10.0.0.1", **wrong}
    view = applied(("ADDED", pod(**given_)), ("ADDED", pod("y", ip="10.0.0.2")), reserved={"taken"}).view()
    assert list(view.targets) == ["y"]
    (mistake,) = view.mistakes.values()
    assert says in mistake.message


@pytest.mark.parametrize("thing", [None, [], {}, {"metadata": []}, {"metadata": {"namespace": "ns", "name": "x"}}])
def test_what_is_no_pod_is_refused(thing: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        read(thing)


def test_a_deletion_may_arrive_before_what_it_deletes() -> None:
    found = applied(
        ("DELETED", pod("a", version=12)), ("ADDED", pod("a", version=10)), ("MODIFIED", pod("a", version=11))
    )
    assert uids(found) == {}
    found.put(read(pod("a", uid="a-2", version=13)))
    assert uids(found) == {"a": "a-2"}


def test_a_pod_that_matches_the_selector_again_comes_back() -> None:
    found = applied(("ADDED", pod("a", version=10)), ("DELETED", pod("a", version=11)))
    assert uids(found) == {}
    found.put(read(pod("a", version=12)))
    assert uids(found) == {"a": "a-1"}


def test_a_name_used_again_belongs_to_the_newer_pod_whatever_comes_late() -> None:
    late = [
        ("ADDED", pod("a", uid="a-1", version=10)),
        ("MODIFIED", pod("a", uid="a-1", version=15, terminating=True)),
        ("DELETED", pod("a", uid="a-1", version=19)),
    ]
    found = applied(("ADDED", pod("a", uid="a-2", version=20)), *late, *late)
    assert uids(found) == {"a": "a-2"}
    # A later pod that came and went ends an earlier one whose end nobody told.
    found.remove(read(pod("a", uid="a-3", version=30)))
    assert uids(found) == {}


def test_versions_that_are_not_numbers_count_in_the_order_of_arrival() -> None:
    found = applied(("ADDED", pod("a", version="z")), ("MODIFIED", pod("a", version="a", ready=False)))
    assert found.view().targets == {}
    found.put(read(pod("a", version="k")))
    found.remove(read(pod("a", uid="other", version="y")))
    assert uids(found) == {"a": "a-1"}
    found.remove(read(pod("a", version="b")))
    assert uids(found) == {}


def test_an_address_belongs_to_the_youngest_pod_that_has_it() -> None:
    old = pod("old", ip="10.0.0.1", version=10)
    young = pod("young", ip="10.0.0.1", created="2026-01-02T00:00:00Z", version=20)
    assert uids(applied(("ADDED", old), ("ADDED", young))) == {"young": "young-1"}
    assert uids(applied(("ADDED", young), ("MODIFIED", old))) == {"young": "young-1"}
    # Also while it only starts, and when it was created in the same second.
    starting = pod("young", ip="10.0.0.1", version=20, ready=False)
    assert uids(applied(("ADDED", old), ("ADDED", starting))) == {}
    found = applied(("ADDED", old), ("ADDED", young), ("DELETED", {**young}))
    assert uids(found) == {"old": "old-1"}


def test_pods_on_the_hosts_network_share_an_address() -> None:
    here = {"ip": "10.0.0.1", "host_network": True}
    found = applied(("ADDED", pod("a", port=8000, **here)), ("ADDED", pod("b", port=8001, **here)))
    assert uids(found) == {"a": "a-1", "b": "b-1"}


def test_names_carry_the_namespace_where_there_are_several() -> None:
    found = applied(
        ("ADDED", pod("a", ip="10.0.0.1")), ("ADDED", pod("a", namespace="other", ip="10.0.0.2")), qualified=True
    )
    assert sorted(found.view().targets) == ["ns.a", "other.a"]


def test_a_list_is_the_whole_truth_of_its_namespace() -> None:
    found = applied(
        ("ADDED", pod("a", version=10, ip="10.0.0.1")),
        ("ADDED", pod("b", namespace="other", version=11, ip="10.0.0.2")),
        qualified=True,
    )
    found.replace("ns", [read(pod("c", version=12, ip="10.0.0.3"))], "20")
    # From before the list.
    found.put(read(pod("a", version=13, ip="10.0.0.1")))
    assert sorted(found.view().targets) == ["ns.c", "other.b"]
    # A store restored from a backup counts from an earlier version.
    found.replace("ns", [read(pod("a", version=3, ip="10.0.0.1"))], "5")
    found.put(read(pod("d", version=6, ip="10.0.0.4")))
    assert sorted(found.view().targets) == ["ns.a", "ns.d", "other.b"]


@given(st.data())
def test_any_order_of_events_ends_at_the_truth(data: st.DataObject) -> None:
    """Two names that live several lives; every event arrives at least once, at any time."""
    truth: dict[str, str] = {}
    events: list[tuple[str, dict[str, Any]]] = []
    for version in range(1, data.draw(st.integers(1, 12)) + 1):
        name = data.draw(st.sampled_from("ab"))
        ip = f"10.0.0.{version}"
        if name in truth and data.draw(st.booleans()):
            events.append(("DELETED", pod(name, uid=truth.pop(name), version=version, ip=ip)))
        else:
            truth.setdefault(name, f"{name}-{version}")
            events.append(("MODIFIED", pod(name, uid=truth[name], version=version, ip=ip)))
    arriving = data.draw(st.permutations([*events, *data.draw(st.lists(st.sampled_from(events), max_size=5))]))
    assert uids(applied(*arriving)) == truth
