"""The command line and environment of one vLLM server: prefill, decode or colocated, stock or with the plugin."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, model_validator

from pd_shadow.common.config import Config, ConfigError
from pd_shadow.engine import settings
from pd_shadow.engine.settings import PluginSettings, Role
from pd_shadow.engine.vllm import cpu_rig, host_tier
from pd_shadow.engine.vllm.host_tier import HostTierSettings

KV_ROLES: Mapping[Role, str] = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
SCHEDULER = "pd_shadow.engine.vllm.scheduler.ShadowScheduler"
ASYNC_SCHEDULER = "pd_shadow.engine.vllm.scheduler.ShadowAsyncScheduler"
# float32: what CPUs compute in, and the same everywhere.
DTYPE, DTYPE_BYTES = "float32", 4


class EngineCommand(Config):
    """One server. Lengths are in tokens, the KV pool in blocks."""

    model_dir: Path
    served_name: str = Field(min_length=1)
    role: Role
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    side_channel_port: int | None = Field(default=None, ge=1, le=65535)
    """NIXL's handshake port; needed by every role but colocated."""
    block_size: int = Field(default=128, ge=32, multiple_of=32)
    """vLLM's CPU attention takes multiples of 32 only."""
    num_gpu_blocks: int = Field(default=1024, ge=1)
    """Size of the KV pool (vLLM calls it GPU blocks on every platform)."""
    max_model_len: int = Field(default=16384, ge=1)
    max_num_batched_tokens: int = Field(default=128, ge=1)
    """Bounds one iteration, so what a normal call can meet in front of it on P: the paper asks for 0.1 s at most, and
    one block is what a slow core computes in about that at contexts of 10K tokens."""
    max_num_seqs: int = Field(default=32, ge=1)
    kv_lease_seconds: int = Field(default=10, ge=1)
    """How long P keeps handed-out blocks pinned for a D that never comes."""
    host_tier: HostTierSettings | None = None
    """Unset: what the KV pool evicts is computed again."""
    plugin: PluginSettings | None = None
    """Unset: a stock engine, which takes shadow work as requests of low priority."""
    fast_tokenizer: bool = True
    """P and D both tokenize every call: fastokens (vLLM's own switch; the package must be installed) does it in a
    twentieth of the time. Off for tokenizers it does not read."""
    cpu_rig: bool = True
    """Several engines share few cores: quiet their spinning threads, one compute thread each, no core pinning."""

    @model_validator(mode="after")
    def _check(self) -> "EngineCommand":
        if self.role is not Role.COLOCATED and self.side_channel_port is None:
            raise ValueError(f"side_channel_port: a {self.role} server needs one for NIXL's handshake")
        if self.num_gpu_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks: {self.num_gpu_blocks} blocks of {self.block_size} tokens do not hold one context of "
                f"max_model_len={self.max_model_len}; vLLM would refuse to start"
            )
        return self

    @property
    def url(self) -> str:
        """Base URL of the OpenAI-compatible server."""
        return f"http://{self.host}:{self.port}"

    def argv(self) -> list[str]:
        """The command, run with this very interpreter.

        The `vllm` console script cannot be used: it looks up a distribution named vllm, and the CPU build has another
        name. Raises ConfigError for a host tier that would not work for this engine.
        """
        problems = self.check()
        if problems:
            raise ConfigError("\n".join(f"{self.served_name}: {problem}" for problem in problems))
        arguments = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model_dir),
            "--served-model-name", self.served_name,
            "--host", self.host,
            "--port", str(self.port),
            "--dtype", DTYPE,
            "--seed", "0",
            "--block-size", str(self.block_size),
            "--num-gpu-blocks-override", str(self.num_gpu_blocks),
            "--max-model-len", str(self.max_model_len),
            "--max-num-batched-tokens", str(self.max_num_batched_tokens),
            "--max-num-seqs", str(self.max_num_seqs),
            "--scheduling-policy", "priority",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--enforce-eager",
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if self.cpu_rig:
            # The worker runs in the engine core: one process less to boot, one hop less per step. By its class name,
            # because for "uni" vLLM's CPU platform takes "mp" unless it may set OpenMP's variables, which env() does.
            arguments += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        if self.plugin is not None:
            # vLLM schedules one step ahead on GPUs, and not on CPUs.
            arguments += plugin_arguments(self.plugin, SCHEDULER if self.cpu_rig else ASYNC_SCHEDULER)
        transfer = self._kv_transfer()
        if transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(transfer, sort_keys=True)]
        return arguments

    def check(self) -> list[str]:
        """What is wrong with the host tier for this engine and model, one sentence each; empty when nothing is."""
        if self.host_tier is None:
            return []
        return host_tier.check(
            self.host_tier,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            bytes_per_token=host_tier.bytes_per_token(self.model_dir, bytes_per_value=DTYPE_BYTES),
        )

    def env(self) -> dict[str, str]:
        """Environment variables to add to the caller's."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            # Also the address its own processes meet at, which else is the machine's outward one.
            "VLLM_HOST_IP": self.host,
            # Reserved in whole GiB and then cut to num_gpu_blocks.
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        if self.fast_tokenizer:
            variables["VLLM_USE_FASTOKENS"] = "1"
        if self.side_channel_port is not None:
            variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = self.host
            variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
        if self.cpu_rig:
            variables |= {
                cpu_rig.ENVIRONMENT: "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        return variables

    def _kv_transfer(self) -> dict[str, object] | None:
        nixl = nixl_connector(self.role, self.kv_lease_seconds, buffer_device="cpu")
        return kv_transfer(nixl, self.host_tier, cpu_rig=self.cpu_rig)


def nixl_connector(role: Role, lease_seconds: int, *, buffer_device: str) -> dict[str, object] | None:
    """NIXL's part of --kv-transfer-config; None for a role that hands nothing over."""
    kv_role = KV_ROLES.get(role)
    if kv_role is None:
        return None
    return {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_buffer_device": buffer_device,
        # A D that cannot fetch computes the prompt itself instead of failing the call.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": lease_seconds},
    }


def kv_transfer(
    nixl: dict[str, object] | None, tier: HostTierSettings | None, *, cpu_rig: bool
) -> dict[str, object] | None:
    """The whole of --kv-transfer-config, the host tier beside NIXL; None for an engine with neither."""
    if tier is None:
        return nixl
    if nixl is None:
        return host_tier.offloading(tier, cpu_rig=cpu_rig)
    return host_tier.beside_nixl(nixl, tier, cpu_rig=cpu_rig)


def plugin_arguments(plugin: PluginSettings, scheduler: str) -> list[str]:
    """The flags that put the plugin into vLLM; only what was set is handed on."""
    given = plugin.model_dump(mode="json", exclude_unset=True)
    return ["--scheduler-cls", scheduler, "--additional-config", json.dumps({settings.KEY: given}, sort_keys=True)]
