"""Exports and host tier of a producer, fetches of a consumer, with vLLM's own connectors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pd_shadow.engine.vllm.shadowed import ShadowedEngine, result_of, run
from tests.pd_shadow.engine.vllm.stepping import BLOCK_SIZE, prompt

pytestmark = pytest.mark.engine

LEASE_SECONDS = 1
EXPORT = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
HOST_TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostMemorySpec", "spec_module_path": "tests.pd_shadow.engine.vllm.host_memory",
        "cpu_bytes_to_use": 64 * 1024 * 1024,
    },
}  # fmt: skip
# An engine that does not exist.
NOWHERE = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [list(range(1, 11))],
    "remote_engine_id": "gone", "remote_request_id": "gone-1", "remote_host": "127.0.0.1", "remote_port": 9,
    "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 320, "transfer_mode": "pull",
}  # fmt: skip


def nixl(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
    }  # fmt: skip


def exported(engine: ShadowedEngine) -> Any:
    context = prompt(1, 10 * BLOCK_SIZE + 5)
    engine.shadow(context, "shadow")
    engine.drain()
    engine.steps.clear()
    engine.shadow(context, "export", "export", kv_transfer_params=EXPORT)
    engine.step_until(lambda: engine.answers["export"].finish_reason)
    params = dict(engine.answers["export"].kv_transfer_params or {})
    pinned = engine.blocks - engine.free_blocks
    # Whoever hangs up now does not take them away from the reader.
    engine.engine.engine_core.abort_requests(["export"])
    engine.step()
    still = engine.blocks - engine.free_blocks
    steps = [step for step in engine.steps if step]
    engine.drain()
    after_the_lease = engine.blocks - engine.free_blocks
    return {
        "tokens": engine.answers["export"].token_ids, "finish": engine.answers["export"].finish_reason,
        "result": params["pd_shadow"], "blocks": len(params["remote_block_ids"][0]),
        "remote_num_tokens": params["remote_num_tokens"], "do_remote_prefill": params["do_remote_prefill"],
        "pinned": [pinned, still, after_the_lease], "steps": steps,
        "class": engine.scheduler.free_queue.cache.size, "found": engine.run(context, "normal").cached_tokens,
    }  # fmt: skip


def not_exported(engine: ShadowedEngine) -> Any:
    context = prompt(1, 10 * BLOCK_SIZE)
    engine.shadow(context[: 4 * BLOCK_SIZE], "shadow")
    engine.drain()
    engine.shadow(context, "partly cached", "export", kv_transfer_params=EXPORT)
    engine.shadow(prompt(2, 100), "not cached", "export", kv_transfer_params=EXPORT)
    engine.shadow(prompt(1, 20), "less than a block", "export", kv_transfer_params=EXPORT)
    engine.shadow(context[: 4 * BLOCK_SIZE], "no parameters", "export")
    engine.drain()
    config = engine.scheduler.vllm_config.device_config
    config.device_type, device = "cuda", config.device_type
    engine.shadow(context[: 4 * BLOCK_SIZE], "host buffer", "export", kv_transfer_params=EXPORT)
    engine.drain()
    config.device_type = device
    names = ("partly cached", "not cached", "less than a block", "no parameters", "host buffer")
    return {**engine.results(*names), "held": engine.blocks - engine.free_blocks}


def no_more_than_may_be_pinned(engine: ShadowedEngine) -> Any:
    """A quarter of 63 blocks."""
    contexts = {"first": prompt(1, 10 * BLOCK_SIZE), "second": prompt(2, 10 * BLOCK_SIZE)}
    for name, context in contexts.items():
        engine.shadow(context, f"prefill {name}")
    engine.drain()
    for name, context in contexts.items():
        engine.shadow(context, name, "export", kv_transfer_params=EXPORT)
    engine.step_until(lambda: all(engine.answers[name].finish_reason for name in contexts))
    pinned = engine.blocks - engine.free_blocks
    engine.drain()
    # The lease is over.
    engine.shadow(contexts["second"], "third", "export", kv_transfer_params=EXPORT)
    engine.drain()
    return {"pinned": pinned, **engine.results("first", "second", "third")}


def with_a_watermark(engine: ShadowedEngine) -> Any:
    """Blocks that vLLM keeps free for running requests are no matter of an export, which takes none."""
    manager = engine.scheduler.kv_cache_manager
    context = prompt(1, 10 * BLOCK_SIZE)
    engine.shadow(context, "shadow")
    engine.drain()
    manager.watermark_blocks = engine.blocks
    engine.shadow(context, "export", "export", kv_transfer_params=EXPORT)
    engine.step_until(lambda: engine.answers["export"].finish_reason)
    manager.watermark_blocks = 0
    params = engine.answers["export"].kv_transfer_params or {}
    engine.drain()
    return {"blocks": len(params["remote_block_ids"][0]), "result": params["pd_shadow"]}


def a_prefill_pins_nothing(engine: ShadowedEngine) -> Any:
    engine.shadow(prompt(1, 200), "shadow", kv_transfer_params=EXPORT)
    engine.step_until(lambda: engine.answers["shadow"].finish_reason)
    held = engine.blocks - engine.free_blocks
    engine.drain()
    return {"held": held, "result": result_of(engine.answers["shadow"])}


def normal_exports_beside_it(engine: ShadowedEngine) -> Any:
    context = prompt(1, 300)
    engine.shadow(prompt(2, 600), "shadow")
    engine.step()
    engine.add(context, "normal", 1, kv_transfer_params=EXPORT)
    engine.step_until(lambda: engine.answers["normal"].finish_reason)
    params = engine.answers["normal"].kv_transfer_params or {}
    engine.step_until(lambda: engine.answers["shadow"].finish_reason)
    held = engine.blocks - engine.free_blocks
    engine.drain()
    return {
        "tokens": len(engine.answers["normal"].token_ids), "blocks": len(params["remote_block_ids"][0]), "held": held,
        "result": result_of(engine.answers["shadow"]),
    }  # fmt: skip


def paused_with_a_connector(engine: ShadowedEngine) -> Any:
    from vllm.v1.core.sched.interface import PauseState

    scheduler = engine.scheduler
    engine.shadow(prompt(1, 400), "parked")
    engine.step()
    engine.shadow(prompt(2, 400), "pending")
    seen = {}
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        scheduler.set_pause_state(state)
        for _ in range(20):
            # The host tier may still store what is there.
            engine.step()
        seen[state.name] = scheduler.has_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    return {**seen, **engine.results("parked", "pending")}


def fetched_from_nowhere(engine: ShadowedEngine) -> Any:
    # As the role says.
    engine.scheduler.controller = None
    engine.add(prompt(9, 40), "decodes", 30)
    engine.step()
    engine.shadow(prompt(1, 10 * BLOCK_SIZE), "fetch", "fetch", kv_transfer_params=NOWHERE)
    engine.shadow(prompt(3, 100), "prefill")
    engine.drain()
    found = engine.run(prompt(1, 10 * BLOCK_SIZE), "normal", 2)
    return {
        **engine.results("fetch", "prefill"), "finish": engine.answers["fetch"].finish_reason,
        "decoded": len(engine.answers["decodes"].token_ids), "found": found.cached_tokens,
        "computed": engine.computed_tokens("fetch"), "beats": list(heartbeats(engine)),
    }  # fmt: skip


def bogus_parameters(engine: ShadowedEngine) -> Any:
    """Each of these ends vLLM's engine when a normal request brings it."""
    wrong: list[Any] = [None, {}, {"do_remote_prefill": True}, {**NOWHERE, "remote_block_ids": [1, 2, 3]}]
    wrong += [{**NOWHERE, "remote_num_tokens": 319}, {**NOWHERE, "remote_engine_id": None}]
    for number, params in enumerate(wrong):
        engine.shadow(prompt(1, 10 * BLOCK_SIZE), f"wrong {number}", "fetch", kv_transfer_params=params)
    engine.drain()
    return {
        "ends": [result_of(engine.answers[f"wrong {number}"])["end"] for number in range(len(wrong))],
        "goes on": len(engine.run(prompt(2, 40), "normal", 3).token_ids),
    }


