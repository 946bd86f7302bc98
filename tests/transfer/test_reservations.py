import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.allocation import BlockPool
from transfer.reservations import Completed, Effect, Failed, FailReason, Freed, Reservations, Sender
from transfer.wire import Kind, Note

RECEIVER = 7
P0, P1 = Sender("p0", 1), Sender("p1", 1)


def reservations(blocks: int = 8, most: int = 4) -> Reservations:
    return Reservations(BlockPool(blocks), RECEIVER, most=most, settle_seconds=1.0)


def reserve(held: Reservations, *parts: Sender, blocks: int = 4, deadline: float = 10.0) -> int:
    reserved = held.reserve(blocks, parts, deadline)
    assert reserved is not None
    return reserved[0]


def test_a_chunk_completes_when_the_last_part_has_arrived() -> None:
    held = reservations()
    epoch = reserve(held, P0, P1)
    assert held.note("p1", Note(Kind.DONE, RECEIVER, epoch, 1), now=1.0) == []
    (effect,) = held.note("p0", Note(Kind.DONE, RECEIVER, epoch, 0), now=2.0)
    assert isinstance(effect, Completed)
    assert (len(effect.blocks), held.pool.free_blocks, len(held)) == (4, 4, 0)


def test_one_part_that_fails_fails_the_chunk_and_its_blocks_wait_for_the_other() -> None:
    held = reservations()
    epoch = reserve(held, P0, P1)
    assert held.note("p0", Note(Kind.DRAINED, RECEIVER, epoch, 0), now=1.0) == [Failed(epoch, FailReason.SENDER_FAILED)]
    assert held.tick(5.0) == []
    assert held.pool.free_blocks == 4
    assert held.note("p1", Note(Kind.DONE, RECEIVER, epoch, 1), now=6.0) == [Freed(epoch, 4)]
    assert held.pool.free_blocks == 8


def test_a_deadline_is_reported_at_once_and_a_silent_sender_keeps_the_blocks() -> None:
    held = reservations()
    epoch = reserve(held, P0, deadline=3.0)
    assert held.tick(3.0) == [Failed(epoch, FailReason.DEADLINE)]
    assert held.tick(1e9) == []
    assert held.held_blocks == 4
    held.note("p0", Note(Kind.DRAINED, RECEIVER, epoch, 0), now=1e9)
    assert held.tick(1e9 + 1.0) == [Freed(epoch, 4)]


def test_what_a_dead_sender_left_on_its_way_has_time_to_land() -> None:
    held = reservations()
    epoch = reserve(held, P0)
    assert held.sender_gone(P0, now=1.0) == [Failed(epoch, FailReason.SENDER_LOST)]
    assert held.tick(1.9) == []
    assert held.tick(2.0) == [Freed(epoch, 4)]


def test_a_process_that_is_gone_says_nothing_of_its_successor() -> None:
    held = reservations()
    epoch = reserve(held, Sender("p0", 2))
    assert held.sender_gone(Sender("p0", 1), now=1.0) == []
    assert held.sender_gone(Sender("p0", 2), now=1.0) == [Failed(epoch, FailReason.SENDER_LOST)]


@pytest.mark.parametrize(
    ("sender", "note"),
    [
        ("p1", Note(Kind.DONE, RECEIVER, 1, 0)),
        ("p0", Note(Kind.DONE, RECEIVER - 1, 1, 0)),
        ("p0", Note(Kind.DONE, RECEIVER, 2, 0)),
        ("p0", Note(Kind.DONE, RECEIVER, 1, 1)),
        ("p0", Note(Kind.CANCEL, RECEIVER, 1, 0)),
    ],
)
def test_notes_of_strangers_of_other_lives_and_of_other_epochs_change_nothing(sender: str, note: Note) -> None:
    held = reservations()
    assert reserve(held, P0) == 1
    assert held.note(sender, note, now=1.0) == []
    assert (held.fenced, len(held), held.held_blocks) == (1, 1, 4)


