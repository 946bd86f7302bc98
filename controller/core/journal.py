"""What the core says: effects for the server to carry out, events for operators to read; both in order."""

from __future__ import annotations

import itertools
from collections import deque

from controller.core.effects import Effect, Event
from controller.core.instance import Instance
from controller.core.session import Session
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.common.reasons import label


class Journal:
    """Keeps effects until they are taken, and the last `events_kept` events."""

    def __init__(self, events_kept: int) -> None:
        # Seconds on the caller's clock: when what is happening now happens.
        self.now = 0.0
        self._effects: list[Effect] = []
        self._events: deque[Event] = deque(maxlen=events_kept)
        self._sequence = itertools.count(1)

    def emit(self, effect: Effect) -> None:
        """Something is to be done."""
        self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; each effect is handed out once."""
        effects, self._effects = self._effects, []
        return effects

    def note(self, kind: admin.EventKind.ValueType, subject: str, reason: str, message: str) -> None:
        """Something happened."""
        self._events.append(Event(next(self._sequence), self.now, kind, subject, reason, message))

    def note_state(self, instance: Instance) -> None:
        """An instance is in another state."""
        state = label(common.InstanceState.DESCRIPTOR, instance.shown_state)
        self.note(admin.EVENT_KIND_INSTANCE_STATE, instance.name, state, f"incarnation {instance.facts.incarnation}")

    def note_left(self, session: Session, instance: Instance, reason: common.PlacementReason.ValueType) -> None:
        """A session is no longer bound to an instance."""
        self.note(
            admin.EVENT_KIND_SESSION_REBOUND,
            session.key.session_id,
            label(common.PlacementReason.DESCRIPTOR, reason),
            f"{instance.model}: {instance.name} {instance.facts.incarnation}",
        )

    def events(self, after: int = 0) -> list[Event]:
        """Events with a larger sequence number, oldest first; costs no more than what it returns."""
        fresh = itertools.takewhile(lambda event: event.sequence > after, reversed(self._events))
        return list(fresh)[::-1]
