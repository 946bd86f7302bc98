"""Real NIXL between two processes. Over TCP transfers are asynchronous, so that late completions are real ones."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from transfer.bench.memory import Buffer
from transfer.bench.peer import Peer, PoolShape, open_courier
from transfer.chunks import Chunk
from transfer.courier import Courier, Drained, Push, PushOutcome, PushReason
from transfer.courier_thread import CourierThread
from transfer.descriptors import plan_chunk
from transfer.layouts import KvLayout
from transfer.reservations import Completed, Effect, Failed, FailReason, Freed, Sender
from transfer.transport.base import Held, TransportError
from transfer.transport.nixl import NixlSettings, NixlTransport

pytest.importorskip("nixl", reason="NIXL is not installed")

SHAPE = PoolShape(KvLayout(planes=4, heads=8, head_bytes=512, block_tokens=16), blocks=512)
TCP = NixlSettings(environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})
CHUNK = Chunk(0, 4096)


class Rig:
    """A sender in this process, a receiver in another."""

    def __init__(self, peer: Peer, settings: NixlSettings) -> None:
        self.peer = peer
        self.buffer = Buffer(SHAPE.bytes)
        self.buffer.fill(1)
        self.transport, self.courier = open_courier("p", 1, SHAPE, self.buffer, settings)
        self.outcomes: list[PushOutcome] = []
        self.drains: list[Drained] = []
        self.effects: list[Effect] = []
        self.meet(peer)

    def meet(self, peer: Peer) -> None:
        self.peer = peer
        self.offer = peer.offer()
        peer.connect(self.courier.offer())
        self.courier.connect(self.offer)

    def reserve(self, seconds: float = 20.0) -> Push:
        reserved = self.peer.reserve(256, [Sender("p", 1)], seconds)
        assert reserved is not None
        self.epoch, self.blocks = reserved
        self.source = np.arange(0, 512, 2)
        plan = plan_chunk(self.courier.pool, self.offer.pool, self.source, self.blocks, CHUNK, batch_runs=16)
        return Push(self.peer.name, self.peer.incarnation, self.epoch, 0, plan, time.monotonic() + 10.0)

    def push(self, push: Push) -> None:
        self.courier.push(push, self.outcomes.append, self.drains.append)

    def step_until(self, condition: object, seconds: float = 15.0) -> None:
        give_up = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < give_up, (self.outcomes, self.drains, self.effects)
            time.sleep(self.courier.step())

    def effect(self, kind: type) -> Effect:
        def there() -> bool:
            self.effects += [seen.effect for seen in self.peer.take()]
            return any(isinstance(effect, kind) for effect in self.effects)

        self.step_until(there)
        return next(effect for effect in self.effects if isinstance(effect, kind))

    def arrived(self) -> bool:
        """Whether the first and last block of every plane are what was sent."""
        size, layout = SHAPE.blocks * SHAPE.layout.plane_bytes, SHAPE.layout
        for plane in range(layout.planes):
            for index in (0, 255):
                here = plane * size + int(self.source[index]) * layout.plane_bytes
                there = plane * size + int(self.blocks[index]) * layout.plane_bytes
                expected = self.buffer.array[here : here + layout.plane_bytes]
                if not (self.peer.read(there, layout.plane_bytes) == expected).all():
                    return False
        return True


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer("d", 1, SHAPE, TCP) as peer:
        yield peer


@pytest.fixture
def tcp(peer: Peer) -> Iterator[Rig]:
    """A receiver that starts anew for every test, in the same process: a new process takes seconds."""
    peer.restart()
    rig = Rig(peer, TCP)
    yield rig
    rig.courier.close()
    assert rig.transport.held() == Held()


def test_a_restarted_peer_is_known_anew_under_its_name(tcp: Rig) -> None:
    tcp.push(tcp.reserve())
    tcp.effect(Completed)
    assert tcp.arrived()
    old = tcp.reserve()
    tcp.peer.restart()
    tcp.buffer.fill(2)
    tcp.meet(tcp.peer)
    tcp.push(old)
    assert tcp.outcomes[1].reason is PushReason.PEER_UNKNOWN
    tcp.effects.clear()
    tcp.push(tcp.reserve())
    tcp.effect(Completed)
    assert tcp.arrived()
    assert tcp.peer.usage().held == Held(registrations=1, peers=1)


def test_what_was_in_flight_at_the_deadline_lands_late_and_in_memory_that_is_still_reserved(tcp: Rig) -> None:
    tcp.push(tcp.reserve()._replace(deadline=time.monotonic() + 10.0))
    tcp.effect(Completed)
    tcp.peer.free(tcp.blocks)
    tcp.effects.clear()
    push = tcp.reserve(seconds=0.3)
    tcp.buffer.fill(2)
    tcp.peer.freeze()
    tcp.push(push._replace(deadline=time.monotonic() + 0.3))
    tcp.step_until(lambda: len(tcp.outcomes) == 2)
    assert tcp.outcomes[1].reason is PushReason.DEADLINE
    assert tcp.drains == [Drained.TOLD]
    tcp.peer.thaw()
    assert tcp.effect(Failed) == Failed(tcp.epoch, FailReason.DEADLINE)
    before = tcp.peer.held_blocks()
    tcp.step_until(lambda: len(tcp.drains) == 2)
    assert tcp.drains[1] is Drained.TOLD
    assert tcp.effect(Freed) == Freed(tcp.epoch, 256)
    assert (before, tcp.peer.held_blocks()) == (256, 0)
    landed = tcp.peer.read(int(tcp.blocks[0]) * SHAPE.layout.plane_bytes, SHAPE.layout.plane_bytes)
    assert (landed == tcp.buffer.array[: SHAPE.layout.plane_bytes]).all()


def test_a_sender_that_goes_is_noticed_by_the_receiver_and_its_blocks_come_back(tcp: Rig) -> None:
    tcp.reserve(seconds=0.2)
    tcp.courier.close()
    tcp.effects += [seen.effect for seen in tcp.peer.take()]
    give_up = time.monotonic() + 10.0
    while not any(isinstance(effect, Freed) for effect in tcp.effects):
        assert time.monotonic() < give_up, tcp.effects
        tcp.effects += [seen.effect for seen in tcp.peer.take()]
    assert tcp.peer.held_blocks() == 0


async def test_the_loop_is_told_by_the_couriers_thread(peer: Peer) -> None:
    peer.restart()
    buffer = Buffer(SHAPE.bytes)
    transports: list[NixlTransport] = []

    def open_it() -> Courier:
        transport, courier = open_courier("p", 1, SHAPE, buffer, TCP)
        transports.append(transport)
        return courier

    thread = CourierThread(open_it)
    await thread.start()
    try:
        peer.connect(await thread.call(lambda courier: courier.offer()))
        offer = peer.offer()
        await thread.call(lambda courier: courier.connect(offer))
        reserved = peer.reserve(256, [Sender("p", 1)], 20.0)
        assert reserved is not None
        pool = SHAPE.pool(buffer.address)
        plan = plan_chunk(pool, offer.pool, np.arange(256), reserved[1], CHUNK)
        ticket = thread.push(Push("d", peer.incarnation, reserved[0], 0, plan, time.monotonic() + 10.0))
        assert (await ticket.outcome).reason is PushReason.DONE
        assert await ticket.drained is Drained.TOLD
        with pytest.raises(TransportError, match="is known as"):
            await thread.call(lambda courier: courier.connect(offer._replace(incarnation=0)))
    finally:
        await thread.close()
    late = thread.push(Push("d", peer.incarnation, reserved[0], 0, plan, 0.0))
    assert (await late.outcome).reason is PushReason.TRANSPORT_ERROR
    assert transports[0].held() == Held()
    with pytest.raises(TransportError, match="the courier has ended"):
        await thread.call(lambda courier: courier.peers())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"progress_delay_microseconds": 0}, "progress_delay_microseconds: 0 is not in"),
        ({"environment": {"PATH": "/"}}, "environment: PATH is not an option of UCX or NIXL"),
    ],
)
def test_settings_that_would_spin_or_change_the_process_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NixlSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (NixlSettings(backend="NOSUCH"), "backend: NIXL has no NOSUCH"),
        (NixlSettings(environment={"UCX_TLS": "nosuch"}), "nixlBackendError"),
    ],
)
def test_a_backend_that_does_not_start_is_a_transport_error(settings: NixlSettings, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        NixlTransport("p", settings)


def test_metadata_of_another_name_is_refused_and_the_right_peer_stays() -> None:
    one, other = NixlTransport("a"), NixlTransport("b")
    one.connect("b", other.metadata())
    for metadata, message in ((other.metadata(), "is that of b, not of c"), (b"junk", "nixl")):
        with pytest.raises(TransportError, match=message):
            one.connect("c", metadata)
    one.send("b", b"hello")
    assert one.held().peers == 1
    for transport in (one, other):
        transport.close()
        transport.close()
        assert transport.held() == Held()


def test_a_process_that_is_killed_ends_the_push_at_once(tcp: Rig) -> None:
    """The last of this module: nothing is left of its peer."""
    tcp.push(tcp.reserve())
    tcp.effect(Completed)
    order = tcp.reserve()
    tcp.peer.freeze()
    tcp.push(order)
    tcp.step_until(lambda: tcp.transport.held().transfers > 0)
    tcp.peer.kill()
    tcp.step_until(lambda: len(tcp.drains) == 2)
    assert (tcp.outcomes[1].reason, tcp.drains[1]) == (PushReason.PEER_LOST, Drained.PEER_GONE)
    assert tcp.transport.held()._replace(lists=0) == Held(registrations=1)
