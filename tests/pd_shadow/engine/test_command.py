"""Command line and environment of a vLLM server."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

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


def test_server_entry_point_and_sizes() -> None:
    argv = command(num_gpu_blocks=256, max_model_len=8192).argv()
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(argv, "--num-gpu-blocks-override") == "256"
    assert option(argv, "--dtype") == "float32"
    assert option(argv, "--scheduling-policy") == "priority"


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
    ],
)
def test_what_vllm_would_refuse_is_refused_here(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        command(**changes)
