"""One seeded schedule: a cluster is drawn, faults strike while calls run, all heals, and the books must close."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from controller.config import ControllerConfig
from controller.core.cluster import Cluster
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller import invariants
from tests.controller.campaign.clock import Clock
from tests.controller.campaign.controller import LOOK_SECONDS, Controller
from tests.controller.campaign.engine import Engine
from tests.controller.campaign.gateway import CALL_BOUND_SECONDS, ClientCall, Gateway
from tests.controller.campaign.network import Network, Weather

START_SECONDS = 2.0
FAULT_SECONDS = 15.0
# Time for everything to find itself again: an engine that seemed gone, a gateway that connects, a quarantine.
HEAL_SECONDS = 10.0
# The slowest call, when all is well.
SERVE_SECONDS = 7.0
MAX_CALL_SECONDS = 12.0
SESSION_IDLE_SECONDS = 60.0
SESSIONS = [SessionKey("", f"s{n}") for n in range(5)] + [SessionKey("t", "s0")]
SIDES = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE, "c": pb.ROLE_COLOCATED}
# Short, so that every deadline is met within a schedule; caps small enough to be met too.
CONFIG = {
    "discovery": {"poll_interval_seconds": LOOK_SECONDS, "suspect_after_misses": 3, "gone_after_seconds": 5.0},
    "shadow": {
        "prefill_deadline_seconds": 5.0,
        "export_deadline_seconds": 3.0,
        "fetch_deadline_seconds": 4.0,
        "max_backoff_seconds": 4.0,
    },
    "links": {"quarantine_seconds": 2.0, "max_quarantine_seconds": 8.0},
    "limits": {
        "max_sessions": 4,
        "session_idle_seconds": SESSION_IDLE_SECONDS,
        "max_calls_in_flight": 40,
        "max_call_seconds": MAX_CALL_SECONDS,
        "gateway_grace_seconds": 3.0,
        "events_kept": 200,
    },
}


class Result(NamedTuple):
    """What a schedule did; equal for equal seeds."""

    turns: int
    legs: int
    outcomes: Counter[str]
    digest: str


class Simulation:
    """Everything there is, drawn from one seed."""

    def __init__(self, seed: int, say: Callable[[str], None] | None = None) -> None:
        self.random = random = Random(seed)
        self.clock = Clock()
        self.network = Network(self.clock, random)
        self.calls: list[ClientCall] = []
        self.turns = 0
        self.legs = 0
        # (P, D) whose transfers fail.
        self.bad_links: set[tuple[str, str]] = set()
        self._slow = 0.0
        self._told = say
        self._digest = hashlib.sha256()
        config = ControllerConfig.model_validate(CONFIG)
        self.engines = {named.name: Engine(self, named, plugin=random.random() < 0.5) for named in self._draw_engines()}
        # An engine with the plugin may be known to discovery too.
        declared = [e.named for e in self.engines.values() if not e.plugin or random.random() < 0.3]
        self.controllers = [
            Controller(self, f"ctl-{n}", config, declared) for n in range(2 if random.random() < 0.3 else 1)
        ]
        self.leader = self.controllers[0]
        self.gateways = {f"gw-{n}": Gateway(self, f"gw-{n}") for n in range(random.randint(1, 3))}
        self.models = sorted({engine.named.model for engine in self.engines.values()})

    def _draw_engines(self) -> list[Declared]:
        random = self.random
        shared = random.random() < 0.2
        return [
            Declared(f"{model}-{side}{n}", model, SIDES[side], f"http://{model}-{side}{n}", "gpu" if shared else "")
            for model in ("a", "b")
            for side in ("c" if model == "b" and random.random() < 0.3 else "pd")
            for n in range(random.randint(1, 2))
        ]

    def _nodes(self) -> list[Controller | Engine | Gateway]:
        return [*self.controllers, *self.engines.values(), *self.gateways.values()]

    def say(self, what: str) -> None:
        """Tell what happens, and make it part of what must be equal in a replay."""
        line = f"{self.clock.now:8.3f}  {what}"
        self._digest.update(line.encode())
        if self._told is not None:
            self._told(line)

    def slowness(self) -> float:
        """How much later a report comes than it should."""
        return self.random.uniform(0.0, self._slow) if self._slow else 0.0

    def run(self) -> Result:
        """The whole schedule; raises AssertionError, or whatever else a fault in the core raises."""
        random, clock = self.random, self.clock
        for node in self._nodes():
            node.start()
        clock.run(START_SECONDS)
        for _ in range(random.randint(15, 45)):
            clock.after(random.uniform(0.0, FAULT_SECONDS), self._client)
        for _ in range(random.randint(2, 10)):
            fault = random.choice(FAULTS)
            clock.after(random.uniform(0.0, FAULT_SECONDS), lambda fault=fault: fault(self))  # type: ignore[misc]
        clock.run(START_SECONDS + FAULT_SECONDS)
        self._heal()
        clock.run(clock.now + HEAL_SECONDS)
        self._serves()
        self._closes_its_books()
        for controller in self.controllers:
            for event in controller.cluster.events():
                self._digest.update(f"{event.time:.6f} {event.subject} {event.reason} {event.message}".encode())
        outcomes = Counter(call.outcome for call in self.calls)
        return Result(self.turns, self.legs, outcomes, self._digest.hexdigest()[:12])

    def _client(self) -> None:
        gateways = [gateway for gateway in self.gateways.values() if gateway.alive]
        if gateways:
            self.random.choice(gateways).call(self.random.choice(SESSIONS), self.random.choice(self.models))

    # The end of a schedule.

    def _heal(self) -> None:
        self.say("everything heals")
        self.network.join_all()
        self.network.weather = Weather()
        self._slow = 0.0
        self.bad_links.clear()
        for node in self._nodes():
            if not (node.up if isinstance(node, Controller) else node.alive):
                node.start()
        for controller in self.controllers:
            operate(
                controller,
                lambda c, now: c.operators.set_shadow_policy(now, c.shadow_policy.changed(approach="predictive")),
            )
            for name in self.engines:
                operate(controller, lambda c, now, name=name: c.operators.undrain(now, name))  # type: ignore[misc]

    def _serves(self) -> None:
        """Every session is served on every model, by every gateway in turn."""
        gateways = list(self.gateways.values())
        last = [
            gateways[n % len(gateways)].call(session, model)
            for n, (session, model) in enumerate((s, m) for s in SESSIONS for m in self.models)
        ]
        self.clock.run(self.clock.now + SERVE_SECONDS)
        for call in last:
            assert call.placed, f"{call.session} is not served on {call.model}: {call.outcome or 'no answer'}"
            assert call.outcome in ("completed", "CALL_OUTCOME_CLIENT_GONE"), call.outcome
        for call in self.calls:
            assert call.outcome, f"a call of {call.session} on {call.model} hangs since {call.begun:.3f}"
            assert call.ended - call.begun <= CALL_BOUND_SECONDS

    def _closes_its_books(self) -> None:
        """Once every deadline is past nothing is in flight, and once every session expired nothing is remembered."""
        for controller in self.controllers:
            # Shadow work is never done while contexts are evicted; without it, what runs must end.
            operate(
                controller,
                lambda c, now: c.operators.set_shadow_policy(now, c.shadow_policy.changed(approach="no-shadow")),
            )
        self.clock.run(self.clock.now + MAX_CALL_SECONDS + 2 * LOOK_SECONDS)
        for controller in self.controllers:
            controller.check()
            invariants.nothing_is_in_flight(controller.cluster)
            # Engines that seemed gone are ready again: no state is a dead end.
            for instance in controller.cluster.registry:
                watched = controller.leads or instance.request_level
                assert instance.ready or not watched, f"{controller.name}: {instance.name} never came back"
        for controller in self.controllers:
            controller.turn(lambda cluster, now: cluster.tick(now + SESSION_IDLE_SECONDS))
            controller.check()
            invariants.nothing_is_remembered(controller.cluster)


def operate(controller: Controller, do: Callable[[Cluster, float], Any]) -> None:
    """What an operator asks for may be refused, such as a name that was not seen yet."""
    try:
        controller.turn(do)
    except RejectedError as error:
        assert error.reason == pb.REJECTION_REASON_UNKNOWN_INSTANCE  # noqa: PT017


# Faults: each strikes once, and may mend after a while.


def _later(simulation: Simulation, do: Callable[[], None], shortest: float = 0.1, longest: float = 9.0) -> None:
    simulation.clock.after(simulation.random.uniform(shortest, longest), do)


def kill_engine(simulation: Simulation) -> None:
    engine = simulation.random.choice(list(simulation.engines.values()))
    simulation.say(f"{engine.name} is killed")
    engine.kill()
    _later(simulation, lambda: None if engine.alive else engine.start())


def restart_engine(simulation: Simulation) -> None:
    """So fast that nobody sees it away."""
    engine = simulation.random.choice(list(simulation.engines.values()))
    simulation.say(f"{engine.name} restarts")
    engine.kill()
    engine.start()


def late_word_of_an_old_life(simulation: Simulation) -> None:
    """An engine restarts, and what its old process said last arrives after the new one was seen."""
    engine, random = simulation.random.choice(list(simulation.engines.values())), simulation.random
    facts, load, held = engine.facts, engine.load(), list(engine.held.items())
    if not simulation.leader.knows(engine.name, facts.incarnation):
        return
    simulation.say(f"{engine.name} restarts, and its old life speaks up late")
    engine.kill()
    engine.start()
    attaches = engine.plugin and random.random() < 0.7
    leader, life = simulation.leader, simulation.leader.life

    def arrive() -> None:
        controller = simulation.leader
        if not controller.leads or controller.life != life or controller is not leader:
            return
        if not attaches:
            controller.seen(engine.name, facts, load)
            return
        try:
            stream, _ = controller.attach(engine, engine.named, facts, held)
        except RejectedError:
            return
        stream.break_up()

    _later(simulation, arrive, 0.5, 4.0)


def kill_gateway(simulation: Simulation) -> None:
    gateway = simulation.random.choice(list(simulation.gateways.values()))
    simulation.say(f"{gateway.name} is killed")
    gateway.kill()
    _later(simulation, lambda: None if gateway.alive else gateway.start())


def restart_controller(simulation: Simulation) -> None:
    controller = simulation.leader
    simulation.say(f"{controller.name} is killed")
    controller.kill()
    _later(simulation, lambda: None if controller.up else controller.start(), 0.0, 4.0)


def step_down(simulation: Simulation) -> None:
    old = simulation.leader
    others = [controller for controller in simulation.controllers if controller is not old and controller.up]
    if not others:
        return
    simulation.say(f"{old.name} steps down")
    simulation.leader = others[0]
    if old.up:
        old.step_down()


def _cut(simulation: Simulation, a: str, b: str) -> None:
    simulation.say(f"{a} and {b} are cut off from each other")
    simulation.network.cut(a, b)
    _later(simulation, lambda: simulation.network.join(a, b))


def cut_controller_and_engine(simulation: Simulation) -> None:
    random = simulation.random
    _cut(simulation, random.choice(simulation.controllers).name, random.choice(list(simulation.engines)))


def cut_controller_and_gateway(simulation: Simulation) -> None:
    random = simulation.random
    _cut(simulation, random.choice(simulation.controllers).name, random.choice(list(simulation.gateways)))


def cut_gateway_and_engine(simulation: Simulation) -> None:
    random = simulation.random
    _cut(simulation, random.choice(list(simulation.gateways)), random.choice(list(simulation.engines)))


def bad_weather(simulation: Simulation) -> None:
    """Messages are late and so out of order, lost, or doubled."""
    random = simulation.random
    weather = Weather(random.choice((0.0, 0.1, 0.3)), random.choice((0.0, 0.2)), random.choice((0.02, 0.2, 0.8)))
    simulation.say(f"{weather}")
    simulation.network.weather = weather

    def clear() -> None:
        simulation.network.weather = Weather()

    _later(simulation, clear)


def slow_reports(simulation: Simulation) -> None:
    slow = simulation.random.choice((0.5, 2.0, 6.0))
    simulation.say(f"reports are up to {slow:g} s late")
    simulation._slow = slow

    def mend() -> None:
        simulation._slow = 0.0

    _later(simulation, mend)


def bad_link(simulation: Simulation) -> None:
    random = simulation.random
    prefills = [e for e in simulation.engines.values() if e.named.role == pb.ROLE_PREFILL]
    if not prefills:
        return
    prefill = random.choice(prefills)
    decodes = [
        e.name
        for e in simulation.engines.values()
        if e.named.role == pb.ROLE_DECODE and e.named.model == prefill.named.model
    ]
    link = (prefill.name, random.choice(decodes))
    simulation.say(f"transfers from {link[0]} to {link[1]} fail")
    simulation.bad_links.add(link)
    _later(simulation, lambda: simulation.bad_links.discard(link), 2.0, 15.0)


def drain(simulation: Simulation) -> None:
    name = simulation.random.choice(list(simulation.engines))
    controller = simulation.leader
    simulation.say(f"{name} drains")
    operate(controller, lambda cluster, now: cluster.operators.drain(now, name))
    _later(simulation, lambda: operate(controller, lambda cluster, now: cluster.operators.undrain(now, name)))


def change_policy(simulation: Simulation) -> None:
    approach = simulation.random.choice(("no-shadow", "eager", "harvest-slo", "predictive"))
    simulation.say(f"the policy is {approach}")
    operate(
        simulation.leader,
        lambda cluster, now: cluster.operators.set_shadow_policy(now, cluster.shadow_policy.changed(approach=approach)),
    )


# A new way to fail, or to operate the cluster, is one more function here.
FAULTS: tuple[Callable[[Simulation], None], ...] = (
    kill_engine,
    kill_engine,
    restart_engine,
    late_word_of_an_old_life,
    kill_gateway,
    restart_controller,
    step_down,
    cut_controller_and_engine,
    cut_controller_and_engine,
    cut_controller_and_gateway,
    cut_gateway_and_engine,
    bad_weather,
    bad_weather,
    slow_reports,
    bad_link,
    drain,
    change_policy,
)
