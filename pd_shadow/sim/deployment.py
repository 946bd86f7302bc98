"""The instances of one model, and which of them a session is bound to."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_shadow.perf.latency import IterationLatency
from pd_shadow.perf.models import ModelSpec
from pd_shadow.policy.base import IterationController
from pd_shadow.policy.placement import Candidate, choose
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.engine import Engine, EngineLimits
from pd_shadow.sim.host_tier import HostTier
from pd_shadow.sim.kv_pool import EvictionUnit, KvPool
from pd_shadow.sim.request import Request, Slo
from pd_shadow.sim.shadow_queue import ShadowJob

TTFT_FLOOR_SECONDS = 1.0
TPOT_FLOOR_SECONDS = 0.025
SLO_MULTIPLE = 5.0
"""SLOs of paper section 5.1: the larger of a floor and a multiple of what an idle instance needs."""
DECODE_CONTEXT_TOKENS = 1024
"""Context at which the batch-1 decode time is taken; the paper does not say which."""
SLO_STEP_TOKENS = 256


class Slos:
    """The SLOs of one model."""

    def __init__(self, latency: IterationLatency, scale: float = 1.0) -> None:
        """All SLOs times `scale`."""
        self._latency = latency
        self._scale = scale
        self._ttft: dict[int, float] = {}
        self.tpot = scale * max(TPOT_FLOOR_SECONDS, SLO_MULTIPLE * latency.decode_seconds(DECODE_CONTEXT_TOKENS))

    def of(self, prompt_tokens: int) -> Slo:
        """For one request; prompt lengths are taken in steps, rounded up."""
        step = -(-prompt_tokens // SLO_STEP_TOKENS)
        ttft = self._ttft.get(step)
        if ttft is None:
            isolated = self._latency.isolated_prefill_seconds(step * SLO_STEP_TOKENS)
            ttft = self._ttft[step] = self._scale * max(TTFT_FLOOR_SECONDS, SLO_MULTIPLE * isolated)
        return Slo(ttft, self.tpot)


@dataclass(frozen=True)
class Hardware:
    """What an instance of a model runs on, and how its memory is used."""

    model: ModelSpec
    latency: IterationLatency
    limits: EngineLimits
    cap_share: float
    cold_seconds: float
    stale_seconds: float
    keeps_finished: bool
    evicts: EvictionUnit
    extensions_are_normal: bool
    # 0: no host tier.
    host_bytes_per_gpu: float
    # Of a decode instance's inbound link.
    link_bytes_per_second_per_gpu: float

    @property
    def gpus(self) -> int:
        """Of one instance."""
        return self.latency.tensor_parallel

    @property
    def link_bytes_per_second(self) -> float:
        """Of one instance: all its GPUs receive at once."""
        return self.link_bytes_per_second_per_gpu * self.gpus

    def pool(self) -> KvPool:
        """The KV pool of one instance, with its host tier."""
        tokens = self.model.kv_capacity_tokens(self.latency.gpu, self.gpus)
        host = None
        if self.host_bytes_per_gpu:
            capacity = self.host_bytes_per_gpu * self.gpus / self.model.kv_bytes_per_token
            host = HostTier(int(capacity))
        return KvPool(
            tokens,
            cap_share=self.cap_share,
            cold_seconds=self.cold_seconds,
            stale_seconds=self.stale_seconds,
            keeps_finished=self.keeps_finished,
            evicts=self.evicts,
            extensions_are_normal=self.extensions_are_normal,
            host=host,
        )

    def engine(
        self,
        name: str,
        clock: Clock,
        slos: Slos,
        controller: IterationController | None,
        hands_off: Callable[[Engine, Request, float], None] | None = None,
    ) -> Engine:
        """One instance."""
        return Engine(
            name, clock, self.latency, self.pool(), limits=self.limits,
            kv_bytes_per_token=self.model.kv_bytes_per_token, controller=controller, tpot_slo=slos.tpot,
            hands_off=hands_off,
        )  # fmt: skip


class Deployment(ABC):
    """One model. Sessions are told apart by numbers below zero, contexts of normal traffic by others."""

    def __init__(self, hardware: Hardware, clock: Clock, slo_scale: float) -> None:
        self.hardware = hardware
        self.slos = Slos(hardware.latency, slo_scale)
        self._clock = clock
        # Where the session's prompts are computed.
        self._bound: dict[int, Engine] = {}
        self._sessions: dict[str, int] = {}
        self._jobs: dict[int, ShadowJob] = {}

    @property
    @abstractmethod
    def engines(self) -> Sequence[Engine]:
        """All instances."""

    @property
    @abstractmethod
    def _entries(self) -> Sequence[Engine]:
        """The instances that compute prompts of calls."""

    def submit(self, request: Request, now: float) -> None:
        """Serve a request: a call of a session where its prompt is done first, other traffic where least is pending."""
        if request.context is None:
            entry = min(self._entries, key=_load)
        else:
            entry = self._place(request.context, request.prompt, request.reusable, request.warmed)
        entry.submit(request, now)

    # Shadow work.

    def shadow(self, session: int, target: int, probability: float, now: float, *, repeats: bool = False) -> None:
        """Have the session warm up to `target` tokens; `repeats`: again and again, when they are lost."""
        job = self._job(session)
        entry = self._shadow_entry(session, target)
        job.aim(target, entry.pool.tokens(session), probability, repeats=repeats)
        if job.left:
            entry.offer(job, now)
        self._covered(job, now)

    def send_ahead(self, session: int, target: int, now: float) -> None:
        """The same as a request like any other (Eager)."""
        job = self._job(session)
        job.aim(target, target)
        slo = Slo(math.inf, math.inf)
        self.submit(Request(now, target, 1, slo, context=session, reusable=target, shadow=True), now)

    def suspend(self, session: int) -> None:
        """The session's call comes here: no more shadow work for it."""
        job = self._jobs.get(session)
        if job is not None:
            job.aim(0, 0)
            self._shadow_entry(session, 0).shadow.discard(job)

    def rewrite(self, session: int, tokens: int) -> None:
        """The session's history was rewritten after so many tokens."""
        for engine in self.engines:
            engine.pool.truncate(session, tokens)

    def _job(self, session: int) -> ShadowJob:
        job = self._jobs.get(session)
        if job is None:
            job = self._jobs[session] = ShadowJob(session, self._progressed)
        return job

    def _progressed(self, job: ShadowJob, now: float) -> None:
        if not job.left:
            self._shadow_entry(job.session, job.target).shadow.discard(job)
        self._covered(job, now)

    def _covered(self, job: ShadowJob, now: float) -> None:  # noqa: B027
        """A job's prompt side may have got further; nothing follows where there is no other side."""

    def _shadow_entry(self, session: int, target: int) -> Engine:
        return self._place(session, target, target, 0) if session not in self._bound else self._bound[session]

    def _place(self, session: int, prompt: int, reusable: int, warmed: int) -> Engine:
        """The product's placement rule; binds the session to its choice."""
        entries = self._entries
        bound = self._bound.get(session)
        rate = 1 / entries[0].seconds_per_token
        candidates = [
            Candidate(
                engine.name,
                engine.pending_tokens,
                rate,
                max(warmed, min(engine.pool.reach(session), reusable)),
                self._sessions.get(engine.name, 0),
                engine.requests,
            )
            for engine in entries
        ]
        choice = choose(candidates, prompt, bound.name if bound is not None else None)
        chosen = next(engine for engine in entries if engine.name == choice.name)
        if chosen is not bound:
            if bound is not None:
                self._sessions[bound.name] -= 1
                job = self._jobs.get(session)
                if job is not None:
                    bound.shadow.discard(job)
            self._sessions[chosen.name] = self._sessions.get(chosen.name, 0) + 1
            self._bound[session] = chosen
        return chosen


def _load(engine: Engine) -> tuple[int, int, str]:
    """What the placement rule comes down to for prompts that nobody holds anything of, on instances of one speed."""
    return engine.pending_tokens, engine.requests, engine.name
