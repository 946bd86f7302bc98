"""The host-memory tier for KV (paper section 3.3): its settings, and vLLM's configuration for it.

vLLM's OffloadingConnector copies blocks to host memory when they have been computed, shadow and normal alike, so that
an eviction costs nothing later; a call that hits them copies them back instead of computing them. The tier sits beside
NIXL on P and D, inside a MultiConnector: on P the stock one, on D ours, which joins a host prefix and a NIXL rest.

Requests that are ended before their prompt is computed must end as aborted: of one that ended as stopped, vLLM 0.32
takes the whole prompt for computed and would keep a half-filled block under the hash of a full one.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pd_shadow.common.config import Config

GIB = 1 << 30
# Flags with which vLLM would replace or undo the configuration made here.
CONFLICTING_FLAGS: Mapping[str, str] = {
    "--kv-offloading-size": "vLLM then overwrites kv_connector, and NIXL is gone; set host_tier.size_gib instead",
    "--kv-offloading-backend": "the backend follows from host_tier; leave it out",
    "--no-enable-prefix-caching": "the host tier finds blocks by their prefix-cache hashes; enable prefix caching",
}


class EvictionPolicy(enum.StrEnum):
    """What leaves a full host tier first; vLLM's names."""

    LRU = "lru"
    ARC = "arc"


class HostTierSettings(Config):
    """One engine's host tier."""

    size_gib: float = Field(gt=0)
    """Host memory of the whole engine, all its workers together; the paper finds 32 GB per GPU enough and 16 GB
    too little. On GPUs it is taken from /dev/shm, which containers keep small unless told otherwise."""
    store_outputs: bool = True
    """Keep generated tokens, too: an agent's next call brings them back as part of its prompt."""
    blocks_per_chunk: int = Field(default=1, ge=1)
    """Blocks of the KV pool that are stored, found and evicted as one. Larger chunks make longer copies, and leave the
    tail of a context behind."""
    eviction: EvictionPolicy = EvictionPolicy.LRU

    @property
    def size_bytes(self) -> int:
        """Host memory of the whole engine, in bytes."""
        return int(self.size_gib * GIB)


def offloading(settings: HostTierSettings, *, cpu_rig: bool) -> dict[str, Any]:
    """Configuration of vLLM's OffloadingConnector for one engine."""
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": settings.size_bytes,
        "offload_prompt_only": not settings.store_outputs,
        "blocks_per_chunk": settings.blocks_per_chunk,
        "eviction_policy": settings.eviction.value,
    }
    if cpu_rig:
        # vLLM's own spec copies on GPU streams and refuses CPU platforms.
        extra |= {"spec_name": "CpuRigOffloadingSpec", "spec_module_path": "pd_shadow.engine.vllm.cpu_offloading"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def beside_nixl(nixl: Mapping[str, Any], settings: HostTierSettings, *, cpu_rig: bool) -> dict[str, Any]:
    """Configuration of both connectors, given NIXL's own.

    On a consumer (D) a load takes the host tier's prefix first and only the rest from P; a producer (P) has nobody to
    load from but its host tier.
    """
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": nixl["kv_role"],
        # vLLM reads this one outside only.
        "kv_load_failure_policy": nixl["kv_load_failure_policy"],
        "kv_connector_extra_config": {"connectors": [offloading(settings, cpu_rig=cpu_rig), dict(nixl)]},
    }
    if nixl["kv_role"] == "kv_consumer":
        both["kv_connector_module_path"] = "pd_shadow.engine.vllm.multi_connector"
    return both


def check(
    settings: HostTierSettings,
    *,
    max_model_len: int,
    block_size: int,
    bytes_per_token: int | None,
    arguments: Sequence[str] = (),
) -> list[str]:
    """What would fail, or quietly do something else, one sentence per problem, naming the setting and the fix.

    `max_model_len` and `block_size` are in tokens; `bytes_per_token` is KV of the whole engine, None where it is not
    known; `arguments` are the server's other command-line arguments.
    """
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    problems = [f"{flag}: {why}" for flag, why in CONFLICTING_FLAGS.items() if flag in given]
    chunk = settings.blocks_per_chunk * block_size
    if chunk > max_model_len:
        problems.append(
            f"host_tier.blocks_per_chunk: chunks of {chunk} tokens hold more than max_model_len={max_model_len}, and "
            f"only whole chunks are stored; at most {max_model_len // block_size}"
        )
    elif bytes_per_token is not None:
        # A smaller tier is worse than none: it evicts the beginning of a context while it stores the end.
        context = max_model_len // chunk * chunk * bytes_per_token
        if settings.size_bytes < context:
            problems.append(
                f"host_tier.size_gib: {settings.size_gib:g} GiB does not hold one context of "
                f"max_model_len={max_model_len}; at least {context / GIB:.3g} GiB"
            )
    return problems


def bytes_per_token(model_dir: Path, *, bytes_per_value: int) -> int | None:
    """KV of one token over all layers, from the model's config.json; None where that does not tell.

    For attention that keeps keys and values per head. `bytes_per_value`: 4 for float32, 2 for 16-bit types.
    """
    try:
        model: Any = json.loads((model_dir / "config.json").read_text())
        if "kv_lora_rank" in model:
            return None
        heads = model["num_attention_heads"]
        kv_heads = model.get("num_key_value_heads") or heads
        head_dim = model.get("head_dim") or model["hidden_size"] // heads
        return int(2 * model["num_hidden_layers"] * kv_heads * head_dim * bytes_per_value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