def aborted_fetches(engine: ShadowedEngine) -> Any:
    engine.shadow(prompt(1, 10 * BLOCK_SIZE), "on its way", "fetch", kv_transfer_params=NOWHERE)
    engine.shadow(prompt(2, 10 * BLOCK_SIZE), "pending", "fetch", kv_transfer_params=NOWHERE)
    engine.step()
    engine.abort("on its way", "pending")
    engine.drain()
    return {"held": engine.blocks - engine.free_blocks, "beats": list(heartbeats(engine))}


def heartbeats(engine: ShadowedEngine) -> Any:
    return engine.scheduler.connector.connector_scheduler._heartbeat_by_engine


def ended_in_the_middle_of_a_block(engine: ShadowedEngine) -> Any:
    """With vLLM's host tier: what was not computed must not be stored as if it was."""
    from pd_shadow.policy.approach import EngineController

    context = prompt(11, 6 * BLOCK_SIZE)
    engine.shadow(context, "shadow")
    engine.step()
    engine.scheduler.use_controller(EngineController.OFF)
    engine.drain()
    engine.scheduler.use_controller(EngineController.HARVEST_SLO)
    engine.scheduler.reset_prefix_cache()
    warm = engine.run(context, "warm", 4)
    engine.clear()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    cold = engine.run(context, "cold", 4)
    return {
        "result": result_of(engine.answers["shadow"]), "cached": [warm.cached_tokens, cold.cached_tokens],
        "same tokens": warm.token_ids == cold.token_ids,
    }  # fmt: skip


def back_from_the_host(engine: ShadowedEngine) -> Any:
    context = prompt(12, 10 * BLOCK_SIZE)
    engine.run(context[: 6 * BLOCK_SIZE], "earlier")
    engine.scheduler.reset_prefix_cache()
    engine.steps.clear()
    engine.shadow(context, "shadow")
    engine.drain()
    computed = engine.computed_tokens("shadow")
    engine.scheduler.reset_prefix_cache()
    warm = engine.run(context, "warm", 4)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    cold = engine.run(context, "cold", 4)
    return {
        "result": result_of(engine.answers["shadow"]), "computed": computed,
        "cached": [warm.cached_tokens, cold.cached_tokens], "same tokens": warm.token_ids == cold.token_ids,
    }  # fmt: skip


