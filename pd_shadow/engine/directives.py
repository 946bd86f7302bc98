"""What the controller tells the engine, between the reporter's thread and the engine's."""

import threading
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pd_shadow.api.v1 import engine_pb2 as pb
from pd_shadow.common import config
from pd_shadow.common.config import Config
from pd_shadow.engine import session_tag
from pd_shadow.engine.settings import Seconds, Share
from pd_shadow.policy.approach import EngineController

DROPS_KEPT = 4096
"""Sessions to drop that wait for the engine to ask; of more, the oldest are forgotten and age out by themselves."""


@dataclass(frozen=True)
class PauseShadow:
    """No shadow work until further notice."""


@dataclass(frozen=True)
class ResumeShadow:
    """Shadow work again."""


@dataclass(frozen=True)
class DropSession:
    """Give up a session's shadow work and the shadow KV that nothing else uses; `session` is its tag."""

    session: str


class SetLimits(Config):
    """Other values for settings of the same names; None leaves one as it is."""

    controller: EngineController | None = None
    cap_share: Share | None = None
    minimum_tokens: Annotated[int, Field(ge=1)] | None = None
    window_seconds: Seconds | None = None
    beta: Share | None = None
    margin: Share | None = None
    routed_delta: Share | None = None
    harvest_delta: Share | None = None
    stale_seconds: Annotated[float, Field(ge=0)] | None = None


Directive = PauseShadow | ResumeShadow | DropSession | SetLimits


def directive(message: pb.AttachResponse) -> Directive | None:
    """The directive in a message, None for a kind this version does not know.

    Raises ConfigError for limits out of bounds and ValueError for a session key that the API does not take.
    """
    match message.WhichOneof("directive"):
        case "pause_shadow":
            return PauseShadow()
        case "resume_shadow":
            return ResumeShadow()
        case "drop_session":
            session = message.drop_session.session
            return DropSession(session_tag.encode(session.tenant, session.session_id))
        case "set_limits":
            given = {field.name: value for field, value in message.set_limits.ListFields()}
            return config.parse(SetLimits, given, source="set_limits")
        case _:
            return None


class Directives:
    """Directives that wait for the engine. What one of them overrides is gone; nothing here grows without bound."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = False
        self._switch: PauseShadow | ResumeShadow | None = None
        self._limits = SetLimits()
        self._dropped: dict[str, None] = {}

    def put(self, directive: Directive) -> None:
        with self._lock:
            match directive:
                case DropSession(session):
                    self._dropped[session] = None
                    if len(self._dropped) > DROPS_KEPT:
                        del self._dropped[next(iter(self._dropped))]
                case SetLimits():
                    self._limits = self._limits.model_copy(update=directive.model_dump(exclude_none=True))
                case _:
                    self._switch = directive
            self._waiting = True

    def take(self) -> list[Directive]:
        """All that wait; costs next to nothing when none does, as before almost every step."""
        if not self._waiting:
            return []
        with self._lock:
            taken: list[Directive] = [DropSession(session) for session in self._dropped]
            if self._limits != SetLimits():
                taken.append(self._limits)
            if self._switch is not None:
                taken.append(self._switch)
            self._waiting, self._switch, self._limits, self._dropped = False, None, SetLimits(), {}
        return taken
