"""Which instances there are: at most one life per name, and why a life is not taken in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from controller.config import DiscoveryConfig
from controller.core.instance import (
    GONE,
    Facts,
    Instance,
    InstanceInput,
    InstanceRef,
    LoadReport,
    partner_conflict,
)
from controller.core.rejection import RejectedError
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.reasons import label

# Lives a name has had, remembered so that an old one can never come back.
PAST_LIVES_KEPT = 16


@dataclass(frozen=True)
class Declared:
    """An instance that discovery or a registration names."""

    name: str
    model: str
    role: pb.Role.ValueType
    url: str
    request_level: bool = True
    hardware: str = ""


@dataclass
class Changes:
    """What an observation changed."""

    state_changed: list[Instance] = field(default_factory=list)
    lost: list[tuple[Instance, pb.PlacementReason.ValueType]] = field(default_factory=list)
    refused: tuple[Instance, pb.RejectionReason.ValueType, Instance] | None = None


class Registry:
    """Declared instances and their current lives."""

    def __init__(self, config: DiscoveryConfig) -> None:
        self._config = config
        self._declared: dict[str, Declared] = {}
        self._lives: dict[str, Instance] = {}
        self._past: dict[str, list[str]] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._lives.values())

    def declare(self, declared: Declared) -> None:
        self._declared[declared.name] = declared

    def declared(self) -> list[Declared]:
        return list(self._declared.values())

    def models(self) -> list[str]:
        """Every model some instance is declared for, sorted."""
        return sorted({declared.model for declared in self._declared.values()})

    def named(self, name: str) -> Instance | None:
        return self._lives.get(name)

    def live(self, ref: InstanceRef | None) -> Instance | None:
        """The instance behind a reference, if that very life is still the current one."""
        instance = self._lives.get(ref.name) if ref else None
        return instance if instance and instance.ref == ref and instance.alive else None

    def ready(self, model: str, *roles: pb.Role.ValueType) -> list[Instance]:
        return [i for i in self._lives.values() if i.model == model and i.role in roles and i.ready]

    def neighbours(self, instance: Instance) -> list[Instance]:
        """The other instances on the same hardware."""
        if not instance.hardware:
            return []
        return [i for i in self._lives.values() if i.hardware == instance.hardware and i is not instance and i.alive]

    def observe(self, now: float, name: str, facts: Facts, load: LoadReport) -> Changes:
        """A healthy look at a declared instance.

        Raises RejectedError for an unknown name or an incarnation that was already replaced.
        """
        declared = self._declared.get(name)
        if declared is None:
            raise RejectedError(pb.REJECTION_REASON_UNKNOWN_INSTANCE, f"no instance named {name!r} is declared")
        changes = Changes()
        instance = self._lives.get(name)
        if instance is not None and instance.facts.incarnation != facts.incarnation:
            if facts.incarnation in self._past.get(name, ()):
                raise RejectedError(
                    pb.REJECTION_REASON_STALE_INCARNATION,
                    f"{name} is registered as {instance.facts.incarnation}, newer than {facts.incarnation}",
                    field="ref.incarnation",
                )
            self._end(instance, InstanceInput.REPLACED, changes)
            instance = None
        if instance is not None and not instance.alive:
            # Given up for lost, yet the same life: its cache may have survived, but nothing here still counts on it.
            instance = None
        if instance is None:
            instance = Instance(
                name,
                declared.model,
                declared.role,
                declared.url,
                facts,
                declared.request_level,
                created=now,
                hardware=declared.hardware,
            )
            conflict = self._conflict(instance)
            if conflict is not None:
                changes.refused = (instance, *conflict)
                return changes
            self._lives[name] = instance
        instance.last_seen = now
        instance.misses = 0
        instance.report(load)
        if instance.apply(InstanceInput.HEALTHY):
            changes.state_changed.append(instance)
        return changes

    def miss(self, now: float, name: str, *, refused: bool) -> Changes:
        """A look that failed; `refused` when nothing listens there, which is as good as the last miss."""
        changes = Changes()
        instance = self._lives.get(name)
        if instance is None or not instance.alive:
            return changes
        instance.misses += 1
        suspect = refused or instance.misses >= self._config.suspect_after_misses
        if suspect and instance.apply(InstanceInput.MISSED):
            changes.state_changed.append(instance)
        if now - instance.last_seen >= self._config.gone_after_seconds:
            self._end(instance, InstanceInput.LOST, changes)
        return changes

    def _end(self, instance: Instance, why: InstanceInput, changes: Changes) -> None:
        replaced = why is InstanceInput.REPLACED
        if instance.apply(why):
            changes.state_changed.append(instance)
            reason = pb.PLACEMENT_REASON_INSTANCE_RESTARTED if replaced else pb.PLACEMENT_REASON_INSTANCE_LOST
            changes.lost.append((instance, reason))
        if replaced:
            past = self._past.setdefault(instance.name, [])
            past.append(instance.facts.incarnation)
            del past[:-PAST_LIVES_KEPT]

    def _conflict(self, new: Instance) -> tuple[pb.RejectionReason.ValueType, Instance] | None:
        for partner in self._lives.values():
            if partner.model == new.model and partner.name != new.name and partner.state != GONE:
                reason = partner_conflict(new, partner)
                if reason is not None:
                    return reason, partner
        return None


def describe_conflict(new: Instance, reason: pb.RejectionReason.ValueType, partner: Instance) -> str:
    """Both values, so that an operator sees which side to fix."""
    sides = [
        f"{side.name} ({label(pb.Role.DESCRIPTOR, side.role)}, block size {side.facts.block_size}, "
        f"hash {side.facts.hash_algorithm or 'unknown'})"
        for side in (new, partner)
    ]
    return f"{sides[0]} cannot pair with {sides[1]}: {label(pb.RejectionReason.DESCRIPTOR, reason)}"
