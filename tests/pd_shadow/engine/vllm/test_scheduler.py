"""Shadow work on stepped engines: who gets which tokens and blocks, and how every leg ends."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pd_shadow.engine.settings import PluginSettings
from pd_shadow.perf.online import OnlineLatency
from tests.pd_shadow.engine.vllm.shadowed import AHEAD, CONNECTOR, Clock, ShadowedEngine, decoding, result_of, run
from tests.pd_shadow.engine.vllm.stepping import BLOCK_SIZE, prompt

pytestmark = pytest.mark.engine

MAX_JOBS = 1024
PROBE_TOKENS = PluginSettings().idle_minimum_tokens


def covered_then_hit(engine: ShadowedEngine) -> Any:
    context = prompt(1, 10 * BLOCK_SIZE + 5)
    engine.shadow(context, "shadow")
    engine.drain()
    after = engine.run(context, "normal", 3)
    shadow = engine.answers["shadow"]
    return {
        "tokens": shadow.token_ids, "finish": shadow.finish_reason, "result": result_of(shadow),
        "steps": [step["shadow"] for step in engine.steps if "shadow" in step], "cached": after.cached_tokens,
    }  # fmt: skip


def last_in_the_batch(engine: ShadowedEngine) -> Any:
    for number in range(3):
        engine.add(prompt(10 + number, 50), f"normal-{number}", 12)
    engine.step_until(lambda: all(engine.answers[f"normal-{number}"].token_ids for number in range(3)))
    before = len(engine.steps)
    engine.shadow(prompt(20, 310), "first", probability=0.9)
    engine.shadow(prompt(21, 310), "second", probability=0.1)
    engine.drain()
    with_shadow = {name: answer.token_ids for name, answer in engine.answers.items() if name.startswith("normal")}
    steps = [list(step.items()) for step in engine.steps[before:]]
    engine.clear()
    without = {f"normal-{number}": engine.run(prompt(10 + number, 50), f"again-{number}", 12) for number in range(3)}
    return {
        "steps": steps,
        "same tokens": with_shadow == {name: answer.token_ids for name, answer in without.items()},
        "results": engine.results("first", "second"),
    }


def parked_while_something_waits(engine: ShadowedEngine) -> Any:
    engine.shadow(prompt(1, 400), "shadow")
    engine.step()
    engine.add(prompt(2, 300), "normal", 2)
    engine.drain()
    return {"steps": list(engine.steps), "result": result_of(engine.answers["shadow"])}


def given_back_in_the_same_step(engine: ShadowedEngine) -> Any:
    engine.shadow(prompt(1, 900), "shadow")
    engine.step_until(lambda: engine.scheduler.jobs.get("shadow").request.num_computed_tokens >= 800)
    held = engine.blocks - engine.free_blocks
    engine.add(prompt(2, 1000), "big", 2)
    engine.add(prompt(3, 900), "bigger", 2)
    before = len(engine.steps)
    engine.step_until(lambda: "bigger" in engine.steps[-1])
    released = engine.scheduler.log.released_jobs
    steps = engine.steps[before:]
    preemptions = {name: request.num_preemptions for name, request in engine.scheduler.requests.items()}
    engine.drain()
    return {
        "held": held, "steps": steps, "released": released, "preemptions": preemptions,
        "result": result_of(engine.answers["shadow"]),
    }  # fmt: skip


def aborted(engine: ShadowedEngine) -> Any:
    engine.shadow(prompt(1, 400), "parked")
    engine.step()
    held = engine.blocks - engine.free_blocks
    engine.shadow(prompt(2, 400), "pending", probability=0.1)
    engine.abort("pending")
    pending_gone = "pending" not in engine.scheduler.jobs
    engine.abort("parked")
    left = engine.blocks - engine.free_blocks
    engine.drain()
    return {
        "held": held, "left": left, "pending gone": pending_gone, "jobs": len(engine.scheduler.jobs),
        "known": list(engine.scheduler.requests), "result": engine.results("parked", "pending"),
    }  # fmt: skip


def full_class(engine: ShadowedEngine) -> Any:
    engine.scheduler.free_queue.cache.set_cap(5)
    engine.shadow(prompt(1, 400), "shadow")
    engine.drain()
    engine.scheduler.free_queue.cache.set_cap(0)
    engine.shadow(prompt(2, 400), "nothing")
    engine.drain()
    return {**engine.results("shadow", "nothing"), "class": engine.scheduler.free_queue.cache.size}


def promotion(engine: ShadowedEngine) -> Any:
    cache = engine.scheduler.free_queue.cache
    engine.scheduler.log.evicted_blocks = 0
    engine.run(prompt(1, 10 * BLOCK_SIZE), "old normal")
    engine.shadow(prompt(2, 10 * BLOCK_SIZE), "hit later")
    engine.shadow(prompt(3, 10 * BLOCK_SIZE), "never hit")
    engine.drain()
    before = cache.size
    engine.run(prompt(2, 10 * BLOCK_SIZE + 20), "hits")
    after = cache.size
    # 33 blocks are free without content; 18 more are needed: the class goes first, then what is normal.
    engine.run(prompt(4, 31 * BLOCK_SIZE), "large")
    engine.run(prompt(5, 20 * BLOCK_SIZE), "another")
    kept = []
    for seed in (3, 1, 2):
        engine.add(prompt(seed, 10 * BLOCK_SIZE + 1), "looks")
        kept.append(engine.scheduler.kv_cache_manager.get_computed_blocks(engine.scheduler.requests["looks"])[1])
        engine.abort("looks")
    return {"class": [before, after], "kept": kept, "evicted": engine.scheduler.log.evicted_blocks}


def likelier_first(engine: ShadowedEngine) -> Any:
    cache = engine.scheduler.free_queue.cache
    cache.set_cap(10)
    engine.shadow(prompt(1, 8 * BLOCK_SIZE), "unlikely", probability=0.1)
    engine.step_until(lambda: len(engine.steps) == 2)
    engine.scheduler.free_queue.cache._cold_seconds = 1000.0
    engine.shadow(prompt(2, 8 * BLOCK_SIZE), "likely", probability=0.9)
    engine.drain()
    cache._cold_seconds = 0.0
    return {
        "order": [name for step in engine.steps for name in step],
        **engine.results("likely", "unlikely"),
    }


def routed(engine: ShadowedEngine) -> Any:
    from pd_shadow.policy.base import Iteration, StepReason

    engine.scheduler.use_controller(engine.scheduler.plugin.controller)
    decoding(engine, "routed", 1, extra_args={"pd_shadow_routed": True, "pd_shadow_tpot_slo": 10.0})
    engine.shadow(prompt(2, 400), "shadow")
    before = len(engine.steps)
    for _ in range(3):
        engine.step()
    without = [step.get("shadow", 0) for step in engine.steps[before:]]
    engine.scheduler.controller.ran(Iteration(0.064 / 0.025, 0.0, True, StepReason.NO_WORK))
    engine.step()
    engine.step()
    with_credit = [step.get("shadow", 0) for step in engine.steps[-2:]]
    engine.abort("routed")
    engine.drain()
    return {
        "without": without, "with": with_credit, "left": engine.scheduler.controller.credit.seconds,
        "result": result_of(engine.answers["shadow"]),
    }  # fmt: skip


def switched(engine: ShadowedEngine) -> Any:
    from pd_shadow.policy.approach import EngineController

    seen = {}
    for kind in (EngineController.OFF, EngineController.EAGER):
        engine.scheduler.use_controller(EngineController.HARVEST_SLO)
        engine.grant(100)
        engine.shadow(prompt(1, 400), f"parked {kind}")
        engine.step()
        engine.shadow(prompt(2, 400), f"pending {kind}")
        engine.scheduler.use_controller(kind)
        engine.drain()
        seen.update(engine.results(f"parked {kind}", f"pending {kind}"))
        engine.clear()
        engine.scheduler.use_controller(kind)
        engine.shadow(prompt(3, 100), f"later {kind}")
        engine.drain()
        seen[f"later {kind}"] = [len(engine.answers[f"later {kind}"].token_ids), engine.steps[:1]]
        seen[f"result later {kind}"] = result_of(engine.answers[f"later {kind}"])
    engine.scheduler.use_controller(EngineController.HARVEST_SLO)
    return seen


def too_many(engine: ShadowedEngine) -> Any:
    for number in range(MAX_JOBS + 2):
        engine.shadow(prompt(1, 40), f"leg-{number}", probability=0.5)
    engine.drain()
    ends = [result_of(engine.answers[f"leg-{number}"])["end"] for number in range(MAX_JOBS + 2)]
    return [ends.index("no_room"), ends[MAX_JOBS:], set(ends[:MAX_JOBS]) == {"done"}]


def same_prompt_at_once(engine: ShadowedEngine) -> Any:
    context = prompt(1, 300)
    engine.grant(1000)
    engine.shadow(context, "shadow")
    engine.step()
    engine.add(context, "normal", 4)
    engine.shadow(context, "twin")
    engine.drain()
    tokens = engine.answers["normal"].token_ids
    engine.clear()
    return {
        "same tokens": tokens == engine.run(context, "again", 4).token_ids,
        **engine.results("shadow", "twin"),
    }


def short_prompts(engine: ShadowedEngine) -> Any:
    engine.shadow(prompt(1, 1), "one token")
    engine.shadow(prompt(2, BLOCK_SIZE - 1), "less than a block")
    engine.shadow(prompt(3, BLOCK_SIZE), "one block")
    engine.shadow(prompt(4, BLOCK_SIZE + 1), "a block and a token")
    engine.drain()
    names = ("one token", "less than a block", "one block", "a block and a token")
    return {"covered": {name: result_of(engine.answers[name])["covered_tokens"] for name in names},
            "computed": {name: engine.computed_tokens(name) for name in names}}  # fmt: skip


def reset_with_jobs(engine: ShadowedEngine) -> Any:
    engine.shadow(prompt(1, 400), "parked")
    engine.step()
    engine.shadow(prompt(2, 400), "pending")
    done = engine.scheduler.reset_prefix_cache()
    cache = engine.scheduler.free_queue.cache
    seen = {"done": done, "class": cache.size, "room": engine.scheduler.free_queue.room() == cache.cap}
    engine.drain()
    return {**seen, **engine.results("parked", "pending")}


def paused(engine: ShadowedEngine) -> Any:
    from vllm.v1.core.sched.interface import PauseState

    scheduler = engine.scheduler
    engine.shadow(prompt(1, 400), "parked")
    engine.step()
    engine.shadow(prompt(2, 400), "pending")
    seen: dict[str, Any] = {}
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        scheduler.set_pause_state(state)
        # The first takes in what may be in flight.
        engine.step()
        before = len(engine.steps)
        engine.step()
        engine.shadow(prompt(3, 20), f"during {state.name}")
        engine.step()
        seen[state.name] = [scheduler.has_requests(), [step for step in engine.steps[before:] if step]]
    held = engine.blocks - engine.free_blocks
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    return {**seen, "held": held, **engine.results("parked", "pending", "during PAUSED_NEW")}


def taught_beside_decodes(engine: ShadowedEngine) -> Any:
    from pd_shadow.engine.vllm import scheduler as module

    clock = Clock()
    module.time = clock  # type: ignore[assignment]
    taught = engine.scheduler.latency
    decoding(engine, "normal", 1, max_tokens=60)
    engine.scheduler.latency = OnlineLatency()
    before = len(engine.steps)
    engine.shadow(prompt(2, 400), "shadow")
    chunks = []
    for _ in range(30):
        engine.step()
        clock.ahead += 0.4
        chunks.append(engine.steps[-1].get("shadow", 0) if len(engine.steps) > before else 0)
    engine.scheduler.latency = taught
    engine.drain()
    module.time = time
    return {"chunks": chunks, "result": result_of(engine.answers["shadow"])}


def watchdog(engine: ShadowedEngine) -> Any:
    from pd_shadow.engine.vllm import scheduler as module

    clock = Clock()
    module.time = clock  # type: ignore[assignment]
    decoding(engine, "normal", 1, max_tokens=10)
    engine.grant(0)
    engine.shadow(prompt(2, 400), "behind normal work")
    while engine.answers["normal"].finish_reason is None:
        engine.step()
        clock.ahead += 400
    engine.grant(100)
    engine.drain()
    engine.grant(0)
    engine.shadow(prompt(3, 400), "stuck")
    engine.step()
    in_time = result_of(engine.answers["stuck"])
    clock.ahead += 700
    engine.step()
    engine.shadow(prompt(4, 400), "after it")
    engine.step()
    engine.grant(100)
    engine.drain()
    module.time = time
    return {"in time": in_time, **engine.results("behind normal work", "stuck", "after it")}


def as_many_as_the_runner_holds(engine: ShadowedEngine) -> Any:
    scheduler = engine.scheduler
    places = scheduler.max_num_running_reqs, scheduler.max_num_active_reqs
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 2
    engine.shadow(prompt(1, 600), "shadow")
    engine.step()
    for number in range(3):
        engine.add(prompt(2 + number, 40), f"normal-{number}", 6)
    most = 0
    while scheduler.has_requests():
        engine.step()
        parked = [job for job in scheduler.jobs if job.request.status.name == "RUNNING"]
        most = max(most, len(scheduler.running) + len(parked))
    scheduler.max_num_running_reqs, scheduler.max_num_active_reqs = places
    return {"most": most, "result": result_of(engine.answers["shadow"])}


def released_in_flight(engine: ShadowedEngine) -> Any:
    decoding(engine, "decodes", 1, max_tokens=20)
    engine.shadow(prompt(2, 600), "unlikely", probability=0.1)
    engine.step()
    engine.step()
    engine.shadow(prompt(3, BLOCK_SIZE), "likely", probability=0.9)
    engine.drain()
    return engine.results("likely", "unlikely")


def adapters(engine: ShadowedEngine) -> Any:
    scheduler = engine.scheduler
    scheduler.lora_config = SimpleNamespace(max_loras=1)
    engine.shadow(prompt(1, 600), "shadow")
    scheduler.requests["shadow"].lora_request = SimpleNamespace(lora_int_id=1)
    engine.step()
    engine.add(prompt(2, 40), "normal", 5)
    scheduler.requests["normal"].lora_request = SimpleNamespace(lora_int_id=2)
    engine.step_until(lambda: engine.answers["normal"].finish_reason)
    together = [step for step in engine.steps if len(step) > 1]
    engine.drain()
    scheduler.lora_config = None
    return {"together": together, "result": result_of(engine.answers["shadow"])}


def long_prefills(engine: ShadowedEngine) -> Any:
    config = engine.scheduler.scheduler_config
    config.long_prefill_token_threshold = 64
    engine.shadow(prompt(1, 600), "shadow")
    engine.step()
    engine.add(prompt(2, 456), "alone", 2)
    engine.grant(1000)
    engine.step_until(lambda: engine.answers["alone"].token_ids)
    alone = [step for step in engine.steps if "alone" in step]
    engine.clear()
    decoding(engine, "decode", 3)
    engine.add(prompt(4, 150), "one of two", 2)
    engine.step()
    engine.grant(1000)
    engine.shadow(prompt(5, 600), "third")
    before = len(engine.steps)
    engine.step_until(lambda: engine.answers["one of two"].finish_reason)
    config.long_prefill_token_threshold = 0
    engine.abort("decode", "third")
    return {"alone": alone, "three": engine.steps[before:][:2]}


def last_block_taken_by_a_decode(engine: ShadowedEngine) -> Any:
    """The room is counted before the step; a decode takes a block of it within the step."""
    cache = engine.scheduler.free_queue.cache
    cache._cold_seconds = 1000.0
    # All that is free has content that is not cold, but four blocks.
    engine.run(prompt(30, 29 * BLOCK_SIZE - 1), "fills")
    engine.run(prompt(31, 28 * BLOCK_SIZE - 1), "fills more")
    engine.add(prompt(32, BLOCK_SIZE - 2), "decodes", 6)
    engine.step_until(lambda: engine.scheduler.requests["decodes"].num_computed_tokens == BLOCK_SIZE)
    unhashed = engine.scheduler.free_queue.room()
    engine.grant(1000)
    engine.shadow(prompt(33, unhashed * BLOCK_SIZE), "shadow")
    engine.drain()
    cache._cold_seconds = 0.0
    return {
        "room": unhashed, "decoded": len(engine.answers["decodes"].token_ids),
        "result": result_of(engine.answers["shadow"]),
    }  # fmt: skip


def tails(engine: ShadowedEngine) -> Any:
    """The tail of a prompt is never computed, and takes no block of the room of another job."""
    cache = engine.scheduler.free_queue.cache
    cache.set_cap(6)
    cache._cold_seconds = 1000.0
    engine.grant(1000)
    engine.shadow(prompt(1, 2 * BLOCK_SIZE + 20), "first", probability=0.9)
    engine.shadow(prompt(2, 4 * BLOCK_SIZE + 20), "second", probability=0.5)
    engine.drain()
    cache._cold_seconds = 0.0
    return {"steps": list(engine.steps), **engine.results("first", "second")}


def small_rest_beside_a_long_job(engine: ShadowedEngine) -> Any:
    decoding(engine, "decode", 3)
    engine.grant(40)
    object.__setattr__(engine.scheduler.plugin, "minimum_tokens", 64)
    engine.shadow(prompt(1, BLOCK_SIZE), "rest", probability=0.9)
    engine.shadow(prompt(2, 400), "long", probability=0.5)
    engine.step_until(lambda: engine.answers["rest"].finish_reason, limit=10)
    engine.abort("decode", "long")
    object.__setattr__(engine.scheduler.plugin, "minimum_tokens", 32)
    return engine.results("rest")


def statistics(engine: ShadowedEngine) -> Any:
    from vllm.v1.engine import EngineCoreEventType

    scheduler = engine.scheduler
    seen = {}
    observe = scheduler.update_from_output

    def observed(*arguments: Any) -> Any:
        outputs = observe(*arguments)
        for output in [output for client in outputs.values() for output in client.outputs]:
            events = [event.type for event in output.events or ()]
            seen[output.request_id] = sorted(EngineCoreEventType(event).name for event in events)
        return outputs

    scheduler.update_from_output = observed
    engine.run(prompt(1, 100), "normal")
    engine.shadow(prompt(1, 96), "cached")
    engine.shadow(prompt(2, 96), "computed")
    engine.drain()
    del scheduler.update_from_output
    return {"events": seen, "log_stats": scheduler.log_stats}


SCENARIOS = (
    too_many,
    covered_then_hit, last_in_the_batch, parked_while_something_waits, given_back_in_the_same_step, aborted, full_class,
    promotion, likelier_first, routed, switched, same_prompt_at_once, short_prompts, reset_with_jobs, paused,
    taught_beside_decodes, watchdog,
    as_many_as_the_runner_holds, released_in_flight, adapters, long_prefills, last_block_taken_by_a_decode, tails,
    small_rest_beside_a_long_job, statistics,
)  # fmt: skip
# The same with steps in flight, vLLM's other queue and a connector that has nothing.
ENGINES: dict[str, dict[str, Any]] = {
    "in step, by priority": {},
    "two steps ahead, first come first served": {
        "ahead": 2, "scheduler_cls": AHEAD, "scheduling_policy": "fcfs", "kv_transfer_config": CONNECTOR,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=ENGINES)
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run(SCENARIOS, **ENGINES[request.param])


def done(tokens: int) -> dict[str, Any]:
    return {"covered_tokens": tokens, "computed_tokens": tokens, "end": "done"}


def test_a_leg_is_answered_without_a_token_and_a_later_call_finds_all_it_covers(seen: dict[str, Any]) -> None:
    assert seen["covered_then_hit"] == {
        "tokens": [], "finish": "stop", "result": done(320), "steps": [100, 100, 100, 20], "cached": 320,
    }  # fmt: skip


def test_a_shadow_comes_last_with_exactly_its_grant_and_costs_nobody_a_token(seen: dict[str, Any]) -> None:
    found = seen["last_in_the_batch"]
    normal = [["normal-0", 1], ["normal-1", 1], ["normal-2", 1]]
    steps = [step for step in found["steps"] if step]
    assert steps[:6] == [
        [*normal, ["first", 100]],
        [*normal, ["first", 100]],
        # What the first leaves of a grant goes to the second.
        [*normal, ["first", 88], ["second", 12]],
        [*normal, ["second", 100]],
        [*normal, ["second", 100]],
        [*normal, ["second", 76]],
    ]
    assert all(step == normal for step in steps[6:])
    assert found["same tokens"]
    assert found["results"] == {"first": done(288), "second": done(288)}


def test_a_shadow_is_parked_as_soon_as_something_waits_and_then_goes_on(seen: dict[str, Any]) -> None:
    found = seen["parked_while_something_waits"]
    assert found["steps"][:3] == [{"shadow": 100}, {"normal": 256}, {"normal": 44, "shadow": 56}]
    assert found["result"] == done(384)


def test_blocks_are_given_back_in_the_step_that_needs_them_and_the_job_ends_later(seen: dict[str, Any]) -> None:
    found = seen["given_back_in_the_same_step"]
    assert found["held"] == 25
    # 38 blocks are free: 32 for the first request, 29 for the second only with those of the shadow.
    assert found["steps"] == [{"big": 256}, {"big": 256}, {"big": 256}, {"big": 232, "bigger": 24}]
    assert found["preemptions"] == {"shadow": 1, "big": 0, "bigger": 0}
    assert found["released"] == 1
    assert found["result"]["covered_tokens"] == 896
    assert found["result"]["end"] == "done"


def test_an_abort_takes_blocks_and_job_at_once_and_is_not_answered(seen: dict[str, Any]) -> None:
    assert seen["aborted"] == {
        "held": 4, "left": 0, "pending gone": True, "jobs": 0, "known": [],
        "result": {"parked": None, "pending": None},
    }  # fmt: skip


def test_a_full_class_ends_a_leg_with_what_it_has(seen: dict[str, Any]) -> None:
    found = seen["full_class"]
    assert (found["shadow"]["covered_tokens"], found["shadow"]["end"]) == (160, "no_room")
    assert (found["nothing"]["covered_tokens"], found["nothing"]["end"]) == (0, "no_room")
    assert found["class"] == 0


def test_a_normal_hit_promotes_and_what_is_left_of_the_class_goes_before_everything_normal(
    seen: dict[str, Any],
) -> None:
    # Never hit; the least recently used normal prefix; hit once. All of the class went, and 8 blocks of the second.
    assert seen["promotion"] == {"class": [20, 10], "kept": [0, 64, 320], "evicted": 18}


def test_a_likelier_job_goes_first_and_takes_the_room_of_a_less_likely_one(seen: dict[str, Any]) -> None:
    found = seen["likelier_first"]
    assert found["likely"] == done(256)
    assert (found["unlikely"]["covered_tokens"], found["unlikely"]["end"]) == (64, "no_room")
    assert found["order"][-3:] == ["likely"] * 3


def test_beside_a_routed_call_there_is_only_credit_and_it_is_spent_once(seen: dict[str, Any]) -> None:
    found = seen["routed"]
    assert found["without"] == [0, 0, 0]
    assert found["with"] == [64, 0]
    assert found["left"] < 0.032


@pytest.mark.parametrize("kind", ["off", "eager"])
def test_a_controller_that_runs_no_jobs_ends_them(seen: dict[str, Any], kind: str) -> None:
    found = seen["switched"]
    assert (found[f"parked {kind}"]["covered_tokens"], found[f"parked {kind}"]["end"]) == (96, "paused")
    assert (found[f"pending {kind}"]["covered_tokens"], found[f"pending {kind}"]["end"]) == (0, "paused")


def test_an_engine_holds_so_many_legs_and_gives_more_back(seen: dict[str, Any]) -> None:
    assert seen["too_many"] == [MAX_JOBS, ["no_room", "no_room"], True]


def test_eager_shadow_work_is_work_like_any_other(seen: dict[str, Any]) -> None:
    found = seen["switched"]
    assert found["later eager"] == [1, [{"later eager": 100}]]
    assert found["result later eager"] is None
    assert found["later off"] == [0, [{}]]


def test_a_call_and_two_shadows_with_the_same_prompt_do_not_disturb_each_other(seen: dict[str, Any]) -> None:
    found = seen["same_prompt_at_once"]
    assert found["same tokens"]
    assert found["shadow"] == done(288)
    # By its turn all of it is there.
    assert found["twin"] == {"covered_tokens": 288, "computed_tokens": 0, "end": "done"}


def test_only_whole_blocks_are_computed(seen: dict[str, Any]) -> None:
    expected = {"one token": 0, "less than a block": 0, "one block": 32, "a block and a token": 32}
    assert seen["short_prompts"] == {"covered": expected, "computed": expected}


def test_a_reset_of_the_cache_ends_jobs_and_empties_the_class(seen: dict[str, Any]) -> None:
    found = seen["reset_with_jobs"]
    assert (found["done"], found["class"], found["room"]) == (True, 0, True)
    assert (found["parked"]["end"], found["pending"]["end"]) == ("paused", "paused")


def test_a_paused_engine_comes_to_rest_whatever_shadow_work_there_is(seen: dict[str, Any]) -> None:
    found = seen["paused"]
    assert found["PAUSED_NEW"] == found["PAUSED_ALL"] == [False, []]
    assert found["held"] == 4
    assert found["parked"] == found["pending"] == done(384)
    assert found["during PAUSED_NEW"] == done(0)


def test_an_engine_that_only_decodes_learns_what_a_chunk_costs_from_a_small_one_at_a_time(seen: dict[str, Any]) -> None:
    chunks = [chunk for chunk in seen["taught_beside_decodes"]["chunks"] if chunk]
    # Twelve seconds pass, and a probe may come every one of them.
    assert 5 <= len(chunks) <= 13
    assert set(chunks) == {PROBE_TOKENS}
    assert seen["taught_beside_decodes"]["result"] == done(384)


def test_the_watchdog_ends_what_is_stuck_not_what_waits_for_normal_work(seen: dict[str, Any]) -> None:
    found = seen["watchdog"]
    assert found["behind normal work"] == found["after it"] == done(384)
    assert found["in time"] is None
    assert found["stuck"]["end"] == "stalled"


def test_parked_jobs_leave_the_model_runner_to_normal_requests(seen: dict[str, Any]) -> None:
    found = seen["as_many_as_the_runner_holds"]
    assert found["most"] == 2
    assert (found["result"]["covered_tokens"], found["result"]["end"]) == (576, "done")


def test_a_job_released_while_a_step_is_in_flight_goes_on(seen: dict[str, Any]) -> None:
    found = seen["released_in_flight"]
    assert found["likely"] == done(32)
    assert (found["unlikely"]["covered_tokens"], found["unlikely"]["end"]) == (576, "done")


def test_a_parked_job_waits_for_a_place_among_the_adapters(seen: dict[str, Any]) -> None:
    assert seen["adapters"] == {"together": [], "result": done(576)}


def test_a_request_that_has_the_engine_to_itself_keeps_the_whole_step(seen: dict[str, Any]) -> None:
    found = seen["long_prefills"]
    assert found["alone"][:2] == [{"alone": 256}, {"alone": 200, "shadow": 56}]
    # vLLM's limit for long prefills holds where it would hold without shadow work, and then for the shadow, too.
    assert found["three"] == [
        {"decode": 1, "one of two": 64, "third": 64},
        {"decode": 1, "one of two": 22, "third": 64},
    ]


def test_a_block_that_a_decode_takes_first_is_no_loss_but_its_own(seen: dict[str, Any]) -> None:
    found = seen["last_block_taken_by_a_decode"]
    assert found["decoded"] == 6
    assert found["room"] == 7
    assert (found["result"]["covered_tokens"], found["result"]["end"]) == (6 * BLOCK_SIZE, "no_room")


def test_tails_take_no_block_of_the_class(seen: dict[str, Any]) -> None:
    found = seen["tails"]
    assert found["first"] == done(64)
    assert found["second"] == done(128)
    assert found["steps"][0] == {"first": 64, "second": 128}


def test_the_rest_of_a_job_is_no_smaller_for_a_long_one_behind_it(seen: dict[str, Any]) -> None:
    assert seen["small_rest_beside_a_long_job"] == {"rest": done(32)}


def test_every_leg_was_scheduled_for_vllms_request_statistics(seen: dict[str, Any]) -> None:
    assert seen["statistics"] == {
        "log_stats": True,
        "events": {name: ["QUEUED", "SCHEDULED"] for name in ("normal", "cached", "computed")},
    }
