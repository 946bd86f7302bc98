"""Random histories on a stepped engine: no leaked block, no stuck job, no changed output token."""

import os
import random
from typing import Any

import pytest

from tests.pd_shadow.engine.vllm.stepping import BLOCK_SIZE, SteppedEngine, in_fresh_interpreter, prompt

pytestmark = pytest.mark.engine

SCHEDULER = "pd_shadow.engine.vllm.scheduler.ShadowScheduler"
STEPS = int(os.environ.get("PD_SHADOW_FUZZ_STEPS", "1200"))
"""Iterations per history; PD_SHADOW_FUZZ_STEPS=10000 for a long run."""
POOL_BLOCKS = 96
SESSIONS = 6
CONTEXT_TOKENS = 20 * BLOCK_SIZE
LEASE_SECONDS = 1
PLUGIN = {
    "minimum_tokens": 48,
    "cold_seconds": 0.05,
    "cap_share": 0.4,
    "pinned_share": 0.3,
    "stuck_seconds": 5.0,
    "slo": {"tpot_floor_seconds": 0.5},
}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_producer",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
}
EXPORT = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


class History:
    """What happens before each iteration; the same seed gives the same normal requests with and without shadow work."""

    def __init__(self, seed: int, engine: SteppedEngine, *, shadow: bool, exports: bool) -> None:
        self.normal = random.Random(seed)
        self.other = random.Random(seed + 1)
        self.engine = engine
        self.shadow = shadow
        self.exports = exports
        self.count = 0
        self.aborted: set[str] = set()
        self.open_shadows: list[str] = []

    def before_step(self) -> None:
        if self.normal.random() < 0.12:
            self.count += 1
            context = self._context(self.normal)
            self.engine.add(context, f"normal-{self.count}", self.normal.randint(1, 12), cache_salt="tenant")
        if self.normal.random() < 0.01 and self.count:
            victim = f"normal-{self.normal.randint(1, self.count)}"
            if self.engine.answers[victim].finish_reason is None:
                self.engine.abort(victim)
            self.aborted.add(victim)
        if self.shadow:
            self._shadow_work()

    def _shadow_work(self) -> None:
        scheduler = self.engine.scheduler
        chance = self.other.random()
        if chance < 0.15:
            kind = "export" if self.exports and self.other.random() < 0.4 else "prefill"
            name = f"shadow-{len(self.open_shadows)}-{self.other.getrandbits(32)}"
            self.engine.add(
                self._context(self.other), name, 1, priority=self.other.choice((0, 1000)), cache_salt="tenant",
                extra_args={"pd_shadow_leg": kind, "pd_shadow_probability": self.other.random()},
                kv_transfer_params=EXPORT if kind == "export" else None,
            )  # fmt: skip
            self.open_shadows.append(name)
        elif chance < 0.17 and self.open_shadows:
            name = self.other.choice(self.open_shadows)
            if self.engine.answers[name].finish_reason is None:
                self.engine.abort(name)
        elif chance < 0.175:
            scheduler.free_queue.cache.set_cap(self.other.randint(0, POOL_BLOCKS // 2))

    def _context(self, rng: random.Random) -> list[int]:
        return prompt(rng.randint(1, SESSIONS), rng.randint(1, CONTEXT_TOKENS))


def run_history(seed: int, steps: int, shadow: bool, exports: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "num_gpu_blocks_override": POOL_BLOCKS,
        "kv_transfer_config": NIXL if exports else None,
    }
    if shadow:
        arguments.update(scheduler_cls=SCHEDULER, additional_config={"pd_shadow": PLUGIN})
    engine = SteppedEngine(**arguments)
    free = engine.free_blocks
    history = History(seed, engine, shadow=shadow, exports=exports)
    broken: list[str] = []
    for number in range(steps):
        history.before_step()
        waiting = bool(engine.scheduler.waiting) or bool(engine.scheduler.kv_holding_waiting)
        scheduled = engine.step()
        if shadow:
            broken += [f"step {number}: {line}" for line in violations(engine, scheduled, waiting)]
            if broken:
                break
    if not broken:
        engine.drain()
    seen = {
        "broken": broken,
        "free": [free, engine.free_blocks],
        "unfinished": [name for name, answer in engine.answers.items() if answer.finish_reason is None],
        "tokens": {
            name: answer.token_ids
            for name, answer in engine.answers.items()
            if name.startswith("normal") and name not in history.aborted
        },
        "ends": ends(engine),
        "shadow_tokens": engine.scheduler.log.shadow_tokens if shadow else 0,
    }
    engine.shutdown()
    return seen


def violations(engine: SteppedEngine, scheduled: dict[str, int], waiting: bool) -> list[str]:
    """What must never be seen between two iterations."""
    scheduler = engine.scheduler
    cache = scheduler.free_queue.cache
    found = []
    order = cache.order()
    if len(order) != len(set(order)):
        found.append("a block is free twice")
    unused = {block.block_id for block in engine.block_pool.blocks if block.ref_cnt == 0 and not block.is_null}
    if unused != set(order):
        found.append(f"free and unused blocks differ: {sorted(unused ^ set(order))}")
    if waiting and any(name.startswith("shadow") for name in scheduled):
        found.append("shadow work ran while something waited")
    in_use = [block for block in cache.members if block not in cache]
    if cache.size > cache.cap and len(in_use) < cache.size:
        found.append(f"the class holds {cache.size} blocks at a cap of {cache.cap}")
    queued = [*scheduler.running, *scheduler.waiting, *scheduler.kv_holding_waiting]
    if any(request.request_id.startswith("shadow") for request in queued):
        found.append("a shadow request was left in vLLM's queues")
    return found


def ends(engine: SteppedEngine) -> dict[str, int]:
    """How shadow legs ended, by leg and end."""
    log = getattr(engine.scheduler, "log", None)
    return {f"{kind.value} {end.value}": count for (kind, end), count in log.legs.items()} if log else {}


@pytest.mark.parametrize(("seed", "exports"), [(1, False), (2, True)])
def test_a_random_history_leaks_nothing_and_changes_no_token(seed: int, exports: bool) -> None:
    arguments = {"seed": seed, "steps": STEPS, "exports": exports}
    with_shadow = in_fresh_interpreter(run_history, shadow=True, **arguments)
    assert with_shadow["broken"] == []
    assert with_shadow["unfinished"] == []
    assert with_shadow["free"][0] == with_shadow["free"][1]
    # The history did reach what it is about.
    assert with_shadow["shadow_tokens"] > 0
    assert with_shadow["ends"].get("prefill done", 0) > 0
    assert not exports or with_shadow["ends"].get("export done", 0) > 0
    without = in_fresh_interpreter(run_history, shadow=False, **arguments)
    assert with_shadow["tokens"] == without["tokens"]
