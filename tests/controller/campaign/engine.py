"""An engine, with the plugin or without: it lives, reports, holds sessions, and may be killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controller.core.cluster import Cluster
from controller.core.effects import DropResident, EngineEffect
from controller.core.instance import Facts, InstanceRef, LoadReport
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import engine_pb2
from tests.controller.campaign.network import Stream

if TYPE_CHECKING:
    from tests.controller.campaign.controller import Controller
    from tests.controller.campaign.simulation import Simulation

BLOCK = 128
HEARTBEAT_SECONDS = 1.0


class Engine:
    """One replica; `life` counts its processes."""

    def __init__(self, simulation: Simulation, named: Declared, *, plugin: bool) -> None:
        self.named = named
        self.plugin = plugin
        self.life = 0
        self.alive = False
        self.running = 0
        self.held: dict[SessionKey, int] = {}
        self._simulation = simulation
        self._stream: Stream | None = None
        self._controller: Controller | None = None
        self._number = 0

    @property
    def name(self) -> str:
        return self.named.name

    @property
    def facts(self) -> Facts:
        return Facts(f"life.{self.life}", BLOCK, max_context_tokens=32_768)

    def load(self) -> LoadReport:
        if not self.plugin:
            return LoadReport(self.running)
        room = self._simulation.random.choice((0, 2_000, 50_000))
        return LoadReport(self.running, plugin=engine_pb2.Load(running=self.running, shadow_room_tokens=room))

    def start(self) -> None:
        self.life += 1
        self.alive, self.running, self.held = True, 0, {}
        self._stream = None
        if self.plugin:
            self._attach_later(0.0)

    def kill(self) -> None:
        self.alive = False
        self._simulation.network.kill(self.name)

    def works_for(self, node: str, life: int) -> bool:
        return self.alive and self.life == life and self._simulation.network.reaches(node, self.name)

    # What the plugin does.

    def _attach_later(self, seconds: float) -> None:
        life = self.life
        self._simulation.clock.after(seconds, lambda: self._attach(life))

    def _attach(self, life: int) -> None:
        if life != self.life or not self.alive:
            return
        simulation, controller = self._simulation, self._simulation.leader
        facts, resident = self.facts, list(self.held.items())

        def arrive() -> None:
            # A hello may arrive when the engine that sent it is no more.
            if not controller.leads:
                return
            try:
                stream, number = controller.attach(self, self.named, facts, resident)
            except RejectedError:
                return
            if life == self.life and self.alive:
                self._stream, self._controller, self._number = stream, controller, number
                self._beat(stream)
            else:
                stream.break_up()

        simulation.network.send(self.name, controller.name, arrive)
        simulation.clock.after(1.5, lambda: self._attach(life) if self._stream is None else None)

    def stream_ended(self, life: int, stream: Stream) -> None:
        if life == self.life and self.alive and stream is self._stream:
            self._stream = None
            self._attach_later(self._simulation.random.uniform(0.1, 1.0))

    def _beat(self, stream: Stream) -> None:
        if stream is not self._stream or stream.broken:
            return
        ref, number, load = InstanceRef(self.name, self.facts.incarnation), self._number, self.load()
        self._say(stream, lambda cluster, now: cluster.heartbeat(now, ref, number, load))
        random = self._simulation.random
        if self.held and random.random() < 0.05:
            self._evict(stream, ref)
        self._simulation.clock.after(HEARTBEAT_SECONDS + self._simulation.slowness(), lambda: self._beat(stream))

    def _evict(self, stream: Stream, ref: InstanceRef) -> None:
        random = self._simulation.random
        if random.random() < 0.2:
            self.held.clear()
            self._say(stream, lambda cluster, now: cluster.shrunk(now, ref, None, 0))
            return
        key = random.choice(list(self.held))
        left = self.held[key] = random.randrange(self.held[key] + 1)
        self._say(stream, lambda cluster, now: cluster.shrunk(now, ref, key, left))

    def hold(self, key: SessionKey, tokens: int) -> None:
        self.held[key] = max(tokens, self.held.get(key, 0))

    def progress(self, key: SessionKey, tokens: int) -> None:
        """Tell how far a session's leg has come; only the plugin does."""
        if self._stream is not None:
            ref = InstanceRef(self.name, self.facts.incarnation)
            self._say(self._stream, lambda cluster, now: cluster.progressed(now, ref, key, tokens))

    def told(self, effect: EngineEffect) -> None:
        if isinstance(effect, DropResident) and effect.instance.incarnation == self.facts.incarnation:
            self.held.pop(effect.session, None)

    def _say(self, stream: Stream, do: Callable[[Cluster, float], None]) -> None:
        controller = self._controller
        assert controller is not None
        life = controller.life

        def arrive() -> None:
            if controller.up and controller.life == life:
                controller.report(self.name, stream, do)

        stream.send(0, arrive)
