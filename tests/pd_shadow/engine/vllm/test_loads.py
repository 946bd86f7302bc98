"""Shadow work whose KV a connector brings: on its way, failed, and too much for the class."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.pd_shadow.engine.vllm.shadowed import AHEAD, CONNECTOR, Clock, ShadowedEngine, result_of, run
from tests.pd_shadow.engine.vllm.stepping import BLOCK_SIZE, prompt

pytestmark = pytest.mark.engine

# Whatever NIXL would want to know; the held connector goes by the tokens.
REMOTE = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[0]], "remote_engine_id": "p",
    "remote_request_id": "r", "remote_host": "localhost", "remote_port": 1, "tp_size": 1, "remote_num_tokens": 320,
}  # fmt: skip


def loaded_hand(engine: ShadowedEngine, seed: int, blocks: int) -> tuple[Any, list[int]]:
    """A prompt of ten blocks and five tokens. The connector gets the KV of its first blocks, the engine keeps none."""
    from tests.pd_shadow.engine.vllm import held_connector

    context, name = prompt(seed, 10 * BLOCK_SIZE + 5), f"source {seed}"
    engine.add(context, name, 2)
    engine.step_until(lambda: engine.answers[name].token_ids)
    block_ids = engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
    held_connector.keep(context, block_ids[:blocks], BLOCK_SIZE)
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    engine.steps.clear()
    return held_connector.HAND, context


def warm_and_cold(engine: ShadowedEngine, context: list[int]) -> dict[str, Any]:
    """A normal call with the prompt: what it finds on the engine, and whether its tokens are those of a cold one."""
    from tests.pd_shadow.engine.vllm.held_connector import HAND

    HAND.empty()
    warm = engine.run(context, "warm", 4)
    engine.clear()
    return {"cached": warm.cached_tokens, "same tokens": warm.token_ids == engine.run(context, "cold", 4).token_ids}


def goes_on_from_what_was_loaded(engine: ShadowedEngine) -> Any:
    hand, context = loaded_hand(engine, 1, blocks=6)
    hand.holding = True
    engine.shadow(context, "shadow")
    engine.step()
    on_the_way = engine.scheduler.jobs.get("shadow").loading
    engine.shadow(prompt(2, 100), "other", probability=0.1)
    engine.add(prompt(3, 40), "normal", 2)
    engine.step_until(lambda: engine.answers["normal"].finish_reason and engine.answers["other"].finish_reason)
    hand.holding = False
    engine.drain()
    return {
        "on the way": on_the_way, **engine.results("shadow", "other"), "computed": engine.computed_tokens("shadow"),
        **warm_and_cold(engine, context),
    }  # fmt: skip


def more_than_the_class_holds(engine: ShadowedEngine) -> Any:
    _, context = loaded_hand(engine, 1, blocks=6)
    engine.scheduler.free_queue.cache.set_cap(3)
    engine.shadow(context, "shadow")
    engine.shadow(prompt(2, 100), "other", probability=0.1)
    engine.drain()
    return engine.results("shadow", "other")


def asked_again_later(engine: ShadowedEngine) -> Any:
    hand, context = loaded_hand(engine, 1, blocks=6)
    hand.undecided = 3
    engine.shadow(context, "shadow")
    engine.step()
    stages = dict(engine.scheduler._kv_fetch_counts)
    queues = len(engine.scheduler.waiting), len(engine.scheduler.deferred_waiting)
    engine.drain()
    return {"stages": sum(stages.values()), "queues": queues, **engine.results("shadow")}


def failed(engine: ShadowedEngine) -> Any:
    seen: dict[str, Any] = {}
    for how in ("fail_requests", "fail_blocks"):
        for kind in ("prefill", "fetch"):
            hand, context = loaded_hand(engine, 1, blocks=10)
            setattr(hand, how, True)
            engine.shadow(context, f"{kind} {how}", kind, kv_transfer_params=dict(REMOTE) if kind == "fetch" else None)
            engine.drain()
            seen[f"{kind} {how}"] = [
                result_of(engine.answers[f"{kind} {how}"]), engine.answers[f"{kind} {how}"].finish_reason,
                warm_and_cold(engine, context),
            ]  # fmt: skip
            engine.clear()
    return seen


def within_a_step(engine: ShadowedEngine) -> Any:
    seen: dict[str, Any] = {}
    for fails in (False, True):
        hand, context = loaded_hand(engine, 1, blocks=6)
        hand.loads_async, hand.fail_blocks = False, fails
        engine.shadow(context, "fails" if fails else "loads")
        engine.drain()
        name = "fails" if fails else "loads"
        seen[name] = [result_of(engine.answers[name]), warm_and_cold(engine, context)]
        engine.clear()
    return seen


def fetched_without_computing(engine: ShadowedEngine) -> Any:
    _, context = loaded_hand(engine, 1, blocks=10)
    engine.shadow(context, "fetch", "fetch", kv_transfer_params=dict(REMOTE))
    engine.drain()
    class_size = engine.scheduler.free_queue.cache.size
    # What is there already is not fetched again.
    engine.shadow(context, "twin", "fetch", kv_transfer_params=dict(REMOTE))
    engine.drain()
    return {
        **engine.results("fetch", "twin"), "class": class_size, "steps": [step for step in engine.steps if step],
        **warm_and_cold(engine, context),
    }  # fmt: skip


def fetched_only_while_the_link_is_free(engine: ShadowedEngine) -> Any:
    hand, context = loaded_hand(engine, 1, blocks=10)
    _, other = loaded_hand(engine, 2, blocks=10)
    _, third = loaded_hand(engine, 3, blocks=10)
    hand.holding = True
    engine.add(context, "normal", 2)
    engine.step()
    for name, tokens in (("first", other), ("second", third)):
        engine.shadow(tokens, name, "fetch", kv_transfer_params=dict(REMOTE))
    loading = []
    for _ in range(3):
        engine.step()
        loading.append([job.request_id for job in engine.scheduler.jobs if job.loading])
    hand.holding = False
    engine.step()
    hand.holding = True
    for _ in range(3):
        engine.step()
        loading.append([job.request_id for job in engine.scheduler.jobs if job.loading])
    engine.add(prompt(4, 40), "decodes", 3)
    engine.step_until(lambda: engine.answers["decodes"].finish_reason)
    hand.holding = False
    engine.drain()
    return {"loading": loading, **engine.results("first", "second")}


def not_to_be_fetched(engine: ShadowedEngine) -> Any:
    _, context = loaded_hand(engine, 1, blocks=10)
    needed = REMOTE.keys() - {"do_remote_decode"}
    lacking = [{key: value for key, value in REMOTE.items() if key != left_out} for left_out in sorted(needed)]
    wrong: list[Any] = [
        None, {}, {"do_remote_prefill": True}, *lacking, {**REMOTE, "remote_block_ids": [1, 2]},
        {**REMOTE, "remote_block_ids": None}, {**REMOTE, "remote_block_ids": []}, {**REMOTE, "remote_num_tokens": 319},
    ]  # fmt: skip
    for number, params in enumerate(wrong):
        engine.shadow(context, f"wrong {number}", "fetch", kv_transfer_params=params)
    engine.shadow(prompt(9, 100), "nobody has it", "fetch", kv_transfer_params=dict(REMOTE))
    engine.shadow(context, "right", "fetch", kv_transfer_params=dict(REMOTE))
    engine.scheduler.free_queue.cache.set_cap(9)
    engine.shadow(context, "no room", "fetch", probability=0.9, kv_transfer_params=dict(REMOTE))
    engine.step()
    engine.scheduler.free_queue.cache.set_cap(31)
    engine.drain()
    return {
        "wrong": {name: result_of(answer)["end"] for name, answer in engine.answers.items() if "wrong" in name},
        "steps": [step for step in engine.steps if step], **engine.results("nobody has it", "no room"),
    }  # fmt: skip


def aborted_on_the_way(engine: ShadowedEngine) -> Any:
    hand, context = loaded_hand(engine, 1, blocks=10)
    hand.holding = True
    engine.shadow(context, "fetch", "fetch", kv_transfer_params=dict(REMOTE))
    engine.step()
    engine.abort("fetch")
    held = engine.blocks - engine.free_blocks
    engine.step()
    hand.holding = False
    engine.drain()
    return {"held": held, "jobs": len(engine.scheduler.jobs), "told": hand.finished.count("fetch")}


def on_its_way_for_too_long(engine: ShadowedEngine) -> Any:
    from pd_shadow.engine.vllm import scheduler as module

    hand, context = loaded_hand(engine, 1, blocks=10)
    _, other = loaded_hand(engine, 2, blocks=10)
    module.time = clock = Clock()  # type: ignore[assignment]
    hand.holding = True
    engine.add(other, "normal", 2)
    engine.shadow(context, "fetch", "fetch", kv_transfer_params=dict(REMOTE))
    for _ in range(3):
        engine.step()
        clock.ahead += 400
    hand.holding = False
    engine.step()
    hand.holding = True
    engine.step_until(lambda: engine.answers["normal"].finish_reason)
    engine.step()
    clock.ahead += 400
    engine.step()
    loading, in_time = engine.scheduler.jobs.get("fetch").loading, engine.answers["fetch"].finish_reason
    clock.ahead += 400
    engine.step()
    too_late, held = result_of(engine.answers["fetch"]), engine.blocks - engine.free_blocks
    hand.holding = False
    engine.drain()
    module.time = time
    return {"loading": loading, "in time": in_time, "too late": too_late, "held": held}


def beside_a_parked_shadow(engine: ShadowedEngine) -> Any:
    """What a parked shadow still lacks is not kept free for it while a normal request loads."""
    _, context = loaded_hand(engine, 1, blocks=10)
    engine.shadow(prompt(22, 25 * BLOCK_SIZE), "shadow")
    engine.step()
    engine.grant(0)
    engine.add(prompt(23, 28 * BLOCK_SIZE + 1), "large", 20)
    engine.step_until(lambda: engine.answers["large"].token_ids)
    free = engine.free_blocks
    engine.add(context, "loads", 2)
    engine.step()
    loading = [request.request_id for request in engine.scheduler.kv_holding_waiting]
    released = engine.scheduler.log.released_jobs
    engine.grant(100)
    engine.drain()
    return {"free": free, "loading": loading, "released": released, "result": result_of(engine.answers["shadow"])}


def exported_once_it_is_computed(engine: ShadowedEngine) -> Any:
    """Blocks count as cached from when a step is scheduled; its output comes later."""
    from tests.pd_shadow.engine.vllm.held_connector import HAND

    context = prompt(1, 3 * BLOCK_SIZE)
    scheduler, order = engine.scheduler, []
    update = scheduler.update_from_output

    def observed(scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(scheduler_output, model_runner_output)
        order.extend(f"computed {name}" for name in scheduler_output.num_scheduled_tokens)
        order.extend(f"answered {output.request_id}" for client in outputs.values() for output in client.outputs)
        return outputs

    scheduler.update_from_output = observed
    HAND.empty()
    engine.add(prompt(2, 40), "other", 1)
    engine.step()
    engine.add(context, "normal", 1)
    engine.step()
    engine.shadow(context, "export", "export", kv_transfer_params={"do_remote_decode": True})
    engine.drain()
    del scheduler.update_from_output
    return {"order": order, **engine.results("export")}


HELD = (
    goes_on_from_what_was_loaded, more_than_the_class_holds, asked_again_later, failed, within_a_step,
    fetched_without_computing, not_to_be_fetched, aborted_on_the_way, beside_a_parked_shadow,
    exported_once_it_is_computed,
)  # fmt: skip
# These count iterations, which steps ahead would blur.
IN_STEP = (fetched_only_while_the_link_is_free, on_its_way_for_too_long)


@pytest.fixture(scope="module", params=[0, 2])
def held(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == 0:
        return run([*HELD, *IN_STEP], kv_transfer_config=CONNECTOR)
    return run(HELD, kv_transfer_config=CONNECTOR, ahead=request.param, scheduler_cls=AHEAD)


in_step = pytest.mark.parametrize("held", [0], indirect=True)


def done(covered: int, computed: int) -> dict[str, Any]:
    return {"covered_tokens": covered, "computed_tokens": computed, "end": "done"}


def nothing(end: str) -> dict[str, Any]:
    return {"covered_tokens": 0, "computed_tokens": 0, "end": end}


def test_a_prefill_goes_on_from_what_was_loaded_and_others_work_meanwhile(held: dict[str, Any]) -> None:
    found = held["goes_on_from_what_was_loaded"]
    assert found["on the way"]
    assert found["shadow"] == done(320, 128)
    assert found["computed"] == 128
    assert found["other"] == done(96, 96)
    assert (found["cached"], found["same tokens"]) == (320, True)


def test_a_load_that_does_not_fit_into_the_class_ends_its_leg_only(held: dict[str, Any]) -> None:
    assert held["more_than_the_class_holds"] == {"shadow": nothing("no_room"), "other": done(96, 96)}


def test_a_connector_may_take_its_time_to_answer(held: dict[str, Any]) -> None:
    # Meanwhile the job is in none of vLLM's queues and counts.
    assert held["asked_again_later"] == {"stages": 0, "queues": [0, 0], "shadow": done(320, 128)}


@pytest.mark.parametrize("how", ["fail_requests", "fail_blocks"])
@pytest.mark.parametrize("kind", ["prefill", "fetch"])
def test_what_failed_to_come_is_never_cached(held: dict[str, Any], kind: str, how: str) -> None:
    result, finish_reason, later = held["failed"][f"{kind} {how}"]
    assert result == nothing("transfer_failed")
    assert finish_reason == "stop"
    assert later == {"cached": 0, "same tokens": True}


def test_loads_within_a_step(held: dict[str, Any]) -> None:
    found = held["within_a_step"]
    assert found["loads"] == [done(320, 128), {"cached": 320, "same tokens": True}]
    assert found["fails"] == [nothing("transfer_failed"), {"cached": 0, "same tokens": True}]


def test_a_fetch_computes_nothing_and_fetches_nothing_twice(held: dict[str, Any]) -> None:
    assert held["fetched_without_computing"] == {
        "fetch": done(320, 0), "twin": done(320, 0), "class": 10, "steps": [], "cached": 320, "same tokens": True,
    }  # fmt: skip


def test_a_fetch_without_a_source_ends_without_a_forward_pass(held: dict[str, Any]) -> None:
    found = held["not_to_be_fetched"]
    assert set(found["wrong"].values()) == {"not_transferable"}
    assert found["nobody has it"] == nothing("not_transferable")
    assert found["no room"] == nothing("no_room")
    assert found["steps"] == []


def test_blocks_of_an_aborted_load_stay_until_nothing_writes_to_them(held: dict[str, Any]) -> None:
    assert held["aborted_on_the_way"] == {"held": 10, "jobs": 0, "told": 1}


def test_loads_of_normal_requests_leave_no_room_for_parked_shadows(held: dict[str, Any]) -> None:
    found = held["beside_a_parked_shadow"]
    # 10 to load, 21 that the shadow lacks.
    assert found["free"] == 30
    assert found["loading"] == ["loads"]
    assert found["released"] == 0
    assert found["result"] == done(800, 800)


def test_an_export_is_answered_once_what_it_hands_out_is_computed(held: dict[str, Any]) -> None:
    found = held["exported_once_it_is_computed"]
    assert found["export"] == done(96, 0)
    order = found["order"]
    assert order.index("computed normal") < order.index("answered export")


@in_step
def test_one_fetch_at_a_time_and_none_beside_a_normal_one(held: dict[str, Any]) -> None:
    found = held["fetched_only_while_the_link_is_free"]
    assert found["loading"] == [[], [], [], [], ["first"], ["first"]]
    assert found["first"] == found["second"] == done(320, 0)


@in_step
def test_the_watchdog_measures_a_load_from_its_beginning(held: dict[str, Any]) -> None:
    assert held["on_its_way_for_too_long"] == {
        "loading": True, "in time": None, "too late": nothing("stalled"), "held": 10,
    }  # fmt: skip