def test_reservations_are_capped() -> None:
    held = reservations(blocks=64, most=2)
    reserve(held, P0)
    reserve(held, P0)
    assert held.reserve(4, [P0], 1.0) is None
    assert held.pool.free_blocks == 56


def test_bytes_that_are_no_note_are_not_read_as_one() -> None:
    note = Note(Kind.DONE, 1, 2, 3)
    assert Note.decode(note.encode()) == note
    for body in (b"", b"x" * 30, note.encode()[:-1], note.encode().replace(b"PDS1\x01", b"PDS1\x02"), b"\0" * 30):
        assert Note.decode(body) is None
    assert Note.decode(note.encode()[:5] + b"\x09" + note.encode()[6:]) is None


class Histories(RuleBasedStateMachine):
    """Whatever happens in whatever order, no block is used again while a living sender may still write it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held = Reservations(BlockPool(16), RECEIVER, most=4, settle_seconds=1.0)
        self.incarnations = {"p0": 1, "p1": 1}
        self.writing: dict[tuple[int, int], Sender] = {}
        self.blocks: dict[int, set[int]] = {}
        self.ended: dict[int, list[str]] = {}

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.ended.setdefault(effect.epoch, []).append(type(effect).__name__)
            if not isinstance(effect, Failed):
                assert not [key for key in self.writing if key[0] == effect.epoch]
                self.blocks.pop(effect.epoch)
            if isinstance(effect, Completed):
                self.held.pool.free(effect.blocks)

    @rule(count=st.integers(1, 8), names=st.lists(st.sampled_from(["p0", "p1"]), min_size=1, max_size=3))
    def reserve(self, count: int, names: list[str]) -> None:
        parts = [Sender(name, self.incarnations[name]) for name in names]
        reserved = self.held.reserve(count, parts, self.now + 3.0)
        if reserved is not None:
            epoch, blocks = reserved
            taken = set(blocks.tolist())
            assert not any(taken & other for other in self.blocks.values())
            self.blocks[epoch] = taken
            self.writing.update({(epoch, part): sender for part, sender in enumerate(parts)})

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), kind=st.sampled_from([Kind.DONE, Kind.DRAINED]))
    def end_of_a_part(self, data: st.DataObject, kind: Kind) -> None:
        epoch, part = data.draw(st.sampled_from(sorted(self.writing)))
        sender = self.writing.pop((epoch, part))
        self.take(self.held.note(sender.name, Note(kind, RECEIVER, epoch, part), self.now))

    @rule(name=st.sampled_from(["p0", "p1"]))
    def restart(self, name: str) -> None:
        gone = Sender(name, self.incarnations[name])
        self.incarnations[name] += 1
        self.writing = {key: sender for key, sender in self.writing.items() if sender != gone}
        self.take(self.held.sender_gone(gone, self.now))

    @rule(
        epoch=st.integers(0, 9),
        part=st.integers(0, 3),
        receiver=st.sampled_from([RECEIVER - 1, RECEIVER + 1]),
        name=st.sampled_from(["p0", "p1"]),
    )
    def a_note_of_another_life(self, epoch: int, part: int, receiver: int, name: str) -> None:
        assert self.held.note(name, Note(Kind.DONE, receiver, epoch, part), self.now) == []

    @rule(epoch=st.integers(0, 9))
    def cancel(self, epoch: int) -> None:
        self.take(self.held.cancel(epoch, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.held.tick(self.now))

    @invariant()
    def blocks_are_conserved(self) -> None:
        assert self.held.held_blocks + self.held.pool.free_blocks == 16
        assert self.held.held_blocks == sum(map(len, self.blocks.values()))

    @invariant()
    def every_end_is_told_once(self) -> None:
        for told in self.ended.values():
            assert told in (["Completed"], ["Failed"], ["Failed", "Freed"])

    def teardown(self) -> None:
        for (epoch, part), sender in sorted(self.writing.items()):
            self.writing.pop((epoch, part))
            self.take(self.held.note(sender.name, Note(Kind.DRAINED, RECEIVER, epoch, part), self.now))
        self.take(self.held.tick(self.now + 2.0))
        assert self.held.pool.free_blocks == 16


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