PRODUCER = (
    exported, not_exported, no_more_than_may_be_pinned, with_a_watermark, a_prefill_pins_nothing,
    normal_exports_beside_it, paused_with_a_connector, ended_in_the_middle_of_a_block, back_from_the_host,
)  # fmt: skip
CONSUMER = (fetched_from_nowhere, bogus_parameters, aborted_fetches)


@pytest.fixture(scope="module")
def producer() -> dict[str, Any]:
    both = {
        "kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"connectors": [nixl("kv_producer"), HOST_TIER]},
    }  # fmt: skip
    return run(PRODUCER, kv_transfer_config=both, plugin={"pinned_share": 0.25})


@pytest.fixture(scope="module")
def consumer() -> dict[str, Any]:
    return run(CONSUMER, kv_transfer_config=nixl("kv_consumer"), plugin={"controller": None})


def leg(covered: int, computed: int, end: str) -> dict[str, Any]:
    return {"covered_tokens": covered, "computed_tokens": computed, "end": end}


def test_an_export_hands_out_a_cached_prefix_without_a_forward_pass_for_as_long_as_the_lease(
    producer: dict[str, Any],
) -> None:
    assert producer["exported"] == {
        "tokens": [], "finish": "stop", "result": leg(320, 0, "done"), "blocks": 10, "remote_num_tokens": 320,
        "do_remote_prefill": True, "pinned": [10, 10, 0], "steps": [], "class": 10, "found": 320,
    }  # fmt: skip


def test_what_is_not_wholly_there_is_not_exported(producer: dict[str, Any]) -> None:
    assert producer["not_exported"] == {
        "partly cached": leg(128, 0, "not_cached"), "not cached": leg(0, 0, "not_cached"),
        "less than a block": leg(0, 0, "not_cached"), "no parameters": leg(128, 0, "not_transferable"),
        "host buffer": leg(128, 0, "not_transferable"), "held": 0,
    }  # fmt: skip


def test_exports_pin_no_more_than_their_share(producer: dict[str, Any]) -> None:
    assert producer["no_more_than_may_be_pinned"] == {
        "pinned": 10, "first": leg(320, 0, "done"), "second": leg(320, 0, "no_room"), "third": leg(320, 0, "done"),
    }  # fmt: skip


def test_an_export_needs_no_free_block(producer: dict[str, Any]) -> None:
    assert producer["with_a_watermark"] == {"blocks": 10, "result": leg(320, 0, "done")}


def test_a_prefill_pins_nothing_even_if_told_to(producer: dict[str, Any]) -> None:
    assert producer["a_prefill_pins_nothing"] == {"held": 0, "result": leg(192, 192, "done")}


def test_exports_of_normal_calls_are_as_ever(producer: dict[str, Any]) -> None:
    assert producer["normal_exports_beside_it"] == {
        "tokens": 1, "blocks": 10, "held": 10, "result": leg(576, 576, "done"),
    }  # fmt: skip


def test_a_paused_engine_with_a_connector_comes_to_rest(producer: dict[str, Any]) -> None:
    assert producer["paused_with_a_connector"] == {
        "PAUSED_NEW": False, "PAUSED_ALL": False, "parked": leg(384, 384, "done"), "pending": leg(384, 384, "done"),
    }  # fmt: skip


def test_a_block_that_was_not_finished_does_not_reach_the_host_tier(producer: dict[str, Any]) -> None:
    found = producer["ended_in_the_middle_of_a_block"]
    assert found["result"] == leg(96, 100, "paused")
    assert found["cached"] == [96, 0]
    assert found["same tokens"]


def test_a_prefill_goes_on_from_the_host_tier(producer: dict[str, Any]) -> None:
    found = producer["back_from_the_host"]
    assert found["result"] == leg(320, 128, "done")
    assert found["computed"] == 128
    assert found["cached"] == [320, 0]
    assert found["same tokens"]


def test_a_fetch_from_an_engine_that_is_gone_ends_and_nothing_else_does(consumer: dict[str, Any]) -> None:
    assert consumer["fetched_from_nowhere"] == {
        "fetch": leg(0, 0, "transfer_failed"), "prefill": leg(0, 0, "paused"), "finish": "stop", "decoded": 30,
        "found": 0, "computed": 0, "beats": [],
    }  # fmt: skip


def test_parameters_that_would_end_the_engine_end_their_leg(consumer: dict[str, Any]) -> None:
    found = consumer["bogus_parameters"]
    assert set(found["ends"]) == {"not_transferable"}
    assert found["goes on"] == 3


def test_an_aborted_fetch_holds_nothing_once_its_transfer_has_ended(consumer: dict[str, Any]) -> None:
    assert consumer["aborted_fetches"] == {"held": 0, "beats": []}
