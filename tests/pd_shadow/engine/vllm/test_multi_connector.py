"""A decode instance with a host tier: what comes from where, on a real engine and over real NIXL."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from pd_shadow.demo.cluster import free_ports
from pd_shadow.engine import tags
from pd_shadow.engine.vllm.host_tier import HostTierSettings, beside_nixl
from tests.pd_shadow.engine.vllm.stepping import BLOCK_SIZE, SteppedEngine, in_fresh_process, prompt

pytestmark = pytest.mark.engine

NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_consumer",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}
OURS = beside_nixl(NIXL, HostTierSettings(size_gib=0.02), cpu_rig=True)
HOST_BLOCKS, LOCAL_BLOCKS, BLOCKS = 8, 4, 20
TAIL = 5
CONTEXT = prompt(1, BLOCKS * BLOCK_SIZE + TAIL)
ANSWER_TOKENS = 4
STEP_LIMIT = 1_000_000


class Rig:
    """A decode engine that has forgotten CONTEXT, but for its host tier's first blocks; and a P that has it all."""

    def __init__(self, transfer: dict[str, Any], ports: Sequence[int], **engine_arguments: Any) -> None:
        from vllm.config import KVTransferConfig

        from tests.pd_shadow.engine.vllm.prefill_copy import PrefillCopy

        self.engine = SteppedEngine(
            num_gpu_blocks_override=40, kv_transfer_config=KVTransferConfig(**transfer), **engine_arguments
        )
        self.free_blocks = self.engine.free_blocks
        self.block_bytes = 0
        self.engine.add(CONTEXT, "cold", ANSWER_TOKENS, kv_transfer_params=stored(HOST_BLOCKS))
        self.until(lambda: bool(self.engine.answers["cold"].token_ids))
        (self._block_ids,) = self.engine.scheduler.kv_cache_manager.get_block_ids("cold")
        self.engine.drain()
        self.block_bytes = int(self.engine.metric("kv_offload_store_bytes")) // HOST_BLOCKS
        self.prefill = PrefillCopy("prefill", ports[0])
        self.stranger = PrefillCopy("stranger", ports[1], compatible=False)
        self.forget()

    def forget(self) -> None:
        """Fill the KV pool with other prompts, twice over."""
        for seed in range(10, 14):
            self.engine.run(prompt(seed, 600), f"other-{seed}-{len(self.engine.steps)}", kv_transfer_params=stored(0))

    def params(self, prefill: Any, tokens: int = len(CONTEXT)) -> dict[str, Any]:
        """How to fetch so many tokens of CONTEXT from P. NIXL matches blocks from the end, so they must be as many."""
        blocks = self._block_ids[: -(-tokens // BLOCK_SIZE)]
        found: dict[str, Any] = prefill.params("cold", blocks, tokens)
        return found

    def call(self, request_id: str, **more: Any) -> dict[str, Any]:
        """Run CONTEXT; says what the call cost and where its KV came from, transfers in blocks."""
        before = self._counts()
        answer = self.engine.run(CONTEXT, request_id, ANSWER_TOKENS, **more)
        moved = {name: count - before[name] for name, count in self._counts().items()}
        return {
            "token_ids": answer.token_ids,
            "cached": answer.cached_tokens,
            "computed": self.engine.computed_tokens(request_id),
            **moved,
            "released": self.prefill.released(),
        }

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(STEP_LIMIT):
            if condition():
                return
            self.engine.step()
        raise AssertionError("the condition did not come true")

    def cold(self) -> dict[str, Any]:
        return asdict(self.engine.answers["cold"])

    def close(self) -> None:
        self.engine.shutdown()
        self.prefill.close()
        self.stranger.close()

    def _counts(self) -> dict[str, int]:
        metric = self.engine.metric
        return {
            "from host": int(metric("kv_offload_load_bytes")) // self.block_bytes,
            "from P": int(metric("nixl_bytes_transferred")) // self.block_bytes,
        }


def stored(blocks: int) -> dict[str, Any]:
    """The host tier keeps only so many blocks of the request."""
    return {"max_offload_tokens": blocks * BLOCK_SIZE}


def three_sources(transfer: dict[str, Any], ports: list[int]) -> dict[str, Any]:
    rig = Rig(transfer, ports)
    rig.engine.run(CONTEXT[: LOCAL_BLOCKS * BLOCK_SIZE + 1], "touch")
    call = rig.call("call", kv_transfer_params=rig.params(rig.prefill))
    sources = {name: rig.engine.metric("prompt_tokens_cached_by_source", source=name) for name in ("host", "p2p")}
    seen = {
        "cold": rig.cold(),
        "call": call,
        "sources": sources,
        "blocks missing": rig.free_blocks - rig.engine.free_blocks,
    }
    rig.close()
    return seen


def one_source_or_none(ports: list[int]) -> dict[str, Any]:
    rig = Rig(OURS, ports)
    seen: dict[str, Any] = {"cold": rig.cold()}
    seen["other tenant"] = rig.call("other tenant", kv_transfer_params=rig.params(rig.prefill), cache_salt="other")
    rig.forget()
    target = HOST_BLOCKS * BLOCK_SIZE
    rig.engine.run(CONTEXT[:target], "whole", kv_transfer_params=rig.params(rig.prefill, target))
    seen["whole"] = asdict(rig.engine.answers["whole"])
    seen["whole computed"] = rig.engine.computed_tokens("whole")
    seen["whole released"] = rig.prefill.released()
    rig.forget()
    seen["failed"] = rig.call("failed", kv_transfer_params={**rig.params(rig.stranger), **stored(0)})
    rig.forget()
    rig.engine.add(CONTEXT, "aborted", ANSWER_TOKENS, kv_transfer_params=rig.params(rig.prefill))
    rig.engine.step()
    seen["aborted in"] = rig.engine.scheduler.requests["aborted"].status.name
    rig.engine.abort("aborted")
    rig.engine.drain()
    seen["aborted released"] = rig.prefill.released()
    seen["blocks missing"] = rig.free_blocks - rig.engine.free_blocks
    seen["after"] = rig.call("after")
    rig.close()
    return seen


def slow_host(ports: list[int]) -> dict[str, Any]:
    from tests.pd_shadow.engine.vllm.held_offloading import HeldWorker

    transfer = beside_nixl(NIXL, HostTierSettings(size_gib=0.02), cpu_rig=True)
    transfer["kv_connector_extra_config"]["connectors"][0]["kv_connector_extra_config"] |= {
        "spec_name": "HeldSpec",
        "spec_module_path": HeldWorker.__module__,
    }
    rig = Rig(transfer, ports)
    HeldWorker.hold = True
    rig.engine.add(CONTEXT, "call", ANSWER_TOKENS, kv_transfer_params=rig.params(rig.prefill))
    released: list[str] = []
    rig.until(lambda: bool(released.extend(rig.prefill.released()) or released))
    for _ in range(3):
        rig.engine.step()
    while_held = rig.engine.scheduler.requests["call"].status.name
    HeldWorker.hold = False
    rig.engine.drain()
    seen = {
        "cold": rig.cold(), "call": asdict(rig.engine.answers["call"]), "while held": while_held,
        "computed": rig.engine.computed_tokens("call"),
    }  # fmt: skip
    rig.close()
    return seen


def shadow_fetch(ports: list[int]) -> dict[str, Any]:
    rig = Rig(
        OURS, ports, scheduler_cls="pd_shadow.engine.vllm.scheduler.ShadowScheduler",
        additional_config={"pd_shadow": {"cold_seconds": 0, "cap_share": 1}},
    )  # fmt: skip
    target = BLOCKS * BLOCK_SIZE
    rig.engine.run(
        CONTEXT[:target], "fetch",
        extra_args={tags.LEG: "fetch"}, priority=1, kv_transfer_params=rig.params(rig.prefill, target),
    )  # fmt: skip
    rig.forget()
    seen = {
        "cold": rig.cold(), "fetch": asdict(rig.engine.answers["fetch"]),
        "computed": rig.engine.computed_tokens("fetch"), "call": rig.call("call"),
    }  # fmt: skip
    rig.close()
    return seen


def run(scenario: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    side_channel, *ports = free_ports(3)
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
    found: dict[str, Any] = in_fresh_process(scenario, env=env, ports=ports, **arguments)
    return found


def stock(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: value for key, value in OURS.items() if key != "kv_connector_module_path"},
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


HOST_FIRST = OURS["kv_connector_extra_config"]["connectors"]


@pytest.mark.parametrize(
    ("transfer", "from_host", "from_prefill", "computed"),
    [
        pytest.param(OURS, HOST_BLOCKS - LOCAL_BLOCKS, BLOCKS - HOST_BLOCKS + 1, 1, id="ours"),
        # What makes our connector necessary.
        pytest.param(
            stock(*HOST_FIRST),
            HOST_BLOCKS - LOCAL_BLOCKS, 0, (BLOCKS - HOST_BLOCKS) * BLOCK_SIZE + TAIL, id="stock, host tier first",
        ),
        pytest.param(stock(*reversed(HOST_FIRST)), 0, BLOCKS - LOCAL_BLOCKS + 1, 1, id="stock, NIXL first"),
    ],
)  # fmt: skip
def test_prefill_sends_only_what_neither_pool_nor_host_memory_has(
    transfer: dict[str, Any], from_host: int, from_prefill: int, computed: int
) -> None:
    seen = run(three_sources, transfer=transfer)
    call = seen["call"]
    assert call["token_ids"] == seen["cold"]["token_ids"]
    assert (call["from host"], call["from P"]) == (from_host, from_prefill)
    assert call["computed"] == computed + ANSWER_TOKENS - 1
    assert call["released"] == ["cold"]
    assert seen["blocks missing"] == 0
    # The host tier served the touch before the call, too.
    assert seen["sources"]["host"] == (LOCAL_BLOCKS + from_host) * BLOCK_SIZE
    assert seen["sources"]["p2p"] == (len(CONTEXT) - (LOCAL_BLOCKS + from_host) * BLOCK_SIZE if from_prefill else 0)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run(one_source_or_none)


def test_another_tenant_gets_nothing_from_the_host_tier(seen: dict[str, Any]) -> None:
    assert (seen["other tenant"]["from host"], seen["other tenant"]["from P"]) == (0, BLOCKS + 1)


def test_prefill_is_released_at_once_when_host_memory_has_the_whole_prompt(seen: dict[str, Any]) -> None:
    assert seen["whole"]["cached_tokens"] == HOST_BLOCKS * BLOCK_SIZE
    assert seen["whole computed"] == 1
    assert seen["whole released"] == ["cold"]


def test_after_a_failed_transfer_the_host_tier_still_serves_its_part(seen: dict[str, Any]) -> None:
    assert seen["failed"]["token_ids"] == seen["cold"]["token_ids"]
    assert seen["failed"]["from P"] == 0
    assert seen["failed"]["computed"] == (BLOCKS - HOST_BLOCKS) * BLOCK_SIZE + TAIL + ANSWER_TOKENS - 1


def test_an_abort_with_both_halves_on_their_way_leaves_nothing_behind(seen: dict[str, Any]) -> None:
    assert seen["aborted in"] == "WAITING_FOR_REMOTE_KVS"
    assert seen["aborted released"] == ["cold"]
    assert seen["blocks missing"] == 0
    assert seen["after"]["token_ids"] == seen["cold"]["token_ids"]


def test_a_request_waits_for_the_slower_half_of_its_load() -> None:
    seen = run(slow_host)
    assert seen["while held"] == "WAITING_FOR_REMOTE_KVS"
    assert seen["call"]["token_ids"] == seen["cold"]["token_ids"]
    assert seen["computed"] == ANSWER_TOKENS


def test_what_a_shadow_fetch_brought_survives_its_eviction_in_the_host_tier() -> None:
    seen = run(shadow_fetch)
    assert seen["fetch"]["kv_transfer_params"][tags.RESULT]["covered_tokens"] == BLOCKS * BLOCK_SIZE
    assert seen["computed"] == 0
    assert seen["call"]["token_ids"] == seen["cold"]["token_ids"]
    assert seen["call"]["from host"] == BLOCKS
    assert seen["call"]["computed"] == TAIL + ANSWER_TOKENS - 1
