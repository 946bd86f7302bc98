"""Effects are handed out once, events are numbered and capped."""

from __future__ import annotations

from controller.core.effects import CancelLeg
from controller.core.journal import Journal
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as common


def cancel(leg: str) -> CancelLeg:
    return CancelLeg("gw", leg, common.SHADOW_REASON_PAUSED)


def test_effects_are_handed_out_once_and_in_order() -> None:
    journal = Journal(events_kept=4)
    journal.emit(cancel("1"))
    journal.emit(cancel("2"))
    assert journal.take_effects() == [cancel("1"), cancel("2")]
    journal.emit(cancel("3"))
    assert journal.take_effects() == [cancel("3")]
    assert journal.take_effects() == []


def test_events_carry_their_time_and_a_number_that_goes_on_when_older_ones_are_gone() -> None:
    journal = Journal(events_kept=3)
    for number in range(1, 6):
        journal.now = number / 2
        journal.note(admin.EVENT_KIND_GATEWAY, f"gw-{number}", "left", "")
    assert [(event.sequence, event.time, event.subject) for event in journal.events()] == [
        (3, 1.5, "gw-3"), (4, 2.0, "gw-4"), (5, 2.5, "gw-5"),
    ]  # fmt: skip
    assert [event.sequence for event in journal.events(after=4)] == [5]
    assert journal.events(after=5) == []
