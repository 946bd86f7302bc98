"""Which instances there are: at most one life per name, and why a life is not taken in.

Discovery looks at declared engines; engines with the plugin attach by themselves. An engine may do both: while it is
attached, its stream alone says who and how it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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
from controller.core.rejection import RejectedError, unknown
from controller.core.switches import Switches
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.reasons import label

# Lives a name has had, remembered so that an old one can never come back.
PAST_LIVES_KEPT = 16
# Names come and go with attached engines; of those that are gone and not declared, so many are remembered.
GONE_KEPT = 64


@dataclass(frozen=True)
class Declared:
    """An instance that discovery names, or that names itself when it attaches."""

    name: str
    model: str
    role: pb.Role.ValueType
    url: str
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
        # What every call asks for, made anew once names came or went: models, and lives by model in order of coming.
        self._models: list[str] | None = None
        self._by_model: dict[str, list[Instance]] = {}
        self._past: dict[str, list[str]] = {}
        self.switches = Switches()
        self._streams = itertools.count(1)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._lives.values())

    def declare(self, declared: Declared) -> None:
        self._declared[declared.name] = declared
        self._models = None

    def withdraw(self, name: str) -> Changes:
        """Discovery names an instance no longer: its life ends, unless it is attached and speaks for itself."""
        changes = Changes()
        self._declared.pop(name, None)
        instance = self._lives.get(name)
        if instance is not None and instance.alive and not instance.stream:
            self._end(instance, InstanceInput.LOST, changes)
        self._forget_gone()
        return changes

    def declared(self) -> list[Declared]:
        return list(self._declared.values())

    def models(self) -> list[str]:
        """Every model some instance is declared for or attached with, sorted."""
        if self._models is None:
            lives = self._lives.values()
            self._models = sorted({d.model for d in self._declared.values()} | {i.model for i in lives})
            self._by_model = {m: [i for i in lives if i.model == m] for m in self._models}
        return self._models

    def names(self) -> set[str]:
        """Every name that is declared or was seen."""
        return self._declared.keys() | self._lives.keys()

    def named(self, name: str) -> Instance | None:
        return self._lives.get(name)

    def check_known(self, name: str, *, field: str) -> None:
        """Raise RejectedError, with the nearest known name, unless the name is declared or was seen."""
        if name not in self._declared and name not in self._lives:
            raise unknown(pb.REJECTION_REASON_UNKNOWN_INSTANCE, "instance", name, self.names(), field=field)

    def check_model(self, model: str, *, field: str) -> None:
        """Raise RejectedError, with the nearest known name, unless some instance is known for the model."""
        models = self.models()
        if model not in models:
            raise unknown(pb.REJECTION_REASON_UNKNOWN_MODEL, "model", model, models, field=field)

    def live(self, ref: InstanceRef | None) -> Instance | None:
        """The instance behind a reference, if that very life is still the current one."""
        instance = self._lives.get(ref.name) if ref else None
        return instance if instance and instance.ref == ref and instance.alive else None

    def ready(self, model: str, *roles: pb.Role.ValueType) -> list[Instance]:
        self.models()
        return [i for i in self._by_model.get(model, ()) if i.role in roles and i.ready]

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
        attached = self._lives.get(name)
        if attached is not None and attached.stream:
            if attached.facts.incarnation == facts.incarnation:
                # What only the engine's own metrics page tells.
                attached.load = replace(
                    attached.load, failed_transfers=load.failed_transfers, expired_exports=load.expired_exports
                )
            return changes
        instance = self._current_life(name, facts, changes)
        if instance is None:
            instance = _life(now, declared, facts, request_level=True)
            if self._refused(instance, changes):
                return changes
            self._begin(now, instance)
        else:
            instance.confirmed = True
        self._seen(now, instance, load, changes)
        return changes

    def attach(self, now: float, named: Declared, facts: Facts) -> tuple[Changes, int]:
        """An engine with the plugin opened a stream: the changes, and the stream's number (0 when refused).

        An older stream of the same life no longer counts. Raises RejectedError for an incarnation that was already
        replaced, and for a model or role other than this name is known with.
        """
        self._check_identity(named, facts)
        changes = Changes()
        instance = self._current_life(named.name, facts, changes)
        attached = _life(now, named, facts, request_level=False)
        if self._refused(attached, changes):
            return changes, 0
        if instance is None:
            self._forget_gone()
            instance = attached
            self._begin(now, instance)
        else:
            # Discovery saw this life first, or its stream broke; what is placed on it stays.
            instance.confirmed = True
            instance.facts, instance.url, instance.request_level = facts, named.url, False
            instance.hardware = named.hardware or instance.hardware
        instance.stream = next(self._streams)
        self._seen(now, instance, instance.load, changes)
        return changes, instance.stream

    def attached(self, ref: InstanceRef, stream: int) -> Instance:
        """The instance that reports on this stream; raises RejectedError when the stream no longer counts."""
        instance = self._lives.get(ref.name)
        if instance is not None and instance.ref == ref and instance.stream == stream:
            return instance
        if instance is not None and instance.ref != ref:
            raise _stale(instance, ref.incarnation)
        raise RejectedError(
            pb.REJECTION_REASON_UNKNOWN_INSTANCE, f"{ref.name} was given up for lost; attach again", field="ref.name"
        )

    def heartbeat(self, now: float, ref: InstanceRef, stream: int, load: LoadReport) -> Changes:
        """A load report on a stream; raises RejectedError when the stream no longer counts."""
        instance = self.attached(ref, stream)
        changes = Changes()
        instance.confirmed = True
        known = instance.load
        load = replace(load, failed_transfers=known.failed_transfers, expired_exports=known.expired_exports)
        self._seen(now, instance, load, changes)
        return changes

    def detach(self, ref: InstanceRef, stream: int) -> Changes:
        """A stream ended. If it still counted, the instance gets nothing new until somebody sees it again."""
        changes = Changes()
        instance = self.live(ref)
        if instance is not None and instance.stream == stream:
            instance.stream = 0
            if instance.apply(InstanceInput.MISSED):
                changes.state_changed.append(instance)
        return changes

    def tick(self, now: float) -> Changes:
        """Attached engines that have gone silent, and detached ones that no discovery looks at."""
        changes = Changes()
        patience = self._config.suspect_after_misses * self._config.poll_interval_seconds
        for instance in self._lives.values():
            if not instance.alive or not (instance.stream or instance.name not in self._declared):
                continue
            silent = now - instance.last_seen
            if silent >= patience and instance.apply(InstanceInput.MISSED):
                changes.state_changed.append(instance)
            if silent >= self._config.gone_after_seconds:
                self._end(instance, InstanceInput.LOST, changes)
        return changes

    def miss(self, now: float, name: str, *, refused: bool) -> Changes:
        """A look that failed; `refused` when nothing listens there, which is as good as the last miss."""
        changes = Changes()
        instance = self._lives.get(name)
        if instance is None or not instance.alive or instance.stream:
            return changes
        instance.misses += 1
        suspect = refused or instance.misses >= self._config.suspect_after_misses
        if suspect and instance.apply(InstanceInput.MISSED):
            changes.state_changed.append(instance)
        if now - instance.last_seen >= self._config.gone_after_seconds:
            self._end(instance, InstanceInput.LOST, changes)
        return changes

    def _check_identity(self, named: Declared, facts: Facts) -> None:
        life = self._lives.get(named.name)
        same_life = life if life is not None and life.facts.incarnation == facts.incarnation else None
        for known in (self._declared.get(named.name), same_life):
            for what in ("model", "role") if known is not None else ():
                if getattr(known, what) != getattr(named, what):
                    raise RejectedError(
                        pb.REJECTION_REASON_INVALID_FIELD,
                        f"hello.{what}: {named.name} is known here with another {what}; make both the same",
                        field=f"hello.{what}",
                    )

    def _current_life(self, name: str, facts: Facts, changes: Changes) -> Instance | None:
        """The life that goes on under this incarnation, an older one ended; None when a new one begins."""
        instance = self._lives.get(name)
        if instance is None:
            return None
        if instance.facts.incarnation != facts.incarnation:
            if facts.incarnation in self._past.get(name, ()):
                raise _stale(instance, facts.incarnation)
            self._end(instance, InstanceInput.REPLACED, changes)
            return None
        # Given up for lost, yet the same life: its cache may have survived, but nothing here still counts on it.
        return instance if instance.alive else None

    def _refused(self, new: Instance, changes: Changes) -> bool:
        conflict = self._conflict(new)
        if conflict is not None:
            changes.refused = (new, *conflict)
        return conflict is not None

    def _seen(self, now: float, instance: Instance, load: LoadReport, changes: Changes) -> None:
        instance.last_seen = now
        instance.misses = 0
        instance.report(load)
        if instance.apply(InstanceInput.HEALTHY):
            changes.state_changed.append(instance)

    def _begin(self, now: float, life: Instance) -> None:
        """A life takes its name, and with it what operators switched for the name."""
        self._lives[life.name] = life
        self._models = None
        life.drained = life.name in self.switches.drained
        life.pause(now, paused=self.switches.pauses(life.name, life.model))

    def _forget_gone(self) -> None:
        gone = [name for name, life in self._lives.items() if not life.alive and name not in self._declared]
        for name in gone[: max(0, len(gone) - GONE_KEPT)]:
            del self._lives[name]
            self._past.pop(name, None)
        self._models = None
        self.switches.keep_only(self.names(), set(self.models()))

    def _end(self, instance: Instance, why: InstanceInput, changes: Changes) -> None:
        replaced = why is InstanceInput.REPLACED
        instance.stream = 0
        if instance.apply(why):
            changes.state_changed.append(instance)
            reason = pb.PLACEMENT_REASON_INSTANCE_RESTARTED if replaced else pb.PLACEMENT_REASON_INSTANCE_LOST
            changes.lost.append((instance, reason))
        if replaced:
            past = self._past.setdefault(instance.name, [])
            past.append(instance.facts.incarnation)
            del past[:-PAST_LIVES_KEPT]
        elif not instance.confirmed and self._past.get(instance.name):
            # Its only word replaced a life that may well be the running one, and must not lock it out for good.
            self._past[instance.name].pop()

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


def _life(now: float, named: Declared, facts: Facts, *, request_level: bool) -> Instance:
    return Instance(
        named.name,
        named.model,
        named.role,
        named.url,
        facts,
        request_level,
        created=now,
        hardware=named.hardware,
    )


def _stale(current: Instance, incarnation: str) -> RejectedError:
    return RejectedError(
        pb.REJECTION_REASON_STALE_INCARNATION,
        f"{current.name} is registered as {current.facts.incarnation}, newer than {incarnation}",
        field="ref.incarnation",
    )
