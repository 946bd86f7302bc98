"""Electors at one API server, on a clock that only moves when told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from controller.config import ElectionConfig
from controller.discovery.rbac import ELECTION_RULES
from controller.election.elector import Elector
from controller.kubernetes.access import Access, AccessError
from tests.controller.kubernetes.api_server import ApiServer


class Clock:
    """Time for several sleepers."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self._changed = asyncio.Event()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        entry = (self.time + seconds, future)
        self._sleepers.append(entry)
        self._changed.set()
        try:
            await future
        finally:
            self._sleepers.remove(entry)
            self._changed.set()

    def advance(self, seconds: float) -> None:
        self.time += seconds
        for until, future in self._sleepers:
            if until <= self.time and not future.done():
                future.set_result(None)

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def resting(self, *seconds: float) -> None:
        """Wait until every sleeper sleeps this long from now."""
        wanted = sorted(seconds)
        await self.until(lambda: sorted(round(at - self.time, 3) for at, f in self._sleepers if not f.done()) == wanted)


class Candidate:
    """An elector, and what it said."""

    def __init__(self, server: ApiServer, clock: Clock, identity: str) -> None:
        self.said: list[bool] = []
        access = Access(server.url, None, None, "ns")
        config = ElectionConfig(enabled=True, identity=identity)
        self.elector = Elector(config, access, self._say, now=clock.now, sleep=clock.sleep, rng=lambda: 0.0)
        self.task = asyncio.create_task(self.elector.run())

    async def _say(self, leading: bool) -> None:
        self.said.append(leading)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class Place:
    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.clock = Clock()
        self.candidates: list[Candidate] = []

    def stand(self, identity: str) -> Candidate:
        self.candidates.append(Candidate(self.server, self.clock, identity))
        return self.candidates[-1]

    @property
    def lease(self) -> dict[str, object]:
        spec: dict[str, object] = self.server.leases["ns", "pd-shadow-controller"]["spec"]
        return spec


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    server = ApiServer()
    await server.start()
    found = Place(server)
    yield found
    server.lease_gate.set()
    for candidate in found.candidates:
        await candidate.stop()
    await server.stop()


async def leading(place: Place, identity: str) -> Candidate:
    candidate = place.stand(identity)
    await place.clock.resting(2.0)
    assert candidate.said == [True]
    return candidate


async def test_one_leads_the_other_waits_and_takes_over_from_a_leader_that_left(place: Place) -> None:
    one = await leading(place, "one")
    two = place.stand("two")
    await place.clock.resting(2.0, 2.0)
    assert (two.said, one.elector.leading(), two.elector.leading()) == ([], True, False)
    assert (place.lease["holderIdentity"], place.lease["leaseDurationSeconds"]) == ("one", 15)
    await one.stop()
    assert one.said == [True, False]
    assert place.lease["holderIdentity"] == ""
    place.clock.advance(2.0)
    await place.clock.resting(2.0)
    assert two.said == [True]
    assert (place.lease["holderIdentity"], place.lease["leaseTransitions"]) == ("two", 1)
    assert set(place.server.calls) == {
        (rule.api_group, rule.resource, verb) for rule in ELECTION_RULES for verb in rule.verbs
    }


async def test_a_leader_renews_every_period(place: Place) -> None:
    one = await leading(place, "one")
    for renewals in range(1, 20):
        before = place.lease["renewTime"]
        place.clock.advance(2.0)
        await place.clock.resting(2.0)
        assert place.server.count("leases", "update") == renewals
        assert place.lease["renewTime"] != before
    assert one.said == [True]


async def test_a_dead_leaders_lease_runs_out_for_the_other(place: Place) -> None:
    place.server.put_lease("pd-shadow-controller", {"holderIdentity": "dead", "leaseDurationSeconds": 15})
    two = place.stand("two")
    for _ in range(7):
        await place.clock.resting(2.0)
        place.clock.advance(2.0)
    await place.clock.resting(2.0)
    assert two.said == []
    place.clock.advance(2.0)
    await place.clock.resting(2.0)
    assert two.said == [True]


