"""Random histories of calls, renderings, legs, failures and restarts; the invariants hold after every step."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controller.core.cluster import Begun
from controller.core.effects import StartLeg
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.support import GATEWAY, World, world

MODELS = ("a", "b", "c")
keys = st.sampled_from([SessionKey("", "s1"), SessionKey("", "s2"), SessionKey("t", "s1")])
models = st.sampled_from(MODELS)
COLOCATED = ("c",)
names = st.sampled_from(
    [f"{m}-{side}{n}" for m in MODELS for side in ("c" if m in COLOCATED else "pd") for n in (0, 1)]
)
tokens = st.integers(1, 20_000)
indexes = st.integers(0, 1000)


class ClusterHistory(RuleBasedStateMachine):
    """Drives one core as gateways, engines and time do, in any order."""

    @initialize()
    def start(self) -> None:
        self.w: World = world(
            models=MODELS,
            colocated=COLOCATED,
            replicas=2,
            limits={"max_sessions": 2, "session_idle_seconds": 300, "max_call_seconds": 500},
        )
        self.calls: list[Begun] = []
        self.lives: Counter[str] = Counter()
        self.connected = True

    def _started(self) -> None:
        """No leg starts beside normal work or a colocated instance's queue, or on a taken instance or link."""
        for leg in self.w.pump():
            self._check_start(leg)

    def _check_start(self, leg: StartLeg) -> None:
        assert leg.instance.ready
        assert self.connected
        if leg.kind == pb.LEG_KIND_FETCH:
            assert leg.instance.gate.shadow_chunks == 1
        else:
            policy = self.w.cluster.shadow_policy
            assert policy.enabled
            assert leg.normal_priority == policy.eager
            assert leg.instance.shadow_leg == leg.leg_id
            assert leg.kind == pb.LEG_KIND_PREFILL or not leg.instance.colocated
            if not policy.eager:
                assert not (leg.instance.waiting_requests if leg.instance.colocated else leg.instance.prefill_calls)
        assert leg.upto_tokens % 128 == 0

    @rule(key=st.one_of(st.none(), keys), model=models, prompt=tokens)
    def begin(self, key: SessionKey | None, model: str, prompt: int) -> None:
        cluster = self.w.cluster
        if cluster.registry.ready(model, pb.ROLE_DECODE, pb.ROLE_COLOCATED):
            begun = self.w.begin(model, prompt, session=key)
            self.calls.append(begun)
            self._started()
            leg = begun.call.prefill.instance.shadow_leg if begun.call.prefill else None
            assert begun.call.colocated == (model in COLOCATED)
            if leg is not None and not cluster.shadow_policy.eager:
                # A normal call meets an export, which is short, or a prefill that was told to stop.
                assert self.w.legs[leg].kind == pb.LEG_KIND_EXPORT or leg in self.w.cancelled

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

    @rule(key=keys, model=models, length=tokens, kept=tokens)
    def render(self, key: SessionKey, model: str, length: int, kept: int) -> None:
        self.w.render(model, length, min(kept, length), session=key)
        self._started()

    @precondition(lambda self: self.w.legs)
    @rule(
        index=indexes,
        cached=tokens,
        outcome=st.sampled_from([pb.LEG_OUTCOME_DONE] * 4 + [o for o in pb.LegOutcome.values() if o]),
    )
    def finish(self, index: int, cached: int, outcome: pb.LegOutcome.ValueType) -> None:
        leg = list(self.w.legs.values())[index % len(self.w.legs)]
        for started in self.w.finish(leg, outcome, min(cached, leg.upto_tokens)):
            self._check_start(started)

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.lives[name] += 1
        self.w.healthy(name, incarnation=f"life-{self.lives[name]}")
        self._started()

    @rule(name=names, running=st.integers(0, 3), waiting=st.sampled_from([0, 0, 1]))
    def report(self, name: str, running: int, waiting: int) -> None:
        lives = self.lives[name]
        self.w.healthy(name, f"life-{lives}" if lives else "1", running, waiting)
        self._started()

    @rule(change=st.sampled_from([{"approach": "eager"}, {"approach": "no-shadow"}, {"approach": "harvest-slo"}]))
    def set_policy(self, change: dict[str, str]) -> None:
        self.w.cluster.set_shadow_policy(self.w.now, self.w.cluster.shadow_policy.changed(**change))
        self._started()

    @rule(name=names, refused=st.booleans())
    def miss(self, name: str, refused: bool) -> None:
        self.w.cluster.miss(self.w.now, name, refused=refused)
        self._started()

    @rule(seconds=st.sampled_from([0.05, 1.0, 5.0, 30.0, 120.0]))
    def wait(self, seconds: float) -> None:
        self.w.now += seconds
        self.w.cluster.tick(self.w.now)
        self._started()

    @rule()
    def flap(self) -> None:
        self.connected = not self.connected
        if self.connected:
            self.w.cluster.dispatcher_connected(self.w.now, GATEWAY)
        else:
            self.w.cluster.dispatcher_left(self.w.now, GATEWAY)
        self._started()

    @invariant()
    def shadow_tokens_are_conserved(self) -> None:
        ledger = self.w.cluster.shadow_ledger
        resident = sum(b.shadow_resident for s in self.w.cluster.sessions for b in s.bindings.values())
        assert ledger.resident == resident >= 0
        for session in self.w.cluster.sessions:
            for binding in session.bindings.values():
                assert 0 <= binding.shadow_resident <= binding.prefill_tokens - binding.normal_tokens

    @invariant()
    def reservations_match_what_is_in_flight(self) -> None:
        cluster = self.w.cluster
        instances = list(cluster.registry)
        legs = [leg for i in instances for leg in (i.shadow_leg, i.fetch_leg) if leg]
        assert len(legs) == len(set(legs)) == cluster.jobs.legs_in_flight
        chunks = sum(i.gate.shadow_chunks for i in instances)
        pushing = sum(1 for j in cluster.jobs if j.leg and j.leg.kind != pb.LEG_KIND_PREFILL)
        assert chunks == pushing
        for instance in instances:
            assert instance.gate.shadow_chunks <= 1
            assert set(instance.prefill_calls) | instance.decode_calls <= set(cluster.calls)
            if instance.colocated:
                assert instance.gate.normal_transfers == instance.gate.shadow_chunks == 0

    @invariant()
    def sessions_are_counted_where_they_are_bound(self) -> None:
        bound: Counter[str] = Counter()
        for session in self.w.cluster.sessions:
            for binding in session.bindings.values():
                for ref in (binding.prefill, binding.decode):
                    if ref is not None and self.w.cluster.registry.live(ref) is not None:
                        bound[ref.name] += 1
        assert {i.name: i.sessions for i in self.w.cluster.registry if i.sessions and i.alive} == dict(bound)

    def teardown(self) -> None:
        if not hasattr(self, "w"):
            return
        cluster = self.w.cluster
        self.w.now += 1000.0
        cluster.dispatcher_left(self.w.now, GATEWAY)
        cluster.tick(self.w.now)
        cluster.tick(self.w.now + 1000.0)
        instances = list(cluster.registry)
        assert not cluster.calls
        assert cluster.jobs.legs_in_flight == 0
        assert sum(i.pending_prefill_tokens + len(i.decode_calls) for i in instances) == 0
        assert sum(i.gate.normal_transfers + i.gate.shadow_chunks for i in instances) == 0
        assert len(cluster.sessions) == 0
        assert list(cluster.jobs) == []
        assert cluster.shadow_ledger.resident == 0


ClusterHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestClusterHistory = ClusterHistory.TestCase
