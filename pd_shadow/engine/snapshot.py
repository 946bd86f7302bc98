"""What the engine tells the reporter: plain values, handed over whole."""

import math
from typing import NamedTuple

from pd_shadow.engine.settings import Role
from pd_shadow.policy.base import StepReason


class EngineFacts(NamedTuple):
    """What does not change in an engine's life."""

    role: Role
    # The name clients use in `model`.
    model: str
    # KV block size in tokens and prefix hash algorithm, as on /metrics: vllm:cache_config_info's labels block_size and
    # prefix_caching_hash_algo.
    block_size: int
    hash_algorithm: str
    max_context_tokens: int
    # All layers.
    kv_bytes_per_token: int
    vllm_version: str


class EngineSnapshot(NamedTuple):
    """The engine after a step."""

    # Normal requests; shadow work is not among them.
    waiting: int = 0
    running: int = 0
    # Share of the KV pool in use, 0 to 1.
    kv_usage: float = 0.0
    # Blocks of the shadow class, the most it may have, and those that exports hold until their readers have come.
    shadow_blocks: int = 0
    shadow_cap_blocks: int = 0
    shadow_pinned_blocks: int = 0
    # Tokens of KV that shadow work may take now; of an idle engine, once what was used last has gone cold.
    shadow_room_tokens: int = 0
    # Shadow jobs waiting and running.
    shadow_jobs: int = 0
    # Least slack of the normal requests in flight; infinite without any.
    slack_seconds: float = math.inf
    credit_seconds: float = 0.0
    # Whether a normal transfer is on the inbound link.
    link_busy: bool = False
    step_reason: StepReason = StepReason.NO_WORK
    # Since the engine started: shadow tokens computed, iterations with shadow work that took longer than their budget,
    # blocks of the shadow class given up for other use.
    shadow_tokens: int = 0
    steps_over_budget: int = 0
    evicted_blocks: int = 0
