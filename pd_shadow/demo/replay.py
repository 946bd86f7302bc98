"""Replays sessions and normal traffic against one gateway and keeps every call's result."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import aiohttp
import grpc.aio

from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pd_shadow.common.grpc_options import CLIENT_OPTIONS
from pd_shadow.demo import received, traffic
from pd_shadow.demo.client import Answer, chat
from pd_shadow.demo.cluster import Cluster, ControlPlane, Model
from pd_shadow.demo.router import DEADLINE_SECONDS, StepRouter
from pd_shadow.demo.workload import Session
from pd_shadow.engine.settings import Role
from pd_shadow.router import AsyncWarmthClient, Policy, Reason

ANSWER_TOKENS = 24
CONCURRENT_SESSIONS = 1
"""Two cores hold every engine: a second session would measure the queue for them, not the switch."""
SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Call:
    """One call of a session. `received_tokens` and `uncovered_tokens` are None where they could not be measured.

    `preferred` is the trace's model, and `reason` why the call went to `model`; both are empty without a router.
    """

    session: str
    number: int
    model: str
    is_switch: bool
    answer: Answer
    received_tokens: int | None = None
    uncovered_tokens: int | None = None
    preferred: str = ""
    reason: Reason | None = None

    def summary(self) -> dict[str, Any]:
        """Everything but text and token ids, for a log line."""
        shown = asdict(self)
        shown["answer"] = {key: value for key, value in shown["answer"].items() if key not in ("text", "token_ids")}
        return shown


@dataclass
class Run:
    """Everything one replay saw."""

    calls: list[Call] = field(default_factory=list)
    normal: dict[int, Answer] = field(default_factory=dict)
    ledger: admin_pb2.GetLedgerResponse = field(default_factory=admin_pb2.GetLedgerResponse)
    seconds: float = 0.0

    @property
    def errors(self) -> list[str]:
        """What went wrong, one line per failed call."""
        lines = [f"{c.session} call {c.number} on {c.model}: {c.answer.error}" for c in self.calls if c.answer.error]
        return lines + [f"normal request {n}: {a.error}" for n, a in sorted(self.normal.items()) if a.error]


class Replay:
    """One run over one control plane. `cache_salt` keeps it from hitting what another run left in the engines.

    `decode_urls` are those of the models whose D instance tells what it received. `speed` is that of the engines' time:
    gaps and arrivals are as much shorter, and times are told in it. `rate` is normal requests per second and model,
    `concurrent` sessions run at a time. `policy` decides whether a step goes to the model that the trace prefers; None:
    it does.
    """

    def __init__(
        self,
        gateway_url: str,
        controller_address: str,
        decode_urls: Mapping[str, str],
        specs: Mapping[str, Model],
        cache_salt: str,
        on_call: Callable[[], None] = lambda: None,
        *,
        speed: float = 1.0,
        rate: float = traffic.REQUESTS_PER_SECOND,
        concurrent: int = CONCURRENT_SESSIONS,
        policy: Policy | None = None,
    ) -> None:
        self._gateway_url = gateway_url
        self._controller_address = controller_address
        self._decode_urls = decode_urls
        self._specs = specs
        self._salt = cache_salt
        self._on_call = on_call
        self._speed = speed
        self._rate = rate
        self._concurrent = concurrent
        self._policy = policy

    @classmethod
    def over(
        cls,
        cluster: Cluster,
        plane: ControlPlane,
        cache_salt: str,
        on_call: Callable[[], None] = lambda: None,
        *,
        rate: float = traffic.REQUESTS_PER_SECOND,
        concurrent: int = CONCURRENT_SESSIONS,
        policy: Policy | None = None,
    ) -> "Replay":
        """A replay over all models of a running cluster."""
        decodes = [command for command in cluster.commands.values() if command.role is Role.DECODE]
        return cls(
            plane.gateway_url,
            plane.controller_address,
            decode_urls={command.served_name: command.url for command in decodes},
            specs={spec.name: spec for spec in cluster.specs},
            cache_salt=cache_salt,
            on_call=on_call,
            speed=cluster.speed,
            rate=rate,
            concurrent=concurrent,
            policy=policy,
        )

    async def warm_up(self) -> None:
        """Handshakes and first steps of every engine, outside the measurement. Raises RuntimeError if a call fails."""
        async with aiohttp.ClientSession() as http:
            for model in self._specs:
                for words in (20, 1500):
                    messages = [{"role": "user", "content": f"warm up {model} " * words}]
                    answer = await chat(http, self._gateway_url, model, messages, 4, f"{self._salt}-warm-up")
                    if answer.error:
                        raise RuntimeError(f"warm-up call on {model} failed: {answer.error}")

    async def run(self, sessions: Sequence[Session], seed: int) -> Run:
        """All sessions, a few at a time, under normal traffic that lasts as long as they do."""
        run = Run()
        started = time.perf_counter()
        async with (
            aiohttp.ClientSession() as http,
            grpc.aio.insecure_channel(self._controller_address, options=CLIENT_OPTIONS) as channel,
            AsyncWarmthClient(self._controller_address, deadline_seconds=DEADLINE_SECONDS) as warmth,
        ):
            router = StepRouter(self._policy, warmth, self._specs) if self._policy else None
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            waiting = list(reversed(sessions))

            async def worker() -> None:
                while waiting:
                    await self._session(http, admin, router, waiting.pop(), run)

            over = asyncio.Event()
            async with asyncio.TaskGroup() as background:
                background.create_task(self._normal(http, seed, run, over))
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._concurrent):
                        group.create_task(worker())
                over.set()
            run.seconds = time.perf_counter() - started
            run.ledger = await _settled_ledger(admin)
        return run

    async def _session(
        self,
        http: aiohttp.ClientSession,
        admin: "admin_pb2_grpc.AdminServiceAsyncStub",
        router: StepRouter | None,
        session: Session,
        run: Run,
    ) -> None:
        messages = [{"role": "system", "content": session.system}]
        headers = {"X-Session-ID": session.name, "X-Task": session.task}
        previous = ""
        for number, step in enumerate(session.steps):
            await asyncio.sleep(step.gap_seconds / self._speed)
            messages.append({"role": "user", "content": step.content})
            decision = await router.choose(session.name, step.model) if router else None
            model = decision.model if decision else step.model
            is_switch = previous not in ("", model)
            before = covered = None
            if is_switch and model in self._decode_urls:
                before = await received.read(http, self._decode_urls[model])
                covered = await _tokens_on_decode(admin, session.name, model)
            answer = self._timed(
                await chat(http, self._gateway_url, model, messages, ANSWER_TOKENS, self._salt, headers)
            )
            got = None
            if before is not None and not answer.error:
                after = await received.read(http, self._decode_urls[model])
                got = received.tokens_between(before, after, self._specs[model].kv_bytes_per_token)
            uncovered = None if covered is None else max(0, answer.prompt_tokens - covered)
            run.calls.append(
                Call(
                    session.name,
                    number,
                    model,
                    is_switch,
                    answer,
                    got,
                    uncovered,
                    step.model if decision else "",
                    decision.reason if decision else None,
                )
            )
            self._on_call()
            if answer.error:
                return
            messages.append({"role": "assistant", "content": answer.text})
            previous = model

    async def _normal(self, http: aiohttp.ClientSession, seed: int, run: Run, over: asyncio.Event) -> None:
        """Normal requests until `over`; those under way then are still finished."""
        started = time.perf_counter()

        async def one(request: traffic.NormalRequest) -> None:
            messages = [{"role": "user", "content": request.prompt}]
            run.normal[request.number] = self._timed(
                await chat(http, self._gateway_url, request.model, messages, request.max_tokens, self._salt)
            )

        async with asyncio.TaskGroup() as group:
            for request in traffic.requests(seed, list(self._specs), self._rate):
                wait = started + request.at_seconds / self._speed - time.perf_counter()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, wait)):
                        await over.wait()
                if over.is_set():
                    return
                group.create_task(one(request))

    def _timed(self, answer: Answer) -> Answer:
        """The answer with its times in the engines' time."""
        return replace(answer, ttft=answer.ttft * self._speed, tpot=answer.tpot * self._speed)


async def _tokens_on_decode(admin: "admin_pb2_grpc.AdminServiceAsyncStub", session: str, model: str) -> int | None:
    key = common_pb2.SessionKey(session_id=session)
    try:
        answer = await admin.GetSession(admin_pb2.GetSessionRequest(session=key), timeout=2)
    except grpc.aio.AioRpcError:
        return None
    return next((binding.decode_tokens for binding in answer.session.bindings if binding.model == model), 0)


async def _settled_ledger(admin: "admin_pb2_grpc.AdminServiceAsyncStub") -> admin_pb2.GetLedgerResponse:
    """The ledger once nothing is in flight, or as it is after SETTLE_SECONDS."""
    deadline = time.perf_counter() + SETTLE_SECONDS
    while True:
        ledger = await admin.GetLedger(admin_pb2.GetLedgerRequest(), timeout=5)
        if ledger.in_flight == admin_pb2.InFlight() or time.perf_counter() > deadline:
            return ledger
        await asyncio.sleep(0.2)
