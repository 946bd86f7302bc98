"""Two couriers in one process, over memory, with faults at every step; time is the test's."""

import numpy as np
import pytest

from tests.transfer.memory_transport import MemoryTransport, Network
from transfer.allocation import BlockPool
from transfer.chunks import Chunk
from transfer.courier import Courier, Drained, Push, PushOutcome, PushReason
from transfer.descriptors import plan_chunk
from transfer.layouts import KvLayout, KvPool
from transfer.receiver import Receiver
from transfer.reservations import Completed, Effect, Failed, FailReason, Freed, Reservations, Sender
from transfer.transport.base import Held, Operation, Region, TransportError
from transfer.transport.fault import Fault, FaultyTransport, Step

LAYOUT = KvLayout(planes=2, heads=2, head_bytes=16, block_tokens=16)
BLOCKS = 16
TOKENS = 8 * LAYOUT.block_tokens


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class End:
    """One side: memory, a transport that can fail, a courier."""

    def __init__(self, name: str, incarnation: int, clock: Clock, network: Network) -> None:
        self.memory = np.zeros(BLOCKS * LAYOUT.block_bytes, dtype=np.uint8)
        self.faults = FaultyTransport(MemoryTransport(name, network))
        pool = KvPool.plane_major(LAYOUT, 0, BLOCKS, self.memory.ctypes.data)
        region = Region(self.memory.ctypes.data, self.memory.nbytes)
        self.courier = Courier(self.faults, pool, [region], incarnation, clock)


class Rig:
    def __init__(self) -> None:
        self.clock = Clock()
        self.network = Network()
        self.p = End("p", 1, self.clock, self.network)
        self.d = End("d", 5, self.clock, self.network)
        self.effects: list[Effect] = []
        self.receiver = self.receive_with(self.d)
        self.p.courier.connect(self.d.courier.offer())
        self.d.courier.connect(self.p.courier.offer())
        self.p.memory[:] = np.arange(len(self.p.memory)) % 251 + 1
        self.outcomes: list[PushOutcome] = []
        self.drains: list[Drained] = []

    def receive_with(self, end: End) -> Receiver:
        reservations = Reservations(BlockPool(BLOCKS), end.courier.incarnation)
        return Receiver(end.courier, reservations, self.clock, self.effects.append)

    def reserve(self, seconds: float = 10.0) -> int:
        reserved = self.receiver.reserve(8, [Sender("p", 1)], seconds)
        assert reserved is not None
        self.epoch, self.blocks = reserved
        return self.epoch

    def push(self, *, seconds: float = 5.0, normal: bool = False, operation: Operation = Operation.WRITE) -> None:
        pools = (self.p.courier.pool, self.d.courier.pool)
        tables = (np.arange(8), self.blocks)
        if operation is Operation.READ:
            pools, tables = pools[::-1], tables[::-1]
        plan = plan_chunk(*pools, *tables, Chunk(0, TOKENS), batch_runs=1, batch_bytes=1024)
        deadline = self.clock.now + seconds
        push = Push("d", self.d.courier.incarnation, self.epoch, 0, plan, deadline, normal, operation)
        self.p.courier.push(push, self.outcomes.append, self.drains.append)

    def steps(self, count: int = 12, seconds: float = 0.0) -> None:
        for _ in range(count):
            self.p.courier.step()
            self.d.courier.step()
            self.clock.now += seconds

    def arrived(self) -> bool:
        size = LAYOUT.plane_bytes
        half = BLOCKS * size
        return all(
            (self.p.memory[plane * half + i * size :][:size] == self.d.memory[plane * half + b * size :][:size]).all()
            for plane in range(2)
            for i, b in enumerate(self.blocks)
        )

    def close(self) -> None:
        for end in (self.p, self.d):
            end.courier.close()
            assert end.faults.held() == Held()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_chunk_arrives_and_both_sides_hear_of_it(rig: Rig) -> None:
    rig.reserve()
    rig.push()
    rig.steps()
    (outcome,) = rig.outcomes
    assert (outcome.reason, outcome.bytes, outcome.posts) == (PushReason.DONE, 8 * LAYOUT.block_bytes, 8)
    assert rig.drains == [Drained.TOLD]
    assert [type(effect) for effect in rig.effects] == [Completed]
    assert rig.arrived()
    assert rig.p.faults.held().transfers == 0
    rig.close()


def test_a_read_brings_the_peers_bytes(rig: Rig) -> None:
    rig.reserve()
    rig.d.memory[:] = np.arange(len(rig.d.memory)) % 13 + 1
    rig.push(operation=Operation.READ)
    rig.steps()
    assert rig.outcomes[0].reason is PushReason.DONE
    assert rig.arrived()