async def test_a_leader_without_an_api_server_steps_down_by_its_deadline_and_comes_back(place: Place) -> None:
    one = await leading(place, "one")
    await place.server.stop()
    for _ in range(4):
        place.clock.advance(2.0)
        await place.clock.resting(2.0)
    assert (one.said, one.elector.leading()) == ([True], True)
    place.clock.advance(2.0)
    # By the clock already, before anything ran.
    assert not one.elector.leading()
    await place.clock.resting(2.0)
    assert one.said == [True, False]
    await place.server.start()
    place.clock.advance(2.0)
    await place.clock.until(lambda: one.said == [True, False, True])


async def test_a_leader_whose_request_hangs_steps_down_by_its_deadline(place: Place) -> None:
    one = await leading(place, "one")
    place.server.lease_gate.clear()
    place.clock.advance(2.0)
    await place.clock.resting(8.0)
    place.clock.advance(8.0)
    await place.clock.resting(2.0)
    assert one.said == [True, False]


async def test_a_leader_whose_lease_was_taken_steps_down_at_once(place: Place) -> None:
    one = await leading(place, "one")
    place.server.put_lease("pd-shadow-controller", {"holderIdentity": "two", "leaseDurationSeconds": 15})
    place.clock.advance(2.0)
    await place.clock.resting(2.0)
    assert one.said == [True, False]
    await one.stop()
    assert place.lease["holderIdentity"] == "two"


async def test_of_two_that_write_at_once_one_leads(place: Place) -> None:
    place.server.lease_gate.clear()
    one, two = place.stand("one"), place.stand("two")
    await place.server.until(lambda: place.server.count("leases", "get") == 2)
    place.server.lease_gate.set()
    await place.clock.resting(2.0, 2.0)
    assert sorted([one.said, two.said]) == [[], [True]]


async def test_a_process_that_comes_back_under_its_name_leads_at_once(place: Place) -> None:
    place.server.put_lease("pd-shadow-controller", {"holderIdentity": "one", "leaseDurationSeconds": 15})
    await leading(place, "one")


async def test_refusals_and_odd_leases_are_waited_out(place: Place) -> None:
    place.server.put_lease("pd-shadow-controller", {"leaseDurationSeconds": "x"})
    place.server.failures["leases"] = [
        web.Response(status=403),
        web.Response(text="<html>"),
        web.json_response({"metadata": 3}),
    ]
    one = place.stand("one")
    for _ in range(4):
        await place.clock.resting(2.0)
        place.clock.advance(2.0)
    await place.clock.resting(2.0)
    assert one.said == []
    place.server.put_lease("pd-shadow-controller", {})
    place.clock.advance(2.0)
    await place.clock.resting(2.0)
    assert one.said == [True]


def test_an_identity_is_made_up_and_a_namespace_is_needed() -> None:
    async def say(leading: bool) -> None:
        raise AssertionError

    access = Access("http://127.0.0.1:1", None, None, "ns")
    config = ElectionConfig(enabled=True)
    assert Elector(config, access, say).identity != Elector(config, access, say).identity
    with pytest.raises(AccessError, match=r"election\.namespace: this process is in no namespace; set it"):
        Elector(config, Access("http://127.0.0.1:1", None, None, ""), say)


async def test_a_leader_that_leaves_in_the_middle_of_a_renewal_gives_up_the_lease_all_the_same(place: Place) -> None:
    candidate = await leading(place, "a")
    # A renewal that was cut off, and yet arrived.
    place.server.put_lease("pd-shadow-controller", {**place.lease, "renewTime": "2026-01-01T00:00:09.000000Z"})
    await candidate.stop()
    assert place.lease["holderIdentity"] == ""
