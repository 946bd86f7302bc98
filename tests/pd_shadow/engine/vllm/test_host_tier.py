"""The host tier: its settings, vLLM's configuration for it, and an evicted context that comes back uncomputed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pd_shadow.common import config
from pd_shadow.engine.vllm.host_tier import (
    GIB,
    EvictionPolicy,
    HostTierSettings,
    beside_nixl,
    bytes_per_token,
    check,
    offloading,
)
from tests.pd_shadow.engine.vllm.stepping import BLOCK_SIZE, MODEL, SteppedEngine, in_fresh_process, prompt

SETTINGS = HostTierSettings(size_gib=32)
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
BLOCKS = 20
BLOCK_BYTES = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * 4 * BLOCK_SIZE


def test_gpus_get_the_native_spec_and_cpu_rigs_ours() -> None:
    on_gpu, on_cpu = offloading(SETTINGS, cpu_rig=False), offloading(SETTINGS, cpu_rig=True)
    added = {"spec_name": "CpuRigOffloadingSpec", "spec_module_path": "pd_shadow.engine.vllm.cpu_offloading"}
    assert on_cpu["kv_connector_extra_config"] == {**on_gpu["kv_connector_extra_config"], **added}


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({}, "cpu_bytes_to_use", 32 * GIB),
        ({}, "offload_prompt_only", False),
        ({"store_outputs": False}, "offload_prompt_only", True),
        ({"blocks_per_chunk": 4}, "blocks_per_chunk", 4),
        ({"eviction": EvictionPolicy.ARC}, "eviction_policy", "arc"),
    ],
)
def test_settings_in_vllms_words(settings: dict[str, Any], key: str, value: object) -> None:
    built = offloading(HostTierSettings(size_gib=32, **settings), cpu_rig=False)
    assert built["kv_connector_extra_config"][key] == value


def test_only_a_consumer_needs_our_connector() -> None:
    on_decode = beside_nixl(NIXL, SETTINGS, cpu_rig=False)
    on_prefill = beside_nixl({**NIXL, "kv_role": "kv_producer"}, SETTINGS, cpu_rig=False)
    assert on_decode["kv_connector_module_path"] == "pd_shadow.engine.vllm.multi_connector"
    assert "kv_connector_module_path" not in on_prefill
    # vLLM looks for this name where it asks which connectors are inside.
    assert on_decode["kv_connector"] == on_prefill["kv_connector"] == "MultiConnector"


def problems(settings: HostTierSettings = SETTINGS, **changes: Any) -> list[str]:
    given: dict[str, Any] = {"max_model_len": 100_000, "block_size": 16, "bytes_per_token": 458_752}
    return check(settings, **{**given, **changes})


def test_a_tier_that_holds_one_context_is_fine() -> None:
    assert problems(HostTierSettings(size_gib=43)) == []


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"size_gib": 42}, {}, "host_tier.size_gib: 42 GiB does not hold one context of max_model_len=100000"),
        (
            {"blocks_per_chunk": 64}, {"max_model_len": 1000},
            "host_tier.blocks_per_chunk: chunks of 1024 tokens hold more than max_model_len=1000",
        ),
        ({"size_gib": 64}, {"arguments": ["--kv-offloading-size", "8"]}, "--kv-offloading-size: vLLM then overwrites"),
        ({"size_gib": 64}, {"arguments": ["--kv_offloading_size=8"]}, "--kv-offloading-size: vLLM then overwrites"),
        ({"size_gib": 64}, {"arguments": ["--no-enable-prefix-caching"]}, "--no-enable-prefix-caching: the host tier"),
    ],
)  # fmt: skip
def test_what_would_not_work_is_explained(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    (found,) = problems(HostTierSettings(**{"size_gib": 64, **settings}), **changes)
    assert found.startswith(message)


def test_a_model_that_does_not_tell_its_kv_size_is_not_guessed_at(tmp_path: Path) -> None:
    assert bytes_per_token(tmp_path, bytes_per_value=2) is None
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512, "num_attention_heads": 128}))
    assert bytes_per_token(tmp_path, bytes_per_value=2) is None
    assert problems(HostTierSettings(size_gib=1), bytes_per_token=None) == []


def test_an_unknown_setting_names_its_neighbour() -> None:
    with pytest.raises(config.ConfigError, match="did you mean 'size_gib'"):
        config.parse(HostTierSettings, {"size_gb": 32})


def evicted_session(settings: dict[str, Any]) -> dict[str, Any]:
    tier = HostTierSettings(size_gib=0.02, **settings)
    engine = SteppedEngine(num_gpu_blocks_override=40, kv_transfer_config=offloading(tier, cpu_rig=True))
    context = prompt(1, BLOCKS * BLOCK_SIZE)
    first = engine.run(context, "first", BLOCK_SIZE + 1)
    stored = engine.metric("kv_offload_store_bytes")
    context += [*first.token_ids, *prompt(2, 10)]
    for seed in range(10, 14):
        engine.run(prompt(seed, 600), f"other-{seed}")
    engine.run(context, "next", 4)
    engine.run(context, "cold", 4, cache_salt="never seen")
    seen = {
        "answers": {name: asdict(engine.answers[name]) for name in ("next", "cold")},
        "computed": {name: engine.computed_tokens(name) for name in ("next", "cold")},
        "stored": stored,
        "loaded": engine.metric("kv_offload_load_bytes"),
        "cached by source": {
            source: engine.metric("prompt_tokens_cached_by_source", source=source) for source in ("device", "host")
        },
    }
    engine.shutdown()
    return seen


@pytest.mark.engine
@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        pytest.param({}, BLOCKS + 1, id="outputs, too"),
        pytest.param({"store_outputs": False, "blocks_per_chunk": 3, "eviction": "arc"}, BLOCKS // 3 * 3, id="prompts"),
    ],
)
def test_an_evicted_session_comes_back_from_host_memory_and_answers_the_same(
    settings: dict[str, Any], blocks: int
) -> None:
    seen = in_fresh_process(evicted_session, settings=settings)
    returned, cold = seen["answers"]["next"], seen["answers"]["cold"]
    assert seen["cached by source"] == {"device": 0, "host": blocks * BLOCK_SIZE}
    assert seen["stored"] == seen["loaded"] == blocks * BLOCK_BYTES
    assert (returned["cached_tokens"], cold["cached_tokens"]) == (blocks * BLOCK_SIZE, 0)
    assert returned["token_ids"] == cold["token_ids"]
    assert seen["computed"]["next"] == seen["computed"]["cold"] - blocks * BLOCK_SIZE
