"""Kubernetes discovery against an API server and engines that both misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from controller.config import ControllerConfig
from controller.core.instance import Facts, Instance
from controller.core.registry import Declared
from controller.discovery.kubernetes import KubernetesDiscovery
from controller.discovery.rbac import DISCOVERY_RULES
from controller.kubernetes.access import Access
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.discovery.fake_vllm import FakeVllm, serving
from tests.controller.kubernetes.api_server import ApiServer, pod


class Rig:
    """A running discovery, its API server, and engines by address."""

    def __init__(self, server: ApiServer, config: ControllerConfig, token_file: Path | None) -> None:
        self.server = server
        self.plane = Plane(config)
        self.waits: list[float] = []
        access = Access(server.url, token_file, None, "ns")
        self._discovery = KubernetesDiscovery(config.discovery, access, self.plane, sleep=self._sleep)
        self.task = asyncio.create_task(self._discovery.run())

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0.001)

    def find(self, name: str) -> Instance | None:
        return self.plane.cluster.registry.named(name)

    def named(self, name: str = "a") -> Instance:
        found = self.find(name)
        assert found is not None
        return found

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            changed = asyncio.ensure_future(self.plane.changes())
            await asyncio.wait({changed, self.task}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if self.task.done():
                self.task.result()

    async def ready(self, *names: str) -> None:
        await self.until(lambda: all((i := self.find(name)) is not None and i.ready for name in names))

    async def gone(self, name: str) -> None:
        await self.until(lambda: (i := self.find(name)) is not None and not i.alive)

    async def settled(self) -> None:
        """Wait until all that the API server sent so far was taken in: a pod that is a mistake comes behind it."""
        name = f"marker-{self.server.version}"
        self.server.put_pod(pod(name, role="marker", ip=""))
        await self.until(lambda: any(event.subject == name for event in self.plane.cluster.events()))


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    found = ApiServer()
    await found.start()
    yield found
    await found.stop()


@contextlib.asynccontextmanager
async def discovering(server: ApiServer, token_file: Path | None = None, **kubernetes: Any) -> AsyncIterator[Rig]:
    config = ControllerConfig.model_validate(
        {
            "discovery": {
                "kubernetes": {"enabled": True, **kubernetes},
                "poll_interval_seconds": 0.01,
                "suspect_after_misses": 1,
            }
        }
    )
    rig = Rig(server, config, token_file)
    try:
        yield rig
    finally:
        rig.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await rig.task


@pytest.fixture
async def engine() -> AsyncIterator[FakeVllm]:
    async with serving("127.0.0.2") as fake:
        yield fake


@pytest.fixture
async def rig(server: ApiServer, engine: FakeVllm) -> AsyncIterator[Rig]:
    """One ready instance, `a`."""
    server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
    async with discovering(server) as found:
        await found.ready("a")
        yield found


async def test_pods_of_a_list_in_pages_and_of_the_watch_are_instances_with_the_verbs_it_has(
    server: ApiServer, engine: FakeVllm
) -> None:
    server.page_limit = 1
    async with serving("127.0.0.3") as second, serving("127.0.0.4") as third, serving("127.0.0.5") as fourth:
        server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
        server.put_pod(pod("b", ip="127.0.0.3", port=second.port, role="decode"))
        server.put_pod(pod("c", ip="127.0.0.4", port=third.port))
        async with discovering(server) as rig:
            await rig.ready("a", "b", "c")
            server.put_pod(pod("d", ip="127.0.0.5", port=fourth.port, role="decode"))
            await rig.ready("d")
            roles = {i.name: i.role for i in rig.plane.cluster.registry}
    assert roles == {"a": pb.ROLE_PREFILL, "b": pb.ROLE_DECODE, "c": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE}
    assert {(group, resource, verb) for group, resource, verb in server.calls} == {
        (rule.api_group, rule.resource, verb) for rule in DISCOVERY_RULES for verb in rule.verbs
    }


async def test_several_namespaces_are_followed_on_their_own(server: ApiServer, engine: FakeVllm) -> None:
    async with serving("127.0.0.3") as second:
        server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
        server.put_pod(pod("a", namespace="other", ip="127.0.0.3", port=second.port))
        async with discovering(server, namespaces=["ns", "other"]) as rig:
            await rig.ready("ns.a", "other.a")
            server.delete_pod("a", "other")
            await rig.gone("other.a")
            assert rig.named("ns.a").ready


async def test_a_deleted_pod_is_gone_at_once_and_its_watch_ends(rig: Rig, engine: FakeVllm) -> None:
    first = rig.named()
    rig.server.delete_pod("a")
    await rig.gone("a")
    assert first.state == pb.INSTANCE_STATE_GONE
    # It would answer; nobody asks.
    await rig.settled()
    engine.looked.clear()
    await rig.settled()
    assert not engine.looked.is_set()
    assert rig.find("a") is first


async def test_a_pod_made_again_under_its_name_is_another_life(rig: Rig, engine: FakeVllm) -> None:
    """Even where its process should have begun in the same hundredth of a second."""
    first = rig.named()
    rig.server.put_pod(pod("a", uid="a-2", ip="127.0.0.2", port=engine.port, created="2026-01-02T00:00:00Z"))
    await rig.until(lambda: rig.named() is not first and rig.named().ready)
    assert not first.alive
    # The old pod's events come late, and twice.
    for _ in range(2):
        rig.server.emit("MODIFIED", pod("a", uid="a-1", ip="127.0.0.2", terminating=True, version=50))
        rig.server.emit("DELETED", pod("a", uid="a-1", ip="127.0.0.2", version=51))
    second = rig.named()
    await rig.settled()
    assert rig.named() is second
    assert second.ready


async def test_events_that_come_twice_change_nothing(rig: Rig) -> None:
    first, seen = rig.named(), len(rig.plane.cluster.events())
    for _ in range(3):
        rig.server.emit("ADDED", rig.server.pods["ns", "a"])
        rig.server.emit("MODIFIED", rig.server.pods["ns", "a"])
    await rig.settled()
    assert rig.named() is first
    assert len(rig.plane.cluster.events()) == seen + 1


async def test_another_pod_at_the_address_ends_the_first_before_its_deletion_is_told(
    rig: Rig, engine: FakeVllm
) -> None:
    first = rig.named()
    engine.start += 60
    rig.server.put_pod(pod("b", ip="127.0.0.2", port=engine.port, role="decode", created="2026-01-02T00:00:00Z"))
    await rig.ready("b")
    assert rig.find("a") is first
    assert not first.alive
    rig.server.delete_pod("a")
    await rig.settled()
    assert rig.named("b").ready


async def test_a_terminating_pod_gets_nothing_new_and_no_other_process_is_taken_for_it(
    rig: Rig, engine: FakeVllm
) -> None:
    first = rig.named()
    rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port, terminating=True, ready=False))
    await rig.until(lambda: not first.ready)
    assert (first.state, first.draining) == (pb.INSTANCE_STATE_READY, True)
    engine.start += 60
    await rig.until(lambda: first.state == pb.INSTANCE_STATE_SUSPECT)
    assert rig.find("a") is first
    rig.server.delete_pod("a")
    await rig.gone("a")
    # A stateful set gives the name to the next pod, which may be used.
    rig.server.put_pod(pod("a", uid="a-2", ip="127.0.0.2", port=engine.port))
    await rig.until(lambda: rig.named() is not first and rig.named().ready)


async def test_an_unready_pod_is_suspect_though_it_answers_and_keeps_its_life(rig: Rig, engine: FakeVllm) -> None:
    first = rig.named()
    rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port, ready=False))
    await rig.until(lambda: first.state == pb.INSTANCE_STATE_SUSPECT)
    await rig.settled()
    assert first.state == pb.INSTANCE_STATE_SUSPECT
    rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
    await rig.ready("a")
    assert rig.find("a") is first


async def test_a_restarted_container_is_another_life_and_a_restarted_sidecar_is_not(rig: Rig, engine: FakeVllm) -> None:
    first = rig.named()
    rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port, restarts=1))
    await rig.until(lambda: any(event.reason == "suspect" for event in rig.plane.cluster.events()))
    await rig.ready("a")
    assert rig.find("a") is first
    engine.start += 60
    rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port, restarts=2))
    await rig.until(lambda: rig.find("a") is not first)
    assert not first.alive


async def test_relabelled_pods_are_other_instances_and_mistakes_are_told_once(rig: Rig, engine: FakeVllm) -> None:
    first = rig.named()
    rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port, role="decode"))
    await rig.until(lambda: rig.named() is not first and rig.named().ready)
    assert rig.named().role == pb.ROLE_DECODE
    for _ in range(2):
        rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port, role="dekode"))
    await rig.gone("a")
    await rig.settled()
    told = [event for event in rig.plane.cluster.events() if event.reason == "invalid_field" and event.subject == "a"]
    assert [event.message for event in told] == [
        "pod ns/a: label pdshadow.dev/role is 'dekode'; make it prefill, decode or colocated"
    ]
    rig.server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
    await rig.ready("a")


async def test_a_broken_watch_goes_on_where_it_was(rig: Rig, engine: FakeVllm) -> None:
    lists = rig.server.count("pods", "list")
    await rig.server.until(lambda: rig.server.watches == 1)
    # In the middle of a line, which is then told again as a whole.
    line = json.dumps({"type": "DELETED", "object": rig.server.pods["ns", "a"]}).encode()
    rig.server.emit_bytes(line[: len(line) // 2])
    rig.server.end_watches()
    await rig.server.until(lambda: rig.server.watches == 0)
    rig.server.put_pod(pod("a", uid="a-2", ip="127.0.0.2", port=engine.port))
    first = rig.named()
    await rig.until(lambda: rig.named() is not first and rig.named().ready)
    assert rig.server.count("pods", "list") == lists


async def test_a_bookmark_moves_the_place_from_which_the_watch_goes_on(rig: Rig) -> None:
    lists = rig.server.count("pods", "list")
    await rig.server.until(lambda: rig.server.watches == 1)
    rig.server.version += 50
    rig.server.bookmark()
    rig.server.oldest = rig.server.version
    rig.server.end_watches()
    await rig.server.until(lambda: rig.server.watches == 0)
    await rig.server.until(lambda: rig.server.watches == 1)
    assert rig.server.count("pods", "list") == lists


@pytest.mark.parametrize("how", ["event", "answer"])
async def test_410_lists_anew_and_pods_that_went_unseen_are_gone(rig: Rig, how: str) -> None:
    await rig.server.until(lambda: rig.server.watches == 1)
    first, version = rig.named(), rig.server.version
    del rig.server.pods["ns", "a"]
    rig.server.version += 1
    rig.server.oldest = rig.server.version
    if how == "event":
        rig.server.expire_watches()
    else:
        rig.server.end_watches()
    await rig.gone("a")
    assert not first.alive
    assert rig.server.count("pods", "list") == 2
    # A stray event from before the list.
    await rig.server.until(lambda: rig.server.watches == 1)
    rig.server.emit("ADDED", pod("a", ip="127.0.0.2", version=version))
    await rig.settled()
    assert rig.find("a") is first


async def test_an_unreachable_api_server_keeps_what_is_known_and_looks_go_on(rig: Rig, engine: FakeVllm) -> None:
    first = rig.named()
    await rig.server.stop()
    tried = len(rig.waits)
    while len(rig.waits) < tried + 8:
        engine.looked.clear()
        await engine.looked.wait()
    assert rig.find("a") is first
    assert first.ready
    # With backoff, each wait cut by a half at most.
    assert rig.waits[-1] > 2 * rig.waits[tried]
    engine.health = 503
    await rig.until(lambda: not first.ready)
    engine.health = 200
    await rig.ready("a")
    assert rig.find("a") is first
    # Another process at the address: only the API server can say whose it is.
    engine.start += 60
    await rig.until(lambda: not first.ready)
    assert rig.find("a") is first
    await rig.server.start()
    await rig.until(lambda: rig.named() is not first and rig.named().ready)


async def test_refusals_and_nonsense_are_waited_out(server: ApiServer, engine: FakeVllm) -> None:
    server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
    server.failures["pods"] = [
        web.json_response({"kind": "Status", "message": "pods is forbidden"}, status=403),
        web.Response(status=429, headers={"Retry-After": "7"}),
        web.Response(status=503, text="<html>"),
        web.Response(text="<html>"),
        web.json_response({"items": 3}),
        web.json_response([]),
    ]
    async with discovering(server) as rig:
        await rig.ready("a")
        assert rig.waits[1] == 7
        await server.until(lambda: server.watches == 1)
        for nonsense in (b"{}\n", b"x\n", b'{"type": "ADDED", "object": []}\n', b"[]\n"):
            server.emit_bytes(nonsense)
            lists = server.count("pods", "list")
            await server.until(lambda lists=lists: server.count("pods", "list") > lists)  # type: ignore[misc]
            await server.until(lambda: server.watches == 1)
        # A pod that cannot be read is passed over.
        server.emit("ADDED", {"metadata": {"name": "x"}})
        await rig.settled()
        assert rig.named().ready


async def test_a_rotated_token_is_read_again(server: ApiServer, engine: FakeVllm, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    server.token = "first"
    server.put_pod(pod("a", ip="127.0.0.2", port=engine.port))
    async with discovering(server, token_file=token) as rig:
        await rig.ready("a")
        server.token = "second"
        server.end_watches()
        await server.until(lambda: server.count("pods", "list") > 2)
        assert rig.named().ready
        token.unlink()
        token.write_text("second")
        await server.until(lambda: server.watches == 1)


async def test_an_attached_engine_outlives_its_pods_entry_until_its_stream_ends(rig: Rig, engine: FakeVllm) -> None:
    named = Declared("a", "m", pb.ROLE_PREFILL, engine.url)
    attachment = rig.plane.attach(named, Facts(rig.named().facts.incarnation, 128, "sha256"), [])
    rig.server.delete_pod("a")
    await rig.settled()
    assert rig.named().ready
    rig.plane.detach(attachment)
    with rig.plane.turn() as (cluster, now):
        cluster.tick(now + cluster.config.discovery.gone_after_seconds)
    assert not rig.named().alive


async def test_pods_that_come_and_go_leave_nothing_behind(rig: Rig, engine: FakeVllm) -> None:
    for index in range(80):
        name = f"p{index}"
        rig.server.delete_pod("a" if index == 0 else f"p{index - 1}")
        rig.server.put_pod(pod(name, ip="127.0.0.2", port=engine.port))
        await rig.ready(name)
    assert len(list(rig.plane.cluster.registry)) <= 66
    assert [declared.name for declared in rig.plane.cluster.registry.declared()] == ["p79"]
