"""A stepped engine with the plugin, whose decisions depend on no clock, and scenarios that share one engine.

A boot takes ten seconds, so a test module runs its scenarios (functions of one engine) on few engines.
"""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pd_shadow.perf.online import StepWork
from pd_shadow.policy.base import Batch, Budget, Iteration, StepReason
from tests.pd_shadow.engine.vllm.stepping import Answer, SteppedEngine, in_fresh_process, prompt

SCHEDULER = "pd_shadow.engine.vllm.scheduler.ShadowScheduler"
AHEAD = "pd_shadow.engine.vllm.scheduler.ShadowAsyncScheduler"
CONNECTOR = {
    "kv_connector": "HeldConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "tests.pd_shadow.engine.vllm.held_connector",
}  # fmt: skip
SECONDS_PER_TOKEN = 0.001
# Longer than any leg waits here, and all that is cached is cold at once.
PLUGIN: dict[str, Any] = {
    "controller": "harvest-slo", "minimum_tokens": 32, "cold_seconds": 0, "cap_share": 0.5, "stuck_seconds": 600,
}  # fmt: skip


class FixedLatency:
    """Every prompt token takes a millisecond, a decode next to nothing."""

    warm = True

    def seconds(self, work: StepWork) -> float:
        return work.prefill_tokens * SECONDS_PER_TOKEN + work.decodes * 1e-9

    def observe(self, work: StepWork, seconds: float) -> None:
        pass


class FixedBudget:
    """As many prompt tokens in every iteration, normal ones included, unless something waits."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, batch: Batch) -> Budget:
        if batch.waiting or not self.tokens:
            return Budget.refused(StepReason.WAITING if batch.waiting else StepReason.NO_BUDGET)
        return Budget.iteration((self.tokens + 0.5) * SECONDS_PER_TOKEN, StepReason.SLACK)

    def ran(self, iteration: Iteration) -> None:
        pass


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def time(self) -> float:
        return time.time() + self.ahead


class ShadowedEngine(SteppedEngine):
    """As many shadow tokens in every iteration as `grant` says, a pool of 63 blocks of which the class may hold 31."""

    def __init__(self, plugin: Mapping[str, Any] | None = None, **engine_arguments: Any) -> None:
        given = {"scheduler_cls": SCHEDULER, **engine_arguments}
        super().__init__(additional_config={"pd_shadow": {**PLUGIN, **(plugin or {})}}, **given)
        self.scheduler.latency = FixedLatency()
        self.blocks = self.free_blocks
        self.grant(100)

    def grant(self, tokens: int) -> None:
        self.scheduler.controller = FixedBudget(tokens)
        self.scheduler._longest_chunk = 512

    def shadow(
        self, token_ids: list[int], name: str, kind: str = "prefill", probability: float = 0.5, **more: Any
    ) -> None:
        tags = {"pd_shadow_leg": kind, "pd_shadow_probability": probability}
        self.add(token_ids, name, 1, extra_args=tags, **more)

    def results(self, *names: str) -> dict[str, Any]:
        """The plugin's part of the legs' answers."""
        return {name: result_of(self.answers[name]) for name in names}

    def step_until(self, condition: Any, limit: int = 200) -> None:
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"not so after {limit} iterations: {self.steps[-5:]}")

    def clear(self) -> None:
        """Nothing runs, nothing is cached, and no block has leaked."""
        self.drain()
        assert self.free_blocks == self.blocks
        assert len(self.scheduler.jobs) == 0
        assert not self.scheduler.requests
        assert self.scheduler.reset_prefix_cache(reset_connector=True)
        self.scheduler.free_queue.cache.set_cap(self.blocks // 2)
        self.grant(100)
        self.steps.clear()


def result_of(answer: Answer) -> Any:
    return (answer.kv_transfer_params or {}).get("pd_shadow")


def decoding(engine: ShadowedEngine, name: str, seed: int, max_tokens: int = 40, **more: Any) -> None:
    """A normal request that decodes from here on."""
    engine.add(prompt(seed, 40), name, max_tokens, **more)
    engine.step_until(lambda: engine.answers[name].token_ids)


def run(scenarios: Sequence[Callable[[ShadowedEngine], Any]], **engine_arguments: Any) -> dict[str, Any]:
    """What every scenario saw, by its name, on one engine in a fresh process.

    For one that failed it is the exception; the others get a new engine then.
    """
    left = [(scenario.__module__, scenario.__name__) for scenario in scenarios]
    seen: dict[str, Any] = {}
    while left:
        seen.update(in_fresh_process(_run, names=left, **engine_arguments))
        left = [(module, name) for module, name in left if name not in seen]
    return seen


def _run(names: list[tuple[str, str]], **engine_arguments: Any) -> dict[str, Any]:
    engine = ShadowedEngine(**engine_arguments)
    seen: dict[str, Any] = {}
    for module, name in names:
        engine.answers.clear()
        try:
            seen[name] = getattr(importlib.import_module(module), name)(engine)
            engine.clear()
        except Exception as error:
            traceback.print_exc()
            seen[name] = f"{type(error).__name__}: {error}"
            break
    engine.shutdown()
    return seen