def test_a_hung_peer_ends_a_push_by_its_deadline_and_the_blocks_stay_until_it_has_drained(rig: Rig) -> None:
    rig.reserve(seconds=4.0)
    rig.p.faults.plan(Step.POST, Fault.HANG, after=1)
    rig.push(seconds=2.0)
    rig.steps(count=80, seconds=0.1)
    assert [outcome.reason for outcome in rig.outcomes] == [PushReason.DEADLINE]
    assert rig.effects == [Failed(rig.epoch, FailReason.DEADLINE)]
    assert (rig.drains, rig.receiver.reservations.held_blocks) == ([], 8)
    rig.push()
    assert rig.outcomes[-1].reason is PushReason.EPOCH_BUSY
    stalled, rig.blocks = rig.epoch, np.arange(8, dtype=np.int32)
    rig.epoch += 1
    rig.push()
    assert rig.outcomes[-1].reason is PushReason.PEER_STALLED
    rig.epoch = stalled
    rig.p.faults.heal()
    rig.steps(count=30, seconds=0.1)
    assert rig.drains == [Drained.NEVER_BEGAN, Drained.NEVER_BEGAN, Drained.TOLD]
    assert rig.effects[1:] == [Freed(rig.epoch, 8)]
    rig.close()


@pytest.mark.parametrize("step", [Step.POST, Step.POLL, Step.SEND, Step.PREPARE])
def test_a_peer_that_dies_ends_the_push_as_lost_at_any_step(rig: Rig, step: Step) -> None:
    rig.reserve()
    rig.p.faults.plan(Step.POST, Fault.DELAY)
    rig.p.faults.plan(step, Fault.PEER_LOST, after=1 if step in (Step.POLL, Step.PREPARE) else 0)
    rig.push()
    rig.steps()
    assert [outcome.reason for outcome in rig.outcomes] == [PushReason.PEER_LOST]
    assert rig.drains == [Drained.PEER_GONE]
    assert rig.p.courier.peers() == {}
    assert rig.p.faults.held()._replace(registrations=0, lists=0) == Held()
    rig.close()


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.PARTIAL])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_error_at_any_post_closes_the_connection_before_the_receiver_hears(
    rig: Rig, fault: Fault, after: int
) -> None:
    rig.reserve()
    rig.p.faults.plan(Step.POST, fault, after=after)
    rig.push()
    rig.steps(count=20, seconds=0.1)
    assert [outcome.reason for outcome in rig.outcomes] == [PushReason.TRANSPORT_ERROR]
    assert rig.drains == [Drained.TOLD]
    assert rig.effects == [Failed(rig.epoch, FailReason.SENDER_FAILED), Freed(rig.epoch, 8)]
    rig.reserve()
    rig.push()
    rig.steps()
    assert rig.outcomes[-1].reason is PushReason.DONE
    assert rig.arrived()
    rig.close()


@pytest.mark.parametrize("step", [Step.POLL, Step.PREPARE, Step.RELEASE, Step.SEND])
def test_an_error_elsewhere_leaves_nothing_behind(rig: Rig, step: Step) -> None:
    rig.reserve()
    rig.p.faults.plan(Step.POST, Fault.DELAY)
    rig.p.faults.plan(step, Fault.ERROR)
    rig.push()
    rig.steps(count=20, seconds=0.1)
    assert len(rig.outcomes) == len(rig.drains) == 1
    assert len(rig.receiver.reservations) == 0
    assert rig.p.faults.held().transfers == 0
    rig.close()


def test_a_lost_word_is_asked_for_again(rig: Rig) -> None:
    rig.reserve(seconds=3.0)
    rig.p.faults.plan(Step.SEND, Fault.DROP)
    rig.push()
    rig.steps()
    assert (rig.outcomes[0].reason, rig.effects) == (PushReason.DONE, [])
    rig.steps(count=50, seconds=0.1)
    assert rig.effects == [Failed(rig.epoch, FailReason.DEADLINE), Freed(rig.epoch, 8)]


def test_an_order_that_comes_after_its_reservation_was_taken_back_writes_nothing(rig: Rig) -> None:
    rig.reserve()
    rig.receiver.cancel(rig.epoch)
    rig.steps(count=20, seconds=0.1)
    assert rig.effects == [Failed(rig.epoch, FailReason.CANCELLED), Freed(rig.epoch, 8)]
    rig.push()
    rig.steps()
    assert rig.outcomes == [PushOutcome(PushReason.EPOCH_CLOSED)]
    assert not rig.d.memory.any()


def test_a_receiver_that_changes_its_mind_stops_the_sender_between_posts(rig: Rig) -> None:
    rig.reserve()
    rig.push()
    rig.p.courier.step()
    rig.receiver.cancel(rig.epoch)
    rig.steps(count=20, seconds=0.1)
    (outcome,) = rig.outcomes
    assert outcome.reason is PushReason.CANCELLED
    assert 0 < outcome.posts < 8
    assert rig.effects[-1] == Freed(rig.epoch, 8)


