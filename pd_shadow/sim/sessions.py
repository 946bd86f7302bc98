"""Agent sessions: their calls one after another, and the shadow work between them."""

from collections.abc import Sequence
from typing import NamedTuple

from pd_shadow.policy.approach import Approach, EngineController, Traits
from pd_shadow.policy.switch_prior import SwitchPrior, Verdict
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.deployment import Deployment
from pd_shadow.sim.request import Request
from pd_shadow.sim.workload.base import Session


class CallRecord(NamedTuple):
    """One finished call. Times in seconds, lengths in tokens."""

    session: int
    step: int
    model: int
    switch: bool
    arrived: float
    ttft: float
    latency: float
    prompt: int
    cached: int
    output: int
    good: bool


class Shadowing(NamedTuple):
    """What an approach does between calls."""

    approach: Approach
    traits: Traits
    gate: float = 0.0
    top_k: int | None = None
    # Whether what is lost before it is used is computed again, until the session's last call has ended.
    recomputes: bool = False

    @property
    def oracle(self) -> bool:
        """Whether switches are free."""
        return self.approach in (Approach.ORACLE, Approach.ORACLE_HOST)

    @property
    def active(self) -> bool:
        """Whether there is shadow work, wherever it runs."""
        return self.traits.shadows or self.approach is Approach.DEDICATED

    @property
    def eager(self) -> bool:
        """Whether shadow work runs as requests like any other."""
        return self.traits.controller is EngineController.EAGER


class Agents:
    """Runs sessions against the deployments of their models."""

    def __init__(
        self,
        clock: Clock,
        deployments: Sequence[Deployment],
        shadowing: Shadowing,
        prior: SwitchPrior,
        sessions: Sequence[Session],
        measured: range,
    ) -> None:
        """`measured` are the indices of the sessions whose calls are recorded."""
        self.calls: list[CallRecord] = []
        self.left = len(measured)
        self._clock = clock
        self._deployments = deployments
        self._names = [str(index) for index in range(len(deployments))]
        self._shadowing = shadowing
        self._prior = prior
        self._sessions = sessions
        self._measured = measured
        # Per session: the model of its last call and the length of its history.
        self._last: dict[int, tuple[int, int]] = {}
        for index, session in enumerate(sessions):
            clock.at(session.arrival, lambda now, index=index: self._call(index, 0, now))  # type: ignore[misc]

    def _call(self, index: int, step: int, now: float) -> None:
        session = self._sessions[index]
        call = session.calls[step]
        key = -1 - index
        before, history = self._last.get(index, (call.model, 0))
        switch = call.model != before
        deployment = self._deployments[call.model]
        if step:
            self._prior.observe(session.task, self._names[before], self._names[call.model])
            if call.shared_tokens < history:
                for each in self._deployments:
                    each.rewrite(key, call.shared_tokens)
        deployment.suspend(key)
        free = switch and self._shadowing.oracle
        request = Request(
            now, call.prompt_tokens, call.output_tokens, deployment.slos.of(call.prompt_tokens), routed=True,
            context=key, reusable=call.shared_tokens, warmed=call.shared_tokens if free else 0,
            done=lambda request, at: self._ended(index, step, switch, request, at),
        )  # fmt: skip
        deployment.submit(request, now)
        if not self._shadowing.eager:
            self._shadow(index, call.model, call.prompt_tokens, now, repeats=self._shadowing.recomputes)

    def _ended(self, index: int, step: int, switch: bool, request: Request, now: float) -> None:
        session = self._sessions[index]
        call = session.calls[step]
        if index in self._measured:
            self.calls.append(
                CallRecord(
                    index, step, call.model, switch, request.arrived, request.ttft, now - request.arrived,
                    request.prompt, request.cached, request.output, request.meets_slo,
                )
            )  # fmt: skip
        history = call.prompt_tokens + call.output_tokens
        self._last[index] = (call.model, history)
        last = step + 1 == len(session.calls)
        self._shadow(index, call.model, history, now, repeats=self._shadowing.recomputes and not last)
        if not last:
            self._clock.at(now + session.calls[step + 1].gap_seconds, lambda at: self._call(index, step + 1, at))
        elif index in self._measured:
            self.left -= 1

    def _shadow(self, index: int, current: int, target: int, now: float, *, repeats: bool) -> None:
        """Have the other models hold the session's context up to `target` tokens."""
        shadowing = self._shadowing
        if not shadowing.active:
            return
        task = self._sessions[index].task
        for prediction in self._prior.rank(
            task, self._names[current], self._names, gate=shadowing.gate, top_k=shadowing.top_k
        ):
            if prediction.verdict is not Verdict.SHADOW:
                continue
            deployment = self._deployments[int(prediction.model)]
            if shadowing.eager:
                deployment.send_ahead(-1 - index, target, now)
            else:
                deployment.shadow(-1 - index, target, prediction.probability, now, repeats=repeats)
