"""Random histories of calls, renderings, legs, failures and restarts; the invariants hold after every step."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controller.core.cluster import Begun
from controller.core.effects import StartLeg
from controller.core.session import SessionKey
from controller.core.shadow_jobs import PLUGIN_PREFILL_LEGS
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller import invariants
from tests.controller.support import GATEWAY, World, world

MODELS = ("a", "b")
keys = st.sampled_from([SessionKey("", "s1"), SessionKey("", "s2"), SessionKey("t", "s1")])
models = st.sampled_from(MODELS)
COLOCATED = ("c",)
names = st.sampled_from(
    [f"{m}-{side}{n}" for m in MODELS for side in ("c" if m in COLOCATED else "pd") for n in (0, 1)]
)
tokens = st.integers(1, 9000)
shares = st.floats(0, 1)
indexes = st.integers(0, 1000)
rooms = st.one_of(st.none(), st.integers(0, 6000))


class LegEnd(NamedTuple):
    index: int
    # Shares of the tokens asked for; None from an engine that does not say.
    cached: float
    covered: float | None
    outcome: pb.LegOutcome.ValueType


leg_ends = st.builds(
    LegEnd,
    indexes,
    shares,
    st.one_of(st.none(), shares),
    st.sampled_from([pb.LEG_OUTCOME_DONE] * 8 + [outcome for outcome in pb.LegOutcome.values() if outcome]),
)


class ClusterHistory(RuleBasedStateMachine):
    """Drives one core as gateways, engines and time do, in any order."""

    @initialize(attached=st.dictionaries(names, rooms))
    def start(self, attached: dict[str, int | None]) -> None:
        self.w: World = world(
            models=MODELS,
            colocated=COLOCATED,
            replicas=2,
            limits={"max_sessions": 2, "session_idle_seconds": 300, "max_call_seconds": 500},
        )
        self.calls: list[Begun] = []
        self.lives: Counter[str] = Counter()
        self.connected = True
        self.rooms = dict(attached)
        for name, room in attached.items():
            self.w.attach(name)
            self.w.beat(name, shadow_room_tokens=room)

    def _started(self) -> None:
        """No leg starts beside normal work unless the plugin sees to that, or on a taken instance or link."""
        for leg in self.w.pump():
            self._check_start(leg)

    def _check_start(self, leg: StartLeg) -> None:
        # A fetch follows its export at once, even if D has gone suspect or was paused meanwhile: the export pins blocks
        # on P. A drain ends what it meets.
        assert not leg.instance.draining
        assert leg.kind == pb.LEG_KIND_FETCH or not leg.instance.paused
        assert leg.instance.ready or (leg.kind == pb.LEG_KIND_FETCH and leg.instance.alive)
        assert self.connected
        if leg.kind == pb.LEG_KIND_FETCH:
            assert leg.instance.gate.shadow_chunks == 1
        else:
            policy = self.w.cluster.shadow_policy
            assert policy.enabled
            assert leg.normal_priority == policy.eager
            assert leg.leg_id in leg.instance.shadow_legs
            assert leg.kind == pb.LEG_KIND_PREFILL or not leg.instance.colocated
            if leg.instance.request_level:
                assert len(leg.instance.shadow_legs) == 1
                if not policy.eager:
                    assert not (leg.instance.waiting_requests if leg.instance.colocated else leg.instance.prefill_calls)
            assert list(leg.instance.shadow_legs.values()).count(pb.LEG_KIND_PREFILL) <= PLUGIN_PREFILL_LEGS
        if leg.kind == pb.LEG_KIND_EXPORT:
            job = self.w.cluster.jobs.get(leg.session, leg.model)
            assert job is not None
            assert job.leg is not None
            assert job.decode is not None
            room = job.decode.shadow_room_tokens
            assert room is None or job.leg.chunk.tokens <= room
        assert leg.upto_tokens % 128 == 0

    @rule(key=st.one_of(st.none(), keys), model=models, prompt=tokens)
    def begin(self, key: SessionKey | None, model: str, prompt: int) -> None:
        cluster = self.w.cluster
        if cluster.registry.ready(model, pb.ROLE_DECODE, pb.ROLE_COLOCATED):
            begun = self.w.begin(model, prompt, session=key)
            self.calls.append(begun)
            self._started()
            assert begun.call.colocated == (model in COLOCATED)
            for placed in (begun.call.prefill, begun.call.decode):
                assert placed is None or not placed.instance.draining
            for leg in begun.call.prefill.instance.shadow_legs if begun.call.prefill else ():
                # A normal call meets an export, which is short, a prefill that was told to stop, a plugin, or a peer.
                started = self.w.legs[leg]
                stops = started.kind == pb.LEG_KIND_EXPORT or leg in self.w.cancelled
                assert stops or not started.instance.request_level or cluster.shadow_policy.eager

    @precondition(lambda self: self.calls)
    @rule(index=indexes)
    def move_on(self, index: int) -> None:
        begun = self.calls[index % len(self.calls)]
        if begun.call.call_id in self.w.cluster.calls:
            self.w.transfer(begun) if begun.call.phase == 0 else self.w.decode(begun)
            self._started()

    @precondition(lambda self: self.calls)
    @rule(
        index=indexes,
        prompt=tokens,
        cached=tokens,
        output=st.integers(0, 300),
        outcome=st.sampled_from([pb.CALL_OUTCOME_COMPLETED, pb.CALL_OUTCOME_CLIENT_GONE]),
        handoff=st.sampled_from([pb.HANDOFF_HANDED_OFF, pb.HANDOFF_RECOMPUTED, pb.HANDOFF_NONE]),
    )
    def end(
        self,
        index: int,
        prompt: int,
        cached: int,
        output: int,
        outcome: pb.CallOutcome.ValueType,
        handoff: pb.Handoff.ValueType,
    ) -> None:
        begun = self.calls.pop(index % len(self.calls))
        if begun.call.call_id in self.w.cluster.calls:
            self.w.end(begun, prompt, min(cached, prompt), output, outcome=outcome, handoff=handoff)
            self._started()

    @rule(key=keys, model=models, length=st.integers(1000, 9000), ends=st.lists(leg_ends, max_size=12))
    def follow(self, key: SessionKey, model: str, length: int, ends: list[LegEnd]) -> None:
        """A call on one model, its context rendered for the other, and some legs upon it: how shadows grow."""
        self.begin(key, model, length)
        self.render(key, next(other for other in MODELS if other != model), length, length)
        self._run(ends)

    @rule(key=keys, model=models, length=tokens, kept=tokens)
    def render(self, key: SessionKey, model: str, length: int, kept: int) -> None:
        self.w.render(model, length, min(kept, length), session=key)
        self._started()

    @precondition(lambda self: self.w.legs)
    @rule(ends=st.lists(leg_ends, min_size=1, max_size=12))
    def finish(self, ends: list[LegEnd]) -> None:
        self._run(ends)

    def _run(self, ends: list[LegEnd]) -> None:
        for end in ends:
            if self.w.legs:
                leg = list(self.w.legs.values())[end.index % len(self.w.legs)]
                says = end.covered is not None and not leg.instance.request_level
                covered = int((end.covered or 0) * leg.upto_tokens) if says else None
                for started in self.w.finish(leg, end.outcome, int(end.cached * leg.upto_tokens), covered):
                    self._check_start(started)

    def _life(self, name: str, again: bool) -> str:
        """The incarnation that is known, or a new one."""
        if again:
            return self.w.instance(name).ref.incarnation
        self.lives[name] += 1
        return f"life-{self.lives[name]}"

    @rule(name=names, again=st.booleans())
    def look(self, name: str, again: bool) -> None:
        self.w.healthy(name, self._life(name, again))
        self._started()

    @rule(name=names, again=st.booleans(), resident=st.lists(st.tuples(keys, tokens), max_size=3))
    def attach(self, name: str, again: bool, resident: list[tuple[SessionKey, int]]) -> None:
        self.w.attach(name, self._life(name, again), resident=resident)
        assert not self.w.instance(name).request_level
        self._started()

    @rule(name=names)
    def detach(self, name: str) -> None:
        if name in self.w.streams:
            self.w.cluster.detach(self.w.now, self.w.instance(name).ref, self.w.streams[name])
            self._started()

    @rule(name=names, running=st.integers(0, 2), room=rooms)
    def report(self, name: str, running: int, room: int | None) -> None:
        self.rooms[name] = room
        if self.w.instance(name).stream:
            self.w.beat(name, running=running, shadow_room_tokens=room)
            assert self.w.instance(name).ready or self.w.instance(name).draining
            self._started()

    @precondition(lambda self: self.w.legs)
    @rule(index=indexes, covered=tokens)
    def progress(self, index: int, covered: int) -> None:
        leg = list(self.w.legs.values())[index % len(self.w.legs)]
        self.w.cluster.progressed(self.w.now, leg.instance.ref, leg.session, covered)
        self._started()

    @precondition(lambda self: len(self.w.cluster.sessions))
    @rule(index=indexes, model=models, on_prefill=st.booleans(), reset=st.booleans(), remaining=tokens)
    def evict(self, index: int, model: str, on_prefill: bool, reset: bool, remaining: int) -> None:
        sessions = list(self.w.cluster.sessions)
        session = sessions[index % len(sessions)]
        binding = session.binding(model)
        ref = binding.prefill if on_prefill else binding.decode
        if ref is None:
            return
        self.w.cluster.shrunk(self.w.now, ref, None if reset else session.key, 0 if reset else remaining)
        for touched in sessions if reset else [session]:
            kept = touched.binding(model)
            assert kept.prefill != ref or kept.prefill_tokens <= (0 if reset else remaining)
            assert kept.decode != ref or kept.decode_tokens <= (0 if reset else remaining)
        self._started()

    @rule(name=names, running=st.integers(0, 3), waiting=st.sampled_from([0, 0, 1]))
    def look_under_load(self, name: str, running: int, waiting: int) -> None:
        lives = self.lives[name]
        self.w.healthy(name, f"life-{lives}" if lives else "1", running, waiting)
        self._started()

    @rule(change=st.sampled_from([{"approach": "eager"}, {"approach": "no-shadow"}, {"approach": "harvest-slo"}]))
    def set_policy(self, change: dict[str, str]) -> None:
        self.w.cluster.operators.set_shadow_policy(self.w.now, self.w.cluster.shadow_policy.changed(**change))
        self._started()

    @rule(name=names, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        calls = dict(self.w.cluster.calls)
        (self.w.cluster.operators.drain if draining else self.w.cluster.operators.undrain)(self.w.now, name)
        self._started()
        instance = self.w.instance(name)
        assert self.w.cluster.calls == calls
        if draining:
            assert not instance.ready
            assert not instance.shadow_legs
            assert instance.fetch_leg is None

    @rule(name=names, leaving=st.booleans())
    def leave(self, name: str, leaving: bool) -> None:
        self.w.cluster.mark_leaving(self.w.now, name, leaving=leaving)
        self._started()
        assert self.w.instance(name).leaving == leaving

    @rule(name=names, scope=st.sampled_from(["cluster", "model", "instance"]), paused=st.booleans())
    def pause(self, name: str, scope: str, paused: bool) -> None:
        cluster = self.w.cluster
        match scope:
            case "cluster":
                cluster.operators.pause_cluster(self.w.now, paused=paused)
            case "model":
                cluster.operators.pause_model(self.w.now, self.w.instance(name).model, paused=paused)
            case _:
                cluster.operators.pause_instance(self.w.now, name, paused=paused)
        self._started()
        assert not paused or self.w.instance(name).paused

    @rule(key=keys, name=names, unbind=st.booleans())
    def rebind(self, key: SessionKey, name: str, unbind: bool) -> None:
        instance = self.w.instance(name)
        if self.w.cluster.sessions.get(key) is None or not (instance.ready or unbind):
            return
        side = "decode" if instance.role == pb.ROLE_DECODE else "prefill"
        sides: dict[str, str | None] = {"prefill": None, "decode": None, side: "" if unbind else name}
        session = self.w.cluster.operators.rebind(self.w.now, key, instance.model, **sides)
        bound = getattr(session.binding(instance.model), side)
        # Unbound, a leg that starts at once does not bind it yet.
        assert bound == (None if unbind else instance.ref)
        self._started()

    @rule(key=keys)
    def forget(self, key: SessionKey) -> None:
        if self.w.cluster.sessions.get(key) is not None:
            calls = set(self.w.cluster.calls)
            self.w.cluster.operators.forget(self.w.now, key)
            self._started()
            assert set(self.w.cluster.calls) == calls
            assert self.w.cluster.sessions.get(key) is None

    @rule(name=names, refused=st.booleans())
    def miss(self, name: str, refused: bool) -> None:
        self.w.cluster.miss(self.w.now, name, refused=refused)
        self._started()

    @rule(seconds=st.sampled_from([0.05, 1.0, 5.0, 30.0, 120.0]), silent=st.sets(names, max_size=2))
    def wait(self, seconds: float, silent: set[str]) -> None:
        self.w.now += seconds
        for name in sorted(self.w.streams.keys() - silent):
            if self.w.instance(name).stream:
                self.w.beat(name, shadow_room_tokens=self.rooms.get(name))
        # What starts on an engine before its silence is noticed is right to start.
        self._started()
        self.w.cluster.tick(self.w.now)
        self._started()

    @rule(back=st.sampled_from([True, True, False]))
    def flap(self, back: bool) -> None:
        if self.connected:
            self.connected = False
            self.w.cluster.dispatcher_left(self.w.now, GATEWAY)
            self._started()
        if back:
            self.connected = True
            self.w.cluster.dispatcher_connected(self.w.now, GATEWAY)
            self._started()

    @invariant()
    def what_always_holds(self) -> None:
        for check in invariants.ALWAYS:
            check(self.w.cluster)

    @invariant()
    def switches_hold_over_restarts(self) -> None:
        switches = self.w.cluster.registry.switches
        for instance in self.w.cluster.registry:
            assert instance.drained == (instance.name in switches.drained)
            assert instance.paused == instance.gate.paused == switches.pauses(instance.name, instance.model)

    def teardown(self) -> None:
        if not hasattr(self, "w"):
            return
        cluster = self.w.cluster
        self.w.now += 1000.0
        cluster.dispatcher_left(self.w.now, GATEWAY)
        cluster.tick(self.w.now)
        cluster.tick(self.w.now + 1000.0)
        invariants.nothing_is_in_flight(cluster)
        invariants.nothing_is_remembered(cluster)


ClusterHistory.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestClusterHistory = ClusterHistory.TestCase
