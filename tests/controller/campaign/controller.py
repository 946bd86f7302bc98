"""A controller process: a core, the streams to it, and its looks at the engines it was told of.

What `controller/server` and `controller/discovery` do around the core, without I/O.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from controller.config import ControllerConfig
from controller.core.cluster import Cluster
from controller.core.effects import CancelLeg, DropSession, Effect, StartLeg
from controller.core.instance import Facts, InstanceRef, LoadReport
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller import invariants
from tests.controller.campaign.network import OnEnd, Stream

if TYPE_CHECKING:
    from tests.controller.campaign.engine import Engine
    from tests.controller.campaign.simulation import Simulation

T = TypeVar("T")

TICK_SECONDS = 1.0
LOOK_SECONDS = 1.0
# Which end of a stream is the controller's.
HERE, THERE = 0, 1


def age(incarnation: str) -> int:
    """The number of an engine's life."""
    return int(incarnation.partition(".")[2])


class Controller:
    """One process under one name; `start` begins another life of it, which knows nothing."""

    def __init__(self, simulation: Simulation, name: str, config: ControllerConfig, declared: list[Declared]) -> None:
        self.name = name
        self.life = 0
        self.up = False
        self.cluster = Cluster(config, epoch=f"{name}.0")
        self._simulation = simulation
        self._config = config
        self._declared = declared
        self._work: dict[str, Stream] = {}
        self._attached: dict[str, Stream] = {}
        # Whose life reports on a stream, and the core's number for it.
        self._refs: dict[Stream, tuple[InstanceRef, int]] = {}
        # The life of every engine that this life of the controller took in last, and those that one came after.
        self._latest: dict[str, str] = {}
        self._over: set[tuple[str, str]] = set()
        # Lives that were heard of more than once.
        self._confirmed: set[tuple[str, str]] = set()

    @property
    def leads(self) -> bool:
        return self.up and self._simulation.leader is self

    def start(self) -> None:
        self.life += 1
        self.up = True
        self.cluster = Cluster(self._config, epoch=f"{self.name}.{self.life}")
        self._work, self._attached, self._refs, self._latest, self._over = {}, {}, {}, {}, set()
        self._confirmed = set()
        for declared in self._declared:
            self.cluster.declare(declared)
            self._look_later(declared.name)
        self._tick_later()

    def kill(self) -> None:
        self.up = False
        self.life += 1
        self._simulation.network.kill(self.name)

    def step_down(self) -> None:
        """Another controller leads: every stream ends, and the calls are given up."""
        for stream in [*self._work.values(), *self._attached.values()]:
            stream.close(HERE)
        for gateway in list(self._work):
            self._work_ended(self.life, gateway, self._work[gateway])
        for name, stream in list(self._attached.items()):
            self._stream_ended(self.life, name, stream)
        self.turn(lambda cluster, now: cluster.give_up_calls(now))

    def turn(self, do: Callable[[Cluster, float], T]) -> T:
        """One decision, and what it wants done; raises what the core raises."""
        self._simulation.turns += 1
        try:
            return do(self.cluster, self._simulation.clock.now)
        finally:
            for effect in self.cluster.take_effects():
                self._do(effect)

    def check(self) -> None:
        """What must hold at any time, and the ages of calls."""
        for invariant in invariants.ALWAYS:
            invariant(self.cluster)
        invariants.sessions_fit(self.cluster)
        oldest = self._config.limits.max_call_seconds + 2 * TICK_SECONDS
        for call in self.cluster.calls.values():
            assert self._simulation.clock.now - call.begun <= oldest, f"call {call.call_id} hangs"

    # Gateways.

    def subscribe(self, gateway: str, on_end: OnEnd) -> Stream:
        old = self._work.get(gateway)
        if old is not None:
            old.close(HERE)
        life = self.life
        ends = (lambda ended: self._work_ended(life, gateway, ended), on_end)
        stream = self._simulation.network.open((self.name, gateway), ends)
        self._work[gateway] = stream
        self.turn(lambda cluster, now: cluster.dispatcher_connected(now, gateway))
        return stream

    def _work_ended(self, life: int, gateway: str, stream: Stream) -> None:
        if life == self.life and self._work.get(gateway) is stream:
            del self._work[gateway]
            self.turn(lambda cluster, now: cluster.dispatcher_left(now, gateway))

    # Engines.

    def attach(
        self, engine: Engine, named: Declared, facts: Facts, resident: list[tuple[SessionKey, int]]
    ) -> tuple[Stream, int]:
        """Raises RejectedError."""

        def take(cluster: Cluster, now: float) -> int:
            number = cluster.attach(now, named, facts, resident)
            self._took_in(named.name, facts.incarnation)
            return number

        number = self.turn(take)
        old = self._attached.get(named.name)
        if old is not None:
            old.close(HERE)
        life, engine_life, ref = self.life, engine.life, InstanceRef(named.name, facts.incarnation)
        stream = self._simulation.network.open(
            (self.name, named.name),
            (
                lambda ended: self._stream_ended(life, named.name, ended),
                lambda ended: engine.stream_ended(engine_life, ended),
            ),
        )
        self._attached[named.name] = stream
        self._refs[stream] = (ref, number)
        return stream, number

    def _stream_ended(self, life: int, name: str, stream: Stream) -> None:
        if life != self.life:
            return
        if self._attached.get(name) is stream:
            del self._attached[name]
        ref, number = self._refs.pop(stream, (None, 0))
        if ref is None:
            return
        self.turn(lambda cluster, now: cluster.detach(now, ref, number))

    def report(self, name: str, stream: Stream, do: Callable[[Cluster, float], None]) -> None:
        """What an engine says on its stream; a stream that no longer counts is ended."""
        try:
            self.turn(do)
            self._confirmed.add((name, self._latest[name]))
        except RejectedError:
            stream.close(HERE)
            self._stream_ended(self.life, name, stream)

    def knows(self, name: str, incarnation: str) -> bool:
        """Whether it took in this life. Which of two that it never saw is older, nobody can tell it."""
        return self._latest.get(name) == incarnation

    def _took_in(self, name: str, incarnation: str) -> None:
        before = self._latest.get(name)
        if before == incarnation:
            self._confirmed.add((name, incarnation))
        elif before is not None:
            # Only a life that nothing but its first word is known of may have to go for the one before it.
            assert (name, incarnation) not in self._over or (name, before) not in self._confirmed, (
                f"{name}: {incarnation} came back"
            )
            self._over.discard((name, incarnation))
            self._over.add((name, before))
        self._latest[name] = incarnation

    # Discovery.

    def _look_later(self, name: str) -> None:
        life, random = self.life, self._simulation.random
        self._simulation.clock.after(random.uniform(0.8, 1.2) * LOOK_SECONDS, lambda: self._look(life, name))

    def _look(self, life: int, name: str) -> None:
        """Ask an engine how it is; the answer may take so long that the engine that gave it is no more."""
        if life != self.life:
            return
        simulation, engine = self._simulation, self._simulation.engines[name]
        if not engine.alive or not simulation.network.reaches(self.name, name):
            refused = not engine.alive
            self.turn(lambda cluster, now: cluster.miss(now, name, refused=refused))
            self._look_later(name)
            return
        facts, load = engine.facts, engine.load()
        simulation.clock.after(
            simulation.network.seconds() + simulation.slowness(), lambda: self._seen(life, name, facts, load)
        )

    def _seen(self, life: int, name: str, facts: Facts, load: LoadReport) -> None:
        if life == self.life:
            self.seen(name, facts, load)
            self._look_later(name)

    def seen(self, name: str, facts: Facts, load: LoadReport) -> None:
        """An engine's answer to a look, possibly a late one."""

        def observe(cluster: Cluster, now: float) -> None:
            cluster.observe(now, name, facts, load)
            instance = cluster.registry.named(name)
            if instance is not None and instance.ref.incarnation == facts.incarnation:
                self._took_in(name, facts.incarnation)

        with contextlib.suppress(RejectedError):
            self.turn(observe)

    # Time and effects.

    def _tick_later(self) -> None:
        life = self.life
        self._simulation.clock.after(TICK_SECONDS, lambda: self._tick(life))

    def _tick(self, life: int) -> None:
        if life == self.life:
            self.turn(lambda cluster, now: cluster.tick(now))
            self.check()
            self._tick_later()

    def _do(self, effect: Effect) -> None:
        match effect:
            case StartLeg():
                self._check_start(effect)
                self._tell_gateway(effect.gateway_id, effect)
            case CancelLeg() | DropSession():
                self._tell_gateway(effect.gateway_id, effect)
            case _:
                name = effect.instance.name
                stream = self._attached.get(name)
                if stream is not None and self._refs[stream][0] == effect.instance:
                    engine = self._simulation.engines[name]
                    stream.send(THERE, lambda: engine.told(effect))

    def _tell_gateway(self, gateway_id: str, effect: StartLeg | CancelLeg | DropSession) -> None:
        stream = self._work.get(gateway_id)
        if stream is not None:
            gateway = self._simulation.gateways[gateway_id]
            stream.send(THERE, lambda: gateway.told(effect))

    def _check_start(self, leg: StartLeg) -> None:
        """No leg for a life that is known to be over, for an instance that takes nothing, or for nobody."""
        instance = leg.instance
        assert self.cluster.registry.live(instance.ref) is instance, f"{leg.leg_id} is for a life that is over"
        assert instance.ref.incarnation == self._latest[instance.name], f"{leg.leg_id} is for an old incarnation"
        # A fetch follows its export at once, even if D has gone suspect meanwhile: the export pins blocks on P.
        assert instance.ready or leg.kind == pb.LEG_KIND_FETCH
        assert not instance.draining
        assert leg.gateway_id in self._work, f"{leg.leg_id} is for a gateway that is away"
        self._simulation.legs += 1
