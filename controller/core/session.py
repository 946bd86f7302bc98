"""Sessions: what the controller remembers of a conversation, and where it lives on every model.

A session has one binding per model; a binding names a prefill and a decode instance, each sticky on its own, and says
how many tokens of the context each of them holds. Everything here is a belief: when it is wrong, a call is colder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.core.instance import InstanceRef
from controller.core.rejection import RejectedError
from pd_shadow.api.v1 import common_pb2 as pb


class SessionKey(NamedTuple):
    tenant: str
    session_id: str


class Digest(NamedTuple):
    """Rolling hash of the conversation up to one message, and its estimated tokens."""

    rolling_hash: bytes
    running_tokens: int


@dataclass(slots=True)
class Binding:
    """One model's side of a session. A colocated instance is the prefill side, and there is no decode side."""

    prefill: InstanceRef | None = None
    decode: InstanceRef | None = None
    # Tokens of the context in whole blocks that each side holds.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    # The part of prefill_tokens that calls put there themselves, or that was there before this controller.
    normal_tokens: int = 0
    # Tokens that shadow legs computed and no call has used yet.
    shadow_resident: int = 0
    # The conversation that prefill_tokens are about.
    digests: tuple[Digest, ...] = ()
    # Why a side is unbound, when it was bound before.
    prefill_lost: pb.PlacementReason.ValueType | None = None
    decode_lost: pb.PlacementReason.ValueType | None = None
    # An operator bound the side, and no call has been there yet.
    prefill_wished: bool = False
    decode_wished: bool = False

    def expected_warm(self, digests: tuple[Digest, ...], held: int) -> int:
        """Tokens of a conversation with these digests among `held` tokens, by the longest common message prefix."""
        if not self.digests or not digests:
            return held
        common = 0
        for ours, theirs in zip(self.digests, digests, strict=False):
            if ours.rolling_hash != theirs.rolling_hash:
                break
            common += 1
        if common == len(self.digests):
            return held
        if not common:
            return 0
        total = self.digests[-1].running_tokens
        return held * self.digests[common - 1].running_tokens // total if total else 0


@dataclass(slots=True)
class Session:
    key: SessionKey
    created: float
    last_call: float
    task: str = ""
    gateway_id: str = ""
    current_model: str = ""
    calls: int = 0
    switches: int = 0
    calls_in_flight: int = 0
    bindings: dict[str, Binding] = field(default_factory=dict)

    def binding(self, model: str) -> Binding:
        """This model's binding, made on first use."""
        binding = self.bindings.get(model)
        if binding is None:
            binding = self.bindings[model] = Binding()
        return binding


class Sessions:
    """All sessions, least recently used first; capped in number and in idle time."""

    def __init__(self, max_sessions: int, idle_seconds: float) -> None:
        self._max = max_sessions
        self._idle_seconds = idle_seconds
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def known(self, key: SessionKey) -> Session:
        """The session; raises RejectedError if there is none."""
        session = self._sessions.get(key)
        if session is None:
            raise RejectedError(
                pb.REJECTION_REASON_UNKNOWN_SESSION, f"no session {key.session_id!r}", field="session.session_id"
            )
        return session

    def touch(self, now: float, key: SessionKey) -> tuple[Session, list[Session]]:
        """The session, made if new and moved to the recent end, and the sessions that must go to make room.

        A session with a call in flight never goes.
        """
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key, created=now, last_call=now)
        self._sessions.move_to_end(key)
        session.last_call = now
        excess = len(self._sessions) - self._max
        evicted: list[Session] = []
        for candidate in self._sessions.values():
            if len(evicted) >= excess:
                break
            if candidate is not session and not candidate.calls_in_flight:
                evicted.append(candidate)
        return session, evicted

    def admit(self, now: float, key: SessionKey) -> Session | None:
        """The session as it is, or made if there is room; for one that an instance still holds something of."""
        if key in self._sessions or len(self._sessions) >= self._max:
            return self._sessions.get(key)
        return self.touch(now, key)[0]

    def expired(self, now: float) -> list[Session]:
        """Sessions idle for too long, or beyond the cap now that their calls ended, oldest first."""
        found: list[Session] = []
        excess = len(self._sessions) - self._max
        for session in self._sessions.values():
            if now - session.last_call < self._idle_seconds and len(found) >= excess:
                break
            if not session.calls_in_flight:
                found.append(session)
        return found

    def remove(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
