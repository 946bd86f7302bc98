"""Command line and environment of a vLLM server."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pd_shadow.common.config import ConfigError
from pd_shadow.engine.vllm.command import EngineCommand


def command(**changes: Any) -> EngineCommand:
    settings: dict[str, Any] = {
        "model_dir": Path("model"), "served_name": "m", "role": "prefill", "port": 8100, "side_channel_port": 5600,
    }  # fmt: skip
    return EngineCommand(**{**settings, **changes})


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_disaggregated_roles_get_the_connector(role: str, kv_role: str) -> None:
    transfer = json.loads(option(command(role=role).argv(), "--kv-transfer-config"))
    assert transfer["kv_role"] == kv_role
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {"kv_lease_duration": 10}


def test_colocated_needs_no_connector_and_no_side_channel() -> None:
    built = command(role="colocated", side_channel_port=None)
    assert "--kv-transfer-config" not in built.argv()
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in built.env()


def test_host_tier_sits_beside_nixl_and_keeps_its_settings() -> None:
    stock = json.loads(option(command(role="decode").argv(), "--kv-transfer-config"))
    both = json.loads(option(command(role="decode", host_tier={"size_gib": 1}).argv(), "--kv-transfer-config"))
    host, nixl = both["kv_connector_extra_config"]["connectors"]
    assert nixl == stock
    assert host["kv_connector"] == "OffloadingConnector"
    # vLLM reads these two outside only.
    assert (both["kv_role"], both["kv_load_failure_policy"]) == ("kv_consumer", "recompute")


def test_host_tier_of_a_colocated_instance_is_alone() -> None:
    argv = command(role="colocated", side_channel_port=None, host_tier={"size_gib": 1}).argv()
    assert json.loads(option(argv, "--kv-transfer-config"))["kv_connector"] == "OffloadingConnector"


def test_a_host_tier_below_one_context_of_the_model_is_refused(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    # 64 KiB of float32 KV per token: a context of 16384 tokens takes 1 GiB.
    with pytest.raises(ConfigError, match=r"m: host_tier\.size_gib: 0\.9 GiB .* at least 1 GiB"):
        command(model_dir=tmp_path, host_tier={"size_gib": 0.9}).argv()
    assert command(model_dir=tmp_path, host_tier={"size_gib": 1}).argv()


def test_server_entry_point_and_sizes() -> None:
    argv = command(num_gpu_blocks=256, max_model_len=8192).argv()
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(argv, "--num-gpu-blocks-override") == "256"
    assert option(argv, "--dtype") == "float32"
    assert option(argv, "--scheduling-policy") == "priority"


def test_tokenizer_is_the_fast_one_unless_told_otherwise() -> None:
    assert command().env()["VLLM_USE_FASTOKENS"] == "1"
    assert "VLLM_USE_FASTOKENS" not in command(fast_tokenizer=False).env()


def test_quieting_is_for_cpu_rigs_only() -> None:
    assert command().env()["PD_SHADOW_CPU_RIG"] == "1"
    quiet = command(cpu_rig=False).env()
    assert not {"PD_SHADOW_CPU_RIG", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"} & set(quiet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"side_channel_port": None}, "side_channel_port"),
        ({"num_gpu_blocks": 8}, "do not hold one context"),
        ({"block_size": 48}, "multiple of 32"),
        ({"typo": 1}, "typo"),
        ({"host_tier": {"size_gib": 0}}, "host_tier.size_gib"),
        ({"host_tier": {"size_gib": 1, "eviction": "fifo"}}, "host_tier.eviction"),
        ({"host_tier": {}}, "host_tier.size_gib"),
    ],
)
def test_what_vllm_would_refuse_is_refused_here(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        command(**changes)
