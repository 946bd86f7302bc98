"""A KV connector that a test holds in its hand: what it has, how it loads, when a load arrives and whether it fails.

Scheduler side and worker side share the test's process, and `HAND`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)


@dataclass
class Hand:
    """What the test decides."""

    # By the tokens up to the end of a block: its content, one tensor per layer.
    blocks: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)
    loads_async: bool = True
    # Loads stay on their way until let go.
    holding: bool = False
    # As NIXL says it, by request, or as others do, by block.
    fail_requests: bool = False
    fail_blocks: bool = False
    # The next so many questions are answered with: ask again later.
    undecided: int = 0
    # Requests it was told are over.
    finished: list[str] = field(default_factory=list)

    def empty(self) -> None:
        """Nothing in it, and as at first."""
        self.__dict__.update(Hand().__dict__)


HAND = Hand()


class Load(NamedTuple):
    request_id: str
    block_ids: list[int]
    # Of each block, by layer.
    contents: list[list[torch.Tensor]]


class Loads(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, loads: list[Load]) -> None:
        self.loads = loads


class HeldConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._local: dict[str, int] = {}
        self._new: list[Load] = []
        self._on_the_way: list[Load] = []
        self._invalid: set[int] = set()
        self._caches: list[torch.Tensor] = []

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if HAND.undecided:
            HAND.undecided -= 1
            return None, False
        self._local[request.request_id] = num_computed_tokens
        found = len(list(itertools.takewhile(HAND.blocks.__contains__, self._prefixes(request, num_computed_tokens))))
        return found * self._block_size, bool(found) and HAND.loads_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            start = self._local[request.request_id]
            first, count = start // self._block_size, num_external_tokens // self._block_size
            block_ids = blocks.get_block_ids()[0][first : first + count]
            # As it is now: the hand may be emptied while the load is on its way.
            contents = [HAND.blocks[prefix] for prefix in self._prefixes(request, start)[:count]]
            self._new.append(Load(request.request_id, block_ids, contents))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        new, self._new = self._new, []
        return Loads(new)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        HAND.finished.append(request.request_id)
        exports = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, {"remote_block_ids": [block_ids]} if exports else None

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        global CACHES
        CACHES = self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        if HAND.loads_async:
            self._on_the_way += metadata.loads
        else:
            for load in metadata.loads:
                self._finish(load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if HAND.holding:
            return KVConnectorTransferResults()
        arrived, self._on_the_way = self._on_the_way, []
        failed = {load.request_id for load in arrived if not self._finish(load) and HAND.fail_requests}
        return KVConnectorTransferResults(finished_recving={load.request_id for load in arrived}, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def _finish(self, load: Load) -> bool:
        if HAND.fail_requests or HAND.fail_blocks:
            self._invalid |= set(load.block_ids) if HAND.fail_blocks else set()
            # A failed transfer leaves anything in its blocks.
            for cache, block_id in itertools.product(self._caches, load.block_ids):
                cache[block_id].fill_(7)
            return False
        for block_id, contents in zip(load.block_ids, load.contents, strict=True):
            for cache, content in zip(self._caches, contents, strict=True):
                cache[block_id].copy_(content)
        return True

    def _prefixes(self, request: Any, start: int) -> list[tuple[int, ...]]:
        tokens: Sequence[int] = request.prompt_token_ids
        ends = range(start + self._block_size, len(tokens) + 1, self._block_size)
        return [tuple(tokens[:end]) for end in ends]


# Of the worker side: per layer, blocks first.
CACHES: list[torch.Tensor] = []


def keep(token_ids: list[int], block_ids: list[int], block_size: int) -> None:
    """Put the content of a prompt's whole blocks into the connector's hand."""
    for index, block_id in enumerate(block_ids):
        end = (index + 1) * block_size
        HAND.blocks[tuple(token_ids[:end])] = [cache[block_id].clone() for cache in CACHES]
