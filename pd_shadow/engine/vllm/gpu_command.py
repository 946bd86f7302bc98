"""The command line and environment of one vLLM server on GPUs: what `pd-shadow serve engine` starts.

The document it is read from is the same for all replicas of a pool; what differs between them (name, address) comes
from the command line.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from pd_shadow.common.address import Address, join_address
from pd_shadow.common.config import Config, ConfigError
from pd_shadow.common.tls import ClientTls
from pd_shadow.engine.settings import PluginSettings, ReporterSettings, Role
from pd_shadow.engine.vllm import host_tier
from pd_shadow.engine.vllm.command import ASYNC_SCHEDULER, kv_transfer, nixl_connector, plugin_arguments
from pd_shadow.engine.vllm.host_tier import HostTierSettings

SIDE_CHANNEL_PORT = 5600
"""vLLM's own default for NIXL's handshake."""
OWNED_FLAGS: Mapping[str, str] = {
    "--model": "model",
    "--served-model-name": "served_name",
    "--host": "host",
    "--port": "port",
    "--dtype": "dtype",
    "--block-size": "block_size",
    "--max-model-len": "max_model_len",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-num-seqs": "max_num_seqs",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--kv-transfer-config": "role, kv_buffer_device, kv_lease_seconds and host_tier",
    "--scheduler-cls": "plugin",
    "--scheduling-policy": "nothing: shadow work needs priorities",
    "--additional-config": "plugin",
    "--shutdown-timeout": "drain_seconds",
    "--async-scheduling": "nothing: the plugin's scheduler is the asynchronous one",
    "--no-async-scheduling": "nothing: the plugin's scheduler is the asynchronous one",
    "--enable-prefix-caching": "nothing: shadow work is prefix caching",
    "--enable-prompt-tokens-details": "nothing: the gateway reads what was cached from it",
}
"""Flags made here, and the setting to use instead."""

Port = Annotated[int, Field(ge=1, le=65535)]


class GpuEngineCommand(Config):
    """One server. Lengths are in tokens; what is unset is left to vLLM."""

    model: str = Field(min_length=1)
    """A Hugging Face repository, or a folder in the container."""
    served_name: str = Field(min_length=1, max_length=256)
    """The name clients use in `model`."""
    role: Role
    name: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """What the instance is called at the controller: the pod's name."""
    address: str | None = Field(default=None, min_length=1)
    """IP address or host name others reach this engine at: the pod's address."""
    controller: Address | None = None
    """HOST:PORT of the controller the plugin attaches to; unset: the engine is found by discovery only."""
    controller_tls: ClientTls | None = None
    """Unset: plain text."""
    controller_token_file: Path | None = None
    """A token of the instances' scope, alone in its file; unset: none."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: Port = 8000
    side_channel_port: Port = SIDE_CHANNEL_PORT
    """NIXL's handshake port."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of one replica."""
    dtype: str = "auto"
    block_size: int | None = Field(default=None, ge=1)
    """P and D of one model need the same. Unset: vLLM's, 16 on GPUs."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    max_model_len: int | None = Field(default=None, ge=1)
    """Unset: what the model was made for."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    kv_buffer_device: str = Field(default="cuda", pattern=r"^(cuda|cpu)$")
    """Where NIXL's buffers are. Exports of shadow KV without a forward pass need them on the device itself."""
    kv_lease_seconds: int = Field(default=30, ge=1)
    """How long P keeps handed-out blocks pinned for a D that never comes."""
    host_tier: HostTierSettings | None = None
    """Unset: what the KV pool evicts is computed again."""
    plugin: PluginSettings | None = PluginSettings()
    """null: a stock engine, which takes shadow work as requests of low priority."""
    fast_tokenizer: bool = True
    """P and D both tokenize every call: fastokens does it in a twentieth of the time. Off for tokenizers it does not
    read."""
    drain_seconds: int = Field(default=0, ge=0)
    """How long running requests may go on after SIGTERM; with 0 vLLM aborts them."""
    offline: bool = False
    """Never ask the Hugging Face hub: for models that are in the container or on a volume."""
    extra_args: tuple[str, ...] = ()
    """Further flags for vLLM, as they are. Flags that other settings make are refused."""

    @model_validator(mode="after")
    def _check(self) -> "GpuEngineCommand":
        for flag, instead in self._owned():
            raise ValueError(f"extra_args: {flag} is made from other settings; instead of it use {instead}")
        if self.controller is None and (self.controller_tls is not None or self.controller_token_file is not None):
            raise ValueError("controller_tls, controller_token_file: are for a controller; set it, or leave them unset")
        if self.plugin is None and self.controller is not None:
            raise ValueError("controller: an engine without the plugin cannot attach; leave it unset, or set plugin")
        if self.plugin is not None and self.plugin.reporter is not None:
            raise ValueError("plugin.reporter: follows from name, address, port and controller; leave it unset")
        if self.plugin is not None and self.plugin.role not in (None, self.role):
            raise ValueError(f"plugin.role: follows from role={self.role}; leave it unset")
        return self

    @property
    def url(self) -> str:
        """Base URL of the OpenAI-compatible server, as others reach it."""
        return f"http://{join_address(self.address or '127.0.0.1', self.port)}"

    def check(self) -> list[str]:
        """What is wrong with this engine beyond its document, one sentence each; empty when nothing is."""
        problems = []
        if self.controller is not None and (self.name is None or self.address is None):
            problems.append("name, address: an attached engine needs both (--name and --address)")
        if self.role is not Role.COLOCATED and self.address is None:
            problems.append(f"address: a {self.role} engine needs one for NIXL's handshake (--address)")
        if self.host_tier is not None and self.max_model_len is not None and self.block_size is not None:
            problems += host_tier.check(
                self.host_tier,
                max_model_len=self.max_model_len,
                block_size=self.block_size,
                bytes_per_token=None,
                arguments=self.extra_args,
            )
        return problems

    def argv(self) -> list[str]:
        """The command, run with this very interpreter. Raises ConfigError naming what is missing."""
        problems = self.check()
        if problems:
            raise ConfigError("\n".join(f"{self.served_name}: {problem}" for problem in problems))
        arguments = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", self.model,
            "--served-model-name", self.served_name,
            "--host", self.host,
            "--port", str(self.port),
            "--dtype", self.dtype,
            "--tensor-parallel-size", str(self.tensor_parallel_size),
            "--gpu-memory-utilization", str(self.gpu_memory_utilization),
            "--scheduling-policy", "priority",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--disable-uvicorn-access-log",
            "--shutdown-timeout", str(self.drain_seconds),
        ]  # fmt: skip
        for flag, value in (
            ("--block-size", self.block_size),
            ("--max-model-len", self.max_model_len),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
        ):
            if value is not None:
                arguments += [flag, str(value)]
        if self.plugin is not None:
            # Said aloud: where vLLM would quietly schedule synchronously, it then fails with the reason.
            arguments += ["--async-scheduling", *plugin_arguments(self._attached(self.plugin), ASYNC_SCHEDULER)]
        nixl = nixl_connector(self.role, self.kv_lease_seconds, buffer_device=self.kv_buffer_device)
        transfer = kv_transfer(nixl, self.host_tier, cpu_rig=False)
        if transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(transfer, sort_keys=True)]
        return [*arguments, *self.extra_args]

    def env(self) -> dict[str, str]:
        """Environment variables to add to the caller's."""
        variables = {
            # Block hashes must be the same on P and D.
            "PYTHONHASHSEED": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
        }
        if self.offline:
            variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.fast_tokenizer:
            variables["VLLM_USE_FASTOKENS"] = "1"
        if self.address is not None:
            variables["VLLM_HOST_IP"] = self.address
        if self.role is not Role.COLOCATED and self.address is not None:
            variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = self.address
            variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
        return variables

    def _owned(self) -> Iterator[tuple[str, str]]:
        for argument in self.extra_args:
            flag = argument.partition("=")[0]
            # vLLM takes underscores for dashes.
            flag = flag if not flag.startswith("--") else "--" + flag[2:].replace("_", "-")
            instead = OWNED_FLAGS.get(flag) or host_tier.CONFLICTING_FLAGS.get(flag)
            if instead is not None:
                yield flag, instead

    def _attached(self, plugin: PluginSettings) -> PluginSettings:
        if self.controller is None or self.name is None:
            return plugin
        given: dict[str, Any] = {
            "controller_tls": self.controller_tls,
            "controller_token_file": self.controller_token_file,
        }
        reporter = ReporterSettings(
            controller=self.controller,
            name=self.name,
            url=self.url,
            **{key: value for key, value in given.items() if value is not None},
        )
        return plugin.model_copy(update={"reporter": reporter})
