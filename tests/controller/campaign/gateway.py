"""A gateway: it begins, runs and ends calls, has contexts rendered, and runs shadow legs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controller.core.call import Call
from controller.core.cluster import CallEnd, Cluster, ShadowTarget
from controller.core.effects import CancelLeg, DropSession, StartLeg
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.api.v1 import placement_pb2
from tests.controller.campaign.controller import age
from tests.controller.campaign.network import Stream

if TYPE_CHECKING:
    from tests.controller.campaign.simulation import Simulation

BEGIN_SECONDS = 1.0
REPORT_SECONDS = 2.0
REPORT_ATTEMPTS = 3
# No call may take longer than its parts at their slowest.
CALL_BOUND_SECONDS = 12.0

Report = Callable[[Cluster, float], Any]


@dataclass(eq=False)
class ClientCall:
    """A client's request as its gateway sees it."""

    session: SessionKey
    model: str
    begun: float
    # The controller's call, once it is placed.
    placed: bool = False
    outcome: str = ""
    ended: float = 0.0


class Gateway:
    """One process; `start` begins another one of the same id."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.life = 0
        self.alive = False
        self._simulation = simulation
        self._revision = 0
        self._contexts: dict[SessionKey, int] = {}
        self._calls: list[ClientCall] = []
        self._legs: dict[str, StartLeg] = {}
        self._stream: Stream | None = None

    def start(self) -> None:
        self.life += 1
        self.alive = True
        self._contexts, self._legs, self._stream = {}, {}, None
        self._connect(self.life)

    def kill(self) -> None:
        self.alive = False
        for call in self._calls:
            self._over(call, "gateway killed")
        self._simulation.network.kill(self.name)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        """What this process does later, unless it is killed before."""
        life = self.life
        self._simulation.clock.after(seconds, lambda: do() if self.alive and self.life == life else None)

    # To the controller.

    def _connect(self, life: int) -> None:
        if not self.alive or life != self.life or self._stream is not None:
            return
        controller = self._simulation.leader

        def arrive() -> None:
            if controller.leads and self.alive and self.life == life and self._stream is None:
                self._stream = controller.subscribe(self.name, lambda ended: self._stream_ended(life, ended))

        self._simulation.network.send(self.name, controller.name, arrive)
        self._simulation.clock.after(1.0, lambda: self._connect(life))

    def _stream_ended(self, life: int, stream: Stream) -> None:
        if life != self.life or not self.alive or stream is not self._stream:
            return
        self._stream = None
        for leg_id in list(self._legs):
            self._leg_over(leg_id, pb.LEG_OUTCOME_CANCELLED)
        self._after(self._simulation.random.uniform(0.1, 0.5), lambda: self._connect(life))

    def _ask(self, do: Report, reply: Callable[[Any], None]) -> None:
        """A unary RPC; the reply is what the core returned or the RejectedError it raised, or never comes."""
        controller, network = self._simulation.leader, self._simulation.network
        life = self.life

        def arrive() -> None:
            if not controller.leads:
                return
            try:
                result: Any = controller.turn(do)
            except RejectedError as error:
                result = error
            network.send(
                controller.name, self.name, lambda: reply(result) if self.alive and self.life == life else None
            )

        network.send(self.name, controller.name, arrive)

    def _report(self, do: Report, attempt: int = 1) -> None:
        """Report shadow work, again while no answer comes."""
        answered: list[bool] = []
        self._ask(do, lambda _: answered.append(True))
        if attempt < REPORT_ATTEMPTS:
            self._after(REPORT_SECONDS, lambda: None if answered else self._report(do, attempt + 1))

    # Calls.

    def call(self, session: SessionKey, model: str) -> ClientCall:
        """A client's request begins."""
        simulation = self._simulation
        call = ClientCall(session, model, simulation.clock.now)
        simulation.calls.append(call)
        self._calls.append(call)
        prompt = self._contexts[session] = self._contexts.get(session, 0) + simulation.random.randrange(200, 3000)
        task = simulation.random.choice(("", "math"))
        self._ask(
            lambda cluster, now: self._placed_at(
                cluster.begin_call(now, self.name, session, model, task=task, prompt_tokens=prompt)
            ),
            lambda answer: self._answered(call, prompt, answer),
        )
        self._after(BEGIN_SECONDS, lambda: None if call.placed else self._over(call, "served without the controller"))
        return call

    @staticmethod
    def _placed_at(begun: Any) -> tuple[Call, list[ShadowTarget]]:
        call = begun.call
        for placed in (call.prefill, call.decode):
            assert placed is None or placed.instance.ready, f"{placed.instance.name} takes no calls"
        return call, begun.shadow_targets

    def _answered(self, call: ClientCall, prompt: int, answer: Any) -> None:
        if isinstance(answer, RejectedError):
            if not call.placed:
                self._over(call, f"refused: {pb.RejectionReason.Name(answer.reason)}")
            return
        placed, targets = answer
        if call.placed or call.outcome:
            # An answer that comes too late, or twice: its load would stay reserved.
            self._end(placed, CallEnd(pb.CALL_OUTCOME_CLIENT_GONE, pb.HANDOFF_NONE))
            return
        call.placed = True
        self._render(call.session, prompt, targets)
        self._run(call, placed, prompt)

    def _run(self, call: ClientCall, placed: Call, prompt: int) -> None:
        simulation, random = self._simulation, self._simulation.random
        decode = simulation.engines[placed.decode.instance.name]
        decode_life = age(placed.decode.instance.ref.incarnation)
        prefill = None if placed.colocated or placed.prefill is None else placed.prefill.instance
        decode.running += 1
        leaves = random.random() < 0.05
        computed = prefill is not None and self._engine_works(prefill.name, age(prefill.ref.incarnation))

        def transfer() -> None:
            nonlocal computed
            if prefill is not None:
                computed = computed and self._engine_works(prefill.name, age(prefill.ref.incarnation))
            if computed:
                self._progress(placed, placement_pb2.CALL_PHASE_TRANSFER)
            self._after(random.uniform(0.02, 0.5), first_token)

        def first_token() -> None:
            if leaves or not self._engine_works(decode.name, decode_life):
                end(served=False)
                return
            self._progress(placed, placement_pb2.CALL_PHASE_DECODE)
            self._after(random.uniform(0.1, 2.0), lambda: end(served=self._engine_works(decode.name, decode_life)))

        def end(*, served: bool) -> None:
            decode.running = max(0, decode.running - 1)
            if not served:
                outcome = pb.CALL_OUTCOME_CLIENT_GONE if leaves else pb.CALL_OUTCOME_DECODE_FAILED
                self._over(call, pb.CallOutcome.Name(outcome))
                self._end(placed, CallEnd(outcome, pb.HANDOFF_NONE))
                return
            handoff, why = pb.HANDOFF_HANDED_OFF, pb.RECOMPUTE_REASON_UNSPECIFIED
            if placed.colocated:
                handoff = pb.HANDOFF_NONE
            elif not computed:
                handoff, why = pb.HANDOFF_RECOMPUTED, pb.RECOMPUTE_REASON_PREFILL_FAILED
            elif prefill is not None and (prefill.name, decode.name) in simulation.bad_links:
                handoff, why = pb.HANDOFF_RECOMPUTED, pb.RECOMPUTE_REASON_TRANSFER_FAILED
            output = random.randrange(1, 300)
            decode.hold(call.session, prompt + output)
            if prefill is not None and computed:
                simulation.engines[prefill.name].hold(call.session, prompt)
            self._contexts[call.session] = prompt + output
            self._over(call, "completed")
            cached = random.randrange(prompt + 1)
            ending = CallEnd(pb.CALL_OUTCOME_COMPLETED, handoff, why, prompt, cached, output)
            self._end(placed, ending, lambda targets: self._render(call.session, prompt + output, targets))

        self._after(random.uniform(0.05, 2.0), transfer)

    def _engine_works(self, name: str, life: int) -> bool:
        return self._simulation.engines[name].works_for(self.name, life)

    def _progress(self, placed: Call, phase: placement_pb2.CallPhase.ValueType) -> None:
        self._ask(lambda cluster, now: cluster.progress(now, placed.call_id, phase), lambda _: None)

    def _end(self, placed: Call, end: CallEnd, ended: Callable[[list[ShadowTarget]], None] | None = None) -> None:
        """Once: a second attempt could meet a controller that counted the first."""

        def reply(answer: Any) -> None:
            if ended is not None and not isinstance(answer, RejectedError):
                ended(answer)

        self._ask(lambda cluster, now: cluster.end_call(now, placed.call_id, end), reply)

    def _over(self, call: ClientCall, outcome: str) -> None:
        if not call.outcome:
            call.outcome, call.ended = outcome, self._simulation.clock.now
            self._simulation.say(f"{self.name}: {call.session.session_id} on {call.model}: {outcome}")

    # Shadow work.

    def _render(self, session: SessionKey, tokens: int, targets: list[ShadowTarget]) -> None:
        random = self._simulation.random
        for target in targets:
            model = target.model
            kept = tokens if random.random() < 0.8 else random.randrange(tokens + 1)
            self._revision = max(self._revision + 1, int(self._simulation.clock.now * 1e6))
            error = "the engine is away" if random.random() < 0.05 else ""
            self._after(random.uniform(0.02, 0.5), self._rendered(session, model, self._revision, tokens, kept, error))

    def _rendered(
        self, session: SessionKey, model: str, revision: int, tokens: int, kept: int, error: str
    ) -> Callable[[], None]:
        return lambda: self._report(
            lambda cluster, now: cluster.rendered(
                now, self.name, session, model, revision=revision, tokens=tokens, kept_tokens=kept, error=error
            )
        )

    def told(self, effect: StartLeg | CancelLeg | DropSession) -> None:
        if not self.alive:
            return
        match effect:
            case StartLeg():
                self._start_leg(effect)
            case CancelLeg():
                self._leg_over(effect.leg_id, pb.LEG_OUTCOME_CANCELLED)
            case DropSession():
                self._contexts.pop(effect.session, None)
                for leg in list(self._legs.values()):
                    if leg.session == effect.session:
                        self._leg_over(leg.leg_id, pb.LEG_OUTCOME_CANCELLED)

    def _start_leg(self, leg: StartLeg) -> None:
        simulation, random = self._simulation, self._simulation.random
        self._legs[leg.leg_id] = leg
        name, life = leg.instance.name, age(leg.instance.ref.incarnation)
        engine = simulation.engines[name]
        if random.random() < 0.03:
            # Its end is never reported.
            self._after(1.0, lambda: self._forget_leg(leg.leg_id))
            return
        seconds = random.uniform(0.02, 1.0)
        if random.random() < 0.3:
            part = random.randrange(leg.upto_tokens + 1)
            self._after(seconds / 2, lambda: engine.progress(leg.session, part))
        self._after(seconds, lambda: self._leg_ran(leg, name, life))

    def _forget_leg(self, leg_id: str) -> None:
        self._legs.pop(leg_id, None)

    def _leg_ran(self, leg: StartLeg, name: str, life: int) -> None:
        simulation, random = self._simulation, self._simulation.random
        if leg.leg_id not in self._legs:
            return
        if not self._engine_works(name, life):
            self._leg_over(leg.leg_id, pb.LEG_OUTCOME_FAILED)
            return
        roll = random.random()
        if roll < 0.1:
            failure = random.choice((pb.LEG_OUTCOME_FAILED, pb.LEG_OUTCOME_TIMED_OUT, pb.LEG_OUTCOME_STALE))
            self._leg_over(leg.leg_id, failure)
            return
        if leg.kind == pb.LEG_KIND_FETCH and any(decode == name for _, decode in simulation.bad_links):
            self._leg_over(leg.leg_id, pb.LEG_OUTCOME_FAILED)
            return
        engine = simulation.engines[name]
        covered = None
        if engine.plugin:
            covered = leg.upto_tokens if roll < 0.7 else random.randrange(leg.upto_tokens + 1)
        engine.hold(leg.session, leg.upto_tokens if covered is None else covered)
        self._leg_over(leg.leg_id, pb.LEG_OUTCOME_DONE, random.randrange(leg.upto_tokens + 1), covered)

    def _leg_over(
        self, leg_id: str, outcome: pb.LegOutcome.ValueType, cached: int = 0, covered: int | None = None
    ) -> None:
        if self._legs.pop(leg_id, None) is not None:
            self._report(
                lambda cluster, now: cluster.leg_finished(
                    now, self.name, leg_id, outcome, cached, covered_tokens=covered
                )
            )
