"""What the core wants done: data that the server turns into messages."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.instance import Instance
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb


@dataclass(frozen=True)
class StartLeg:
    gateway_id: str
    leg_id: str
    session: SessionKey
    model: str
    kind: pb.LegKind.ValueType
    instance: Instance
    revision: int
    upto_tokens: int
    deadline_seconds: float
    normal_priority: bool = False


@dataclass(frozen=True)
class CancelLeg:
    gateway_id: str
    leg_id: str
    reason: pb.ShadowReason.ValueType


@dataclass(frozen=True)
class DropSession:
    gateway_id: str
    session: SessionKey
    reason: pb.ShadowReason.ValueType


Effect = StartLeg | CancelLeg | DropSession


@dataclass(frozen=True)
class Event:
    """One line of the event log."""

    sequence: int
    time: float
    kind: int
    subject: str
    reason: str
    message: str
