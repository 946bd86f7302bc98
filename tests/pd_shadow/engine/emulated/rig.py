"""Instances in virtual time: a test says when an iteration ends and what a transfer brings."""

import random
from array import array
from typing import Any

from pd_shadow.engine.attachment import Attachment
from pd_shadow.engine.emulated.config import EmulatedEngine
from pd_shadow.engine.emulated.handoff import remote_kv
from pd_shadow.engine.emulated.instance import Instance, Load
from pd_shadow.engine.emulated.request import End, EngineRequest
from pd_shadow.engine.settings import PluginSettings, Role
from pd_shadow.engine.snapshot import EngineFacts
from pd_shadow.engine.steps import StepLog
from pd_shadow.engine.tags import LEG, RESULT, ROUTED, SESSION

MODEL = "L3.1-8B"
BLOCK = 16
EXPORT = {"do_remote_decode": True}


def config(role: Role = Role.COLOCATED, **more: Any) -> EmulatedEngine:
    given = {"name": f"e-{role}", "model": MODEL, "role": role, "port": 0, "kv_tokens": 4096, "block_size": BLOCK}
    return EmulatedEngine(**{**given, **more})


def prompt(tokens: int, seed: int = 0) -> "array[int]":
    rng = random.Random(seed)
    return array("i", (rng.randrange(1000) for _ in range(tokens)))


class Client:
    """What one request has heard."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: End | None = None

    def ended(self, end: End) -> None:
        assert self.end is None
        self.end = end

    @property
    def params(self) -> dict[str, Any]:
        assert self.end is not None
        return dict(self.end.kv_transfer_params or {})

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.params[RESULT])


class Bench:
    """One instance and the time."""

    def __init__(self, role: Role = Role.COLOCATED, port: int = 1, **more: Any) -> None:
        self.config = config(role, **more)
        facts = EngineFacts(role, self.config.served_name, BLOCK, "blake2b", self.config.context_tokens, 1, "emulated")
        self.log = StepLog()
        attachment = Attachment(PluginSettings(), facts, self.log)
        self.instance = Instance(self.config, port, attachment, self.log)
        self.now = 0.0
        self.made = 0

    def send(
        self,
        tokens: "array[int]",
        max_tokens: int = 1,
        *,
        leg: str = "",
        params: dict[str, Any] | None = None,
        salt: str = "",
        routed: bool = False,
        probability: float = 0.5,
    ) -> tuple[Client, EngineRequest]:
        client = Client()
        self.made += 1
        xargs: dict[str, Any] = {SESSION: "t/s"}
        if leg:
            xargs |= {LEG: leg, "pd_shadow_probability": probability}
        if routed:
            xargs[ROUTED] = 1
        request = EngineRequest(
            f"{self.config.name}-{self.made}", tokens, max_tokens=max_tokens, xargs=xargs, salt=salt,
            exports=bool((params or {}).get("do_remote_decode")), remote=remote_kv(params),
            on_token=client.tokens.append, on_end=client.ended,
        )  # fmt: skip
        self.instance.submit(request, self.now)
        return client, request

    def step(self) -> bool:
        """One iteration; False when there is none to run."""
        step = self.instance.plan(self.now)
        if step is None:
            return False
        self.now += step.seconds
        self.instance.finish(self.now)
        return True

    def run(self) -> None:
        while self.step():
            pass

    def fetch(self, source: "Bench", *, lost: bool = False) -> list[Load]:
        """Serve what this instance wants to read from another one."""
        loads = self.instance.take_loads()
        for load in loads:
            contents = None if lost else source.instance.read(load.source.request_id, load.remote_blocks, source.now)
            self.instance.loaded(load, contents, self.now)
        return loads

    def handed_over(self, source: "Bench", tokens: "array[int]", max_tokens: int, **more: Any) -> Client:
        """A call over P and D."""
        first, _ = source.send(tokens, params=EXPORT, **more)
        source.run()
        client, _ = self.send(tokens, max_tokens, params=first.params, **more)
        self.step()
        self.fetch(source)
        self.run()
        return client

    @property
    def used(self) -> int:
        return self.instance.pool.used
