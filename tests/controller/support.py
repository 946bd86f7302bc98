"""A cluster with ready instances, and a dispatcher that runs its legs: what most core tests start from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.config import ControllerConfig
from controller.core.cluster import Begun, CallEnd, Cluster
from controller.core.effects import CancelLeg, DropSession, EngineEffect, StartLeg
from controller.core.instance import Facts, Instance, LoadReport
from controller.core.registry import Declared
from controller.core.session import Digest, SessionKey
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import engine_pb2 as engine
from pd_shadow.api.v1 import placement_pb2 as pb

BLOCK = 128
GATEWAY = "gw-1"
SESSION = SessionKey("", "s-1")
DISAGGREGATED = ((common.ROLE_PREFILL, "p"), (common.ROLE_DECODE, "d"))
COLOCATED = ((common.ROLE_COLOCATED, "c"),)


def facts(incarnation: str = "1", block_size: int = BLOCK, **more: Any) -> Facts:
    return Facts(incarnation, block_size, **more)


@dataclass
class World:
    """A core with a clock that only moves when told."""

    cluster: Cluster
    now: float = 0.0
    legs: dict[str, StartLeg] = field(default_factory=dict)
    cancelled: dict[str, common.ShadowReason.ValueType] = field(default_factory=dict)
    dropped: list[SessionKey] = field(default_factory=list)
    # What attached engines were told, and the streams they are attached on.
    told: list[EngineEffect] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    revisions: Any = field(default_factory=lambda: itertools.count(1))

    def pump(self) -> list[StartLeg]:
        """Take effects; returns the legs that started."""
        started = []
        for effect in self.cluster.take_effects():
            match effect:
                case StartLeg():
                    assert effect.leg_id not in self.legs
                    self.legs[effect.leg_id] = effect
                    started.append(effect)
                case CancelLeg():
                    self.cancelled[effect.leg_id] = effect.reason
                case DropSession():
                    self.dropped.append(effect.session)
                case _:
                    self.told.append(effect)
        return started

    def instance(self, name: str) -> Instance:
        instance = self.cluster.registry.named(name)
        assert instance is not None
        return instance

    def healthy(self, name: str, incarnation: str = "1", running: int = 0, waiting: int = 0) -> None:
        self.cluster.observe(self.now, name, facts(incarnation), LoadReport(running=running, waiting=waiting))

    def attach(
        self,
        name: str,
        incarnation: str = "1",
        *,
        hardware: str = "",
        resident: Sequence[tuple[SessionKey, int]] = (),
        **more: Any,
    ) -> None:
        """An engine with the plugin opens its stream; names are as in `world`."""
        model, side = name.split("-")
        role = {"p": common.ROLE_PREFILL, "d": common.ROLE_DECODE, "c": common.ROLE_COLOCATED}[side[0]]
        named = Declared(name, model, role, f"http://{name}", hardware)
        self.streams[name] = self.cluster.attach(self.now, named, facts(incarnation, **more), resident)

    def beat(self, name: str, *, running: int = 0, waiting: int = 0, **plugin: Any) -> None:
        """An attached engine's load report."""
        load = LoadReport(running, waiting, plugin=engine.Load(**plugin))
        self.cluster.heartbeat(self.now, self.instance(name).ref, self.streams[name], load)

    def begin(self, model: str, prompt: int = 1000, session: SessionKey | None = SESSION, **more: Any) -> Begun:
        return self.cluster.begin_call(self.now, GATEWAY, session, model, prompt_tokens=prompt, **more)

    def transfer(self, begun: Begun) -> None:
        self.cluster.progress(self.now, begun.call.call_id, pb.CALL_PHASE_TRANSFER)

    def decode(self, begun: Begun) -> None:
        self.cluster.progress(self.now, begun.call.call_id, pb.CALL_PHASE_DECODE)

    def end(self, begun: Begun, prompt: int, cached: int = 0, output: int = 50, **more: Any) -> list[Any]:
        more = {
            "outcome": common.CALL_OUTCOME_COMPLETED,
            "handoff": common.HANDOFF_HANDED_OFF,
            **more,
        }
        return self.cluster.end_call(
            self.now,
            begun.call.call_id,
            CallEnd(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output, **more),
        )

    def call(self, model: str, prompt: int, cached: int = 0, output: int = 50, **more: Any) -> Begun:
        """A whole call that goes well."""
        begun = self.begin(model, prompt, **more)
        if begun.call.colocated:
            self.decode(begun)
            self.end(begun, prompt, cached, output, handoff=common.HANDOFF_NONE)
            return begun
        self.transfer(begun)
        self.decode(begun)
        self.end(begun, prompt, cached, output)
        return begun

    def render(self, model: str, tokens: int, kept: int = 0, session: SessionKey = SESSION) -> None:
        self.cluster.rendered(
            self.now, GATEWAY, session, model, revision=next(self.revisions), tokens=tokens, kept_tokens=kept
        )

    def finish(
        self,
        leg: StartLeg,
        outcome: common.LegOutcome.ValueType = common.LEG_OUTCOME_DONE,
        cached: int = 0,
        covered: int | None = None,
    ) -> list[StartLeg]:
        """Report a leg's end; returns the legs that started upon it."""
        self.legs.pop(leg.leg_id)
        self.cluster.leg_finished(
            self.now, leg.gateway_id, leg.leg_id, outcome, cached_tokens=cached, covered_tokens=covered
        )
        return self.pump()

    def run_legs(self) -> list[StartLeg]:
        """Let every leg succeed until none is left; returns them in order."""
        done: list[StartLeg] = []
        self.pump()
        while self.legs:
            leg = next(iter(self.legs.values()))
            done.append(leg)
            job = self.cluster.jobs.get(leg.session, leg.model)
            cached = job.binding.prefill_tokens if job and leg.kind == common.LEG_KIND_PREFILL else 0
            self.finish(leg, cached=cached)
        return done


def world(
    *,
    models: tuple[str, ...] = ("a", "b"),
    colocated: tuple[str, ...] = (),
    replicas: int = 1,
    connected: bool = True,
    hardware: str = "",
    plugin: bool = False,
    **config: Any,
) -> World:
    """`replicas` P and D per model, named a-p0, a-d0, …, all ready; one connected dispatcher.

    Models in `colocated` have `replicas` colocated instances instead, named a-c0, …. With `plugin` they attach by
    themselves, else discovery finds them.
    """
    cluster = Cluster(ControllerConfig.model_validate(config), epoch="t")
    result = World(cluster)
    for model in models:
        for role, letter in COLOCATED if model in colocated else DISAGGREGATED:
            for index in range(replicas):
                name = f"{model}-{letter}{index}"
                if plugin:
                    result.attach(name, hardware=hardware)
                else:
                    cluster.declare(Declared(name, model, role, f"http://{name}", hardware=hardware))
                    result.healthy(name)
    if connected:
        cluster.dispatcher_connected(0.0, GATEWAY)
    result.pump()
    return result


def digests(*texts: str, tokens: int = 1000) -> tuple[Digest, ...]:
    """A conversation of equal messages: rolling hashes of `texts`, `tokens` each."""
    found, hash_so_far = [], ""
    for index, text in enumerate(texts, 1):
        hash_so_far += text
        found.append(Digest(hash_so_far.encode().ljust(8, b"."), index * tokens))
    return tuple(found)
