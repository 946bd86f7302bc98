"""What the core wants done: data that the server turns into messages."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from controller.core.instance import Instance, InstanceRef
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
    switch_probability: float
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


@dataclass(frozen=True)
class Limits:
    """Settings of the plugin; None leaves one as it is. Shares and rates are 0 to 1."""

    # The plugin's own name for who decides, such as harvest-slo.
    controller: str | None = None
    cap_share: float | None = None
    minimum_tokens: int | None = None
    window_seconds: float | None = None
    beta: float | None = None
    margin: float | None = None
    routed_delta: float | None = None
    harvest_delta: float | None = None
    # Seconds, 0: never.
    stale_seconds: float | None = None

    def given(self) -> dict[str, Any]:
        """What is not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def overlaid(self, newer: Limits) -> Limits:
        """These limits, where `newer` says nothing."""
        return replace(self, **newer.given())


@dataclass(frozen=True)
class PauseEngine:
    """To an attached instance: no shadow work, or shadow work again."""

    instance: InstanceRef
    paused: bool


@dataclass(frozen=True)
class LimitEngine:
    """To an attached instance: other settings."""

    instance: InstanceRef
    limits: Limits


@dataclass(frozen=True)
class DropResident:
    """To an attached instance: a session it holds shadow KV of is forgotten."""

    instance: InstanceRef
    session: SessionKey


GatewayEffect = StartLeg | CancelLeg | DropSession
EngineEffect = PauseEngine | LimitEngine | DropResident
Effect = GatewayEffect | EngineEffect


@dataclass(frozen=True)
class Event:
    """One line of the event log."""

    sequence: int
    time: float
    kind: int
    subject: str
    reason: str
    message: str
