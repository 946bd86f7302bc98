"""What the dispatcher remembers for shadow legs: conversations, renderings, real prompts, exports. No I/O."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pd_shadow.gateway.sse import Output
from pd_shadow.gateway.tokens import Tokens, common_prefix

SessionId = tuple[str, str]
"""(tenant, session id)."""


@dataclass(slots=True)
class Conversation:
    """A session's latest call: its request body and what the model has said so far."""

    # Grows with every call; a late word about an earlier call does not replace a later one.
    call_number: int
    body: Mapping[str, Any]
    cache_salt: str | None
    # Estimated size, counted against the cap.
    tokens: int
    output: Output | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as one model's engine tokenizes it."""

    revision: int
    tokens: "Tokens[int]"
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Export:
    """Transfer parameters P handed out for the first `upto` tokens of a rendering."""

    tokens: "Tokens[int]"
    upto: int
    params: Mapping[str, Any]
    expires_at: float


@dataclass(slots=True)
class _OnModel:
    rendering: Rendering | None = None
    served: "Tokens[int] | None" = None
    export: Export | None = None

    @property
    def size(self) -> int:
        return (len(self.rendering.tokens) if self.rendering else 0) + (len(self.served) if self.served else 0)


@dataclass(slots=True)
class _Session:
    conversation: Conversation | None = None
    models: dict[str, _OnModel] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return (self.conversation.tokens if self.conversation else 0) + sum(m.size for m in self.models.values())


class Contexts:
    """Bounded by sessions and by tokens; the least recently used sessions are forgotten first."""

    def __init__(self, max_sessions: int, max_tokens: int) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[SessionId, _Session] = OrderedDict()
        self._tokens = 0
        self._revision = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        """Tokens held, conversations estimated."""
        return self._tokens

    def put_conversation(self, session: SessionId, conversation: Conversation) -> bool:
        """Remember a session's latest call; False if a later call is known already."""
        held = self._sessions.setdefault(session, _Session())
        known = held.conversation
        if known is not None and known.call_number > conversation.call_number:
            return False
        before = held.size
        held.conversation = conversation
        self._account(session, held, before)
        return True

    def conversation(self, session: SessionId) -> Conversation | None:
        """The session's latest call."""
        held = self._sessions.get(session)
        return held.conversation if held else None

    def rendering(self, session: SessionId, model: str) -> Rendering | None:
        """The latest rendering for a model."""
        held = self._on_model(session, model)
        return held.rendering if held else None

    def served(self, session: SessionId, model: str) -> "Tokens[int] | None":
        """Token ids of the last real prompt on a model."""
        held = self._on_model(session, model)
        return held.served if held else None

    def add_rendering(
        self, session: SessionId, model: str, tokens: "Tokens[int]", cache_salt: str | None, now_us: int
    ) -> tuple[Rendering, int] | None:
        """Remember a rendering; (rendering, kept tokens), or None if the session is forgotten.

        Revisions are microseconds of the wall clock, made to grow: they also grow across gateways and restarts.
        """
        held = self._sessions.get(session)
        if held is None:
            return None
        before = held.size
        on_model = held.models.setdefault(model, _OnModel())
        earlier = [on_model.rendering.tokens if on_model.rendering else None, on_model.served]
        kept = max((common_prefix(tokens, known) for known in earlier if known is not None), default=0)
        self._revision = max(self._revision + 1, now_us)
        on_model.rendering = Rendering(self._revision, tokens, cache_salt)
        self._account(session, held, before)
        return on_model.rendering, kept

    def set_served(self, session: SessionId, model: str, tokens: "Tokens[int]") -> None:
        """Remember the real prompt of a call; nothing happens if the session is forgotten."""
        held = self._sessions.get(session)
        if held is None:
            return
        before = held.size
        held.models.setdefault(model, _OnModel()).served = tokens
        self._account(session, held, before)

    def hold_export(self, session: SessionId, model: str, export: Export) -> None:
        """Keep transfer parameters for the fetch that follows."""
        held = self._on_model(session, model)
        if held is not None:
            held.export = export

    def take_export(self, session: SessionId, model: str, rendering: Rendering, upto: int, now: float) -> Export | None:
        """The export of exactly this prefix, once; P frees the blocks when D has read them.

        A rendering that came in between does not matter as long as the prefix is the same.
        """
        held = self._on_model(session, model)
        if held is None or held.export is None:
            return None
        export = held.export
        if export.upto != upto or export.expires_at <= now or export.tokens[:upto] != rendering.tokens[:upto]:
            return None
        held.export = None
        return export

    def forget_exports(self) -> None:
        """Drop all transfer parameters, as their legs are taken as lost."""
        for held in self._sessions.values():
            for on_model in held.models.values():
                on_model.export = None

    def drop(self, session: SessionId) -> None:
        """Forget a session."""
        held = self._sessions.pop(session, None)
        if held is not None:
            self._tokens -= held.size

    def _on_model(self, session: SessionId, model: str) -> _OnModel | None:
        held = self._sessions.get(session)
        return held.models.get(model) if held else None

    def _account(self, session: SessionId, held: _Session, before: int) -> None:
        """Count a change, mark the session as used, and make room."""
        self._tokens += held.size - before
        self._sessions.move_to_end(session)
        while self._sessions and (len(self._sessions) > self._max_sessions or self._tokens > self._max_tokens):
            self.drop(next(iter(self._sessions)))