def test_a_peer_restarted_under_its_name_is_known_anew_and_old_orders_do_not_reach_it(rig: Rig) -> None:
    rig.reserve()
    rig.p.faults.plan(Step.POST, Fault.HANG)
    rig.push()
    rig.steps(count=3)
    rig.d = End("d", 6, rig.clock, rig.network)
    rig.p.courier.connect(rig.d.courier.offer())
    assert rig.outcomes[0].reason is PushReason.PEER_LOST
    assert rig.drains == [Drained.PEER_GONE]
    rig.d.courier.incarnation = 5
    rig.push()
    assert rig.outcomes[1].reason is PushReason.PEER_UNKNOWN
    rig.d.courier.incarnation = 6
    rig.receiver = rig.receive_with(rig.d)
    rig.d.courier.connect(rig.p.courier.offer())
    rig.reserve()
    rig.push()
    rig.steps()
    assert rig.outcomes[2].reason is PushReason.DONE
    assert rig.arrived()


def test_an_older_incarnation_does_not_replace_a_newer(rig: Rig) -> None:
    with pytest.raises(TransportError, match="incarnation: d is known as 5"):
        rig.p.courier.connect(rig.d.courier.offer()._replace(incarnation=4))
    assert rig.p.courier.peers() == {"d": 5}


def test_a_sender_that_is_forgotten_may_still_write_so_its_blocks_stay(rig: Rig) -> None:
    rig.reserve(seconds=1.0)
    rig.d.courier.forget("p")
    rig.steps(count=50, seconds=0.1)
    assert rig.receiver.reservations.held_blocks == 8
    rig.d.courier.connect(rig.p.courier.offer())
    rig.steps(count=200, seconds=0.1)
    assert rig.receiver.reservations.held_blocks == 0


def test_a_normal_push_posts_before_a_shadow_one(rig: Rig) -> None:
    rig.reserve()
    rig.push()
    shadow = rig.epoch
    rig.reserve()
    rig.push(normal=True)
    while not rig.outcomes:
        rig.p.courier.step()
    rig.receiver.cancel(shadow)
    rig.d.courier.step()
    rig.steps()
    assert [(outcome.reason, outcome.posts) for outcome in rig.outcomes] == [
        (PushReason.DONE, 8),
        (PushReason.CANCELLED, 0),
    ]


def test_closing_gives_everything_back_and_says_what_may_still_move(rig: Rig) -> None:
    rig.reserve()
    rig.p.faults.plan(Step.POST, Fault.HANG)
    rig.push()
    rig.steps(count=2)
    rig.p.courier.close()
    assert rig.outcomes[0].reason is PushReason.CANCELLED
    assert rig.drains == [Drained.ABANDONED]
    assert rig.p.faults.held() == Held()


def test_pushes_are_capped(rig: Rig) -> None:
    courier = Courier(rig.p.faults, rig.p.courier.pool, [], 9, rig.clock, most_pushes=1)
    rig.p.faults.disconnect("d")
    courier.connect(rig.d.courier.offer())
    rig.p.courier = courier
    for _ in range(2):
        rig.reserve()
        rig.push()
    assert rig.outcomes == [PushOutcome(PushReason.QUEUE_FULL)]


def test_a_hung_peer_costs_few_polls_once_its_push_has_ended(rig: Rig) -> None:
    rig.reserve(seconds=1.0)
    rig.p.faults.plan(Step.POST, Fault.HANG)
    assert rig.p.courier.step() == rig.d.courier.step() * 40
    rig.push(seconds=1.0)
    rig.steps(count=16)
    idle = rig.p.courier.step() * 40
    rig.steps(count=20, seconds=0.1)
    assert (rig.drains, rig.p.courier.step(), rig.d.courier.step()) == ([], idle, idle)


@pytest.mark.parametrize("field", ["incarnation", "epoch", "part"])
def test_a_number_that_no_note_can_carry_is_refused(rig: Rig, field: str) -> None:
    rig.reserve()
    plan = plan_chunk(rig.p.courier.pool, rig.d.courier.pool, np.arange(8), rig.blocks, Chunk(0, TOKENS))
    for value in (-1, 2**64):
        push = Push("d", 5, rig.epoch, 0, plan, 200.0)._replace(**{field: value})
        with pytest.raises(ValueError, match=f"{field}: {value} is not in"):
            rig.p.courier.push(push, rig.outcomes.append, rig.drains.append)
    assert rig.outcomes == []


def test_a_region_that_cannot_be_registered_closes_the_transport() -> None:
    faults = FaultyTransport(MemoryTransport("p", Network()))
    faults.plan(Step.REGISTER, Fault.ERROR)
    with pytest.raises(TransportError, match="register failed"):
        Courier(faults, KvPool.plane_major(LAYOUT, 0, 1, 4096), [Region(4096, 64)], 1, Clock())


def test_a_step_has_only_the_faults_that_can_happen_there() -> None:
    with pytest.raises(ValueError, match="poll cannot drop"):
        FaultyTransport(MemoryTransport("p", Network())).plan(Step.POLL, Fault.DROP)
