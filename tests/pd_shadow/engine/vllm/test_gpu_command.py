"""Command line and environment of a vLLM server on GPUs, and `pd-shadow serve engine`, which becomes it."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

from pd_shadow.cli.main import main
from pd_shadow.common.config import ConfigError
from pd_shadow.engine.vllm.gpu_command import OWNED_FLAGS, GpuEngineCommand

ENGINE: dict[str, Any] = {"model": "org/model", "served_name": "m", "role": "prefill"}


def command(**changes: Any) -> GpuEngineCommand:
    return GpuEngineCommand(**{**ENGINE, "name": "m-p-0", "address": "10.0.0.7", **changes})


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_nothing_of_the_cpu_rig_is_left() -> None:
    built = command(tensor_parallel_size=4)
    argv = built.argv()
    assert option(argv, "--dtype") == "auto"
    assert option(argv, "--tensor-parallel-size") == "4"
    assert not {"--enforce-eager", "--num-gpu-blocks-override", "--distributed-executor-backend"} & set(argv)
    assert not any(name.startswith(("VLLM_CPU", "OMP", "PD_SHADOW")) for name in built.env())


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_kv_goes_from_device_to_device(role: str, kv_role: str) -> None:
    transfer = json.loads(option(command(role=role).argv(), "--kv-transfer-config"))
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", kv_role)
    assert transfer["kv_buffer_device"] == "cuda"
    assert transfer["kv_load_failure_policy"] == "recompute"


def test_a_colocated_engine_needs_no_address_and_hands_nothing_over() -> None:
    built = GpuEngineCommand(**{**ENGINE, "role": "colocated"})
    assert "--kv-transfer-config" not in built.argv()
    assert not any("NIXL" in name for name in built.env())


def test_the_host_tier_uses_vllms_own_copies() -> None:
    transfer = json.loads(option(command(host_tier={"size_gib": 64}).argv(), "--kv-transfer-config"))
    offloading, nixl = transfer["kv_connector_extra_config"]["connectors"]
    assert nixl["kv_connector"] == "NixlConnector"
    assert "spec_name" not in offloading["kv_connector_extra_config"]


def test_the_plugin_schedules_one_step_ahead_and_attaches() -> None:
    argv = command(controller="c:7070", plugin={"cap_share": 0.2}).argv()
    assert option(argv, "--scheduler-cls").endswith(".ShadowAsyncScheduler")
    assert "--async-scheduling" in argv
    assert json.loads(option(argv, "--additional-config")) == {
        "pd_shadow": {
            "cap_share": 0.2,
            "reporter": {"controller": "c:7070", "name": "m-p-0", "url": "http://10.0.0.7:8000"},
        }
    }


def test_a_stock_engine_keeps_vllms_scheduler() -> None:
    argv = command(plugin=None).argv()
    assert not {"--scheduler-cls", "--additional-config", "--async-scheduling"} & set(argv)
    assert option(argv, "--scheduling-policy") == "priority"


def test_the_handshake_is_where_others_reach_the_pod() -> None:
    env = command(side_channel_port=5700).env()
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == env["VLLM_HOST_IP"] == "10.0.0.7"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"


def test_what_is_unset_is_left_to_vllm() -> None:
    assert not {"--block-size", "--max-model-len", "--max-num-seqs"} & set(command().argv())
    assert option(command(block_size=32).argv(), "--block-size") == "32"


@pytest.mark.parametrize("flag", [*OWNED_FLAGS, "--kv_transfer_config", "--port=9000", "--kv-offloading-size"])
def test_flags_that_settings_make_are_refused_with_the_setting(flag: str) -> None:
    with pytest.raises(ValidationError, match=r"extra_args: .* instead of it use"):
        command(extra_args=(flag, "x"))


def test_running_requests_end_before_the_engine_does() -> None:
    assert option(command(drain_seconds=120).argv(), "--shutdown-timeout") == "120"


def test_other_flags_go_to_vllm_as_they_are() -> None:
    assert command(extra_args=("--quantization", "fp8")).argv()[-2:] == ["--quantization", "fp8"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plugin": {"reporter": {"controller": "c:1", "name": "n", "url": "http://h"}}}, "plugin.reporter"),
        ({"plugin": {"role": "decode"}}, "plugin.role"),
        ({"plugin": None, "controller": "c:7070"}, "cannot attach"),
        ({"kv_buffer_device": "gpu"}, "kv_buffer_device"),
        ({"controller": "nowhere"}, "controller"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        command(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"address": None}, "--address"),
        ({"name": None, "controller": "c:7070"}, "--name"),
        ({"host_tier": {"size_gib": 8, "blocks_per_chunk": 99}, "max_model_len": 128, "block_size": 16}, "host_tier"),
    ],
)
def test_an_engine_that_would_not_work_does_not_start(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        command(**changes).argv()


@pytest.mark.engine
def test_vllm_takes_every_flag() -> None:
    """By vLLM's own parser; nothing is started."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    built = command(
        tensor_parallel_size=2, block_size=16, max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=8,
        controller="c:7070", host_tier={"size_gib": 64}, drain_seconds=60, extra_args=("--quantization", "fp8"),
    )  # fmt: skip
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(built.argv()[3:])
    assert (parsed.model, parsed.served_model_name, parsed.tensor_parallel_size) == ("org/model", ["m"], 2)
    assert parsed.shutdown_timeout == 60
    assert (parsed.async_scheduling, parsed.scheduling_policy) == (True, "priority")
    assert parsed.additional_config["pd_shadow"]["reporter"]["name"] == "m-p-0"


def serve(path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["serve", "engine", "--config", str(path), *arguments])


def test_serve_engine_prints_what_it_would_start(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(yaml.safe_dump(ENGINE))
    result = serve(file, "--name", "m-p-0", "--address", "10.0.0.7", "--print")
    assert result.exit_code == 0
    words = shlex.split(result.output)
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7" in words
    assert "vllm.entrypoints.openai.api_server" in words


def test_serve_engine_becomes_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    monkeypatch.setenv("HF_HOME", "/models")
    file = tmp_path / "engine.yaml"
    file.write_text(yaml.safe_dump(ENGINE))
    assert serve(file, "--address", "10.0.0.7").exit_code == 0
    ((path, argv, env),) = started
    assert argv[0] == path
    assert env["HF_HOME"] == "/models"
    assert env["VLLM_HOST_IP"] == "10.0.0.7"


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"tensor_parallel": 2}, "did you mean 'tensor_parallel_size'?"), ({}, "--address"), ({"role": "p"}, "role")],
)
def test_serve_engine_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(yaml.safe_dump({**ENGINE, **changes}))
    result = serve(file)
    assert result.exit_code == 2
    assert says in result.output
