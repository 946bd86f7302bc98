"""Which vLLM the plugin runs on: tested minor versions, and the scheduler internals it stands on.

vLLM calls its scheduler interface not public. The plugin patches nothing on disk, but it subclasses the scheduler and
replaces the block pool's free queue, so it names every attribute it relies on and refuses to start without one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

TESTED_MINORS = ("0.32",)
SETTING = "allow_untested_version"

SCHEDULER = (
    "cache_config", "connector", "deferred_waiting", "finished_recving_kv_req_ids", "finished_req_ids",
    "kv_cache_config", "kv_cache_manager", "kv_holding_waiting", "log_stats", "lora_config", "max_num_running_reqs",
    "max_num_scheduled_tokens", "num_lookahead_tokens", "policy", "requests", "reset_preempted_req_ids", "running",
    "scheduler_config", "vllm_config", "waiting", "_free_request", "_free_request_blocks", "_inflight_prefills",
    "_pause_state", "_preempt_request", "_set_kv_fetch_stage", "_update_request_with_output",
    "_update_waiting_for_remote_kv",
)  # fmt: skip
"""Attributes of vLLM's scheduler."""
KV_CACHE_MANAGER = (
    "allocate_slots", "block_pool", "coordinator", "create_kv_cache_blocks", "evict_blocks", "get_block_ids",
    "get_blocks",
)  # fmt: skip
BLOCK_POOL = ("blocks", "free_block_queue", "get_new_blocks", "touch")
FREE_QUEUE = (
    "append", "append_n", "get_all_free_blocks", "iter_blocks_after", "num_free_blocks", "popleft", "popleft_n",
    "prepend_n", "remove",
)  # fmt: skip
"""The whole of vLLM's free queue: a method we did not know of would bypass the shadow class."""


class IncompatibleVllmError(RuntimeError):
    """The engine cannot run with the plugin; the message says why and what to do."""


def check_version(version: str, *, allow_untested: bool) -> None:
    """Raises IncompatibleVllmError on a minor version the plugin was not tested on."""
    minor = ".".join(version.split("+")[0].split(".")[:2])
    if minor not in TESTED_MINORS and not allow_untested:
        raise IncompatibleVllmError(
            f"vLLM {version}: the PD-Shadow plugin was tested on {', '.join(TESTED_MINORS)}.*; install one of these, or"
            f' set "{SETTING}": true under "pd_shadow" in --additional-config after running its tests on this version'
        )


def check_attributes(found: Mapping[str, tuple[Any, Iterable[str]]]) -> None:
    """Raises IncompatibleVllmError naming what is missing; `found` maps a name to an object and what it needs."""
    missing = [
        f"{name}.{attribute}"
        for name, (thing, attributes) in found.items()
        for attribute in attributes
        if not hasattr(thing, attribute)
    ]
    if missing:
        raise IncompatibleVllmError(
            f"this vLLM lacks what the PD-Shadow plugin stands on: {', '.join(missing)}; install vLLM "
            f"{TESTED_MINORS[-1]}.*"
        )


def check_free_queue(queue: Any) -> None:
    """Raises IncompatibleVllmError if the free queue has public methods the shadow class does not know."""
    unknown = {name for name in dir(type(queue)) if not name.startswith("_")} - set(FREE_QUEUE)
    if unknown:
        raise IncompatibleVllmError(
            f"vLLM's free block queue has methods the shadow class does not know: {', '.join(sorted(unknown))}"
        )
