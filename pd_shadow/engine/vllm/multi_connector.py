"""On a decode instance: the host tier's prefix first, then the rest over NIXL, in one load.

vLLM's MultiConnector takes all of a load from the first connector that has anything. Host tier first, D would compute
what lies behind a short host prefix; NIXL first, P would send what D has in its own host memory. Here P sends only what
neither D's KV pool nor its host memory holds. It is loaded by module path, and bears the stock class's name because
vLLM asks for that name where it looks for the connectors inside.

One load has two halves then, and a request may run only after both: the scheduler's side marks such loads in its
metadata, the worker's side holds back the first half that ends. When NIXL fails, vLLM asks again, and the host tier
answers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec

HOST, NIXL = 0, 1
"""Places of the two in the configuration's list of connectors."""

IN_PLACE = KVCacheBlock(block_id=-1)
"""Stands for blocks that are, or soon will be, in the KV pool without NIXL."""
IN_PLACE.set_block_hash(BlockHashWithGroupId(b"in place"))


class Load(NamedTuple):
    """What one load would bring, in tokens, behind those found in the KV pool."""

    local: int
    host: int
    """From the host tier."""
    nixl: int
    """From P, behind those of the host tier."""

    @property
    def tokens(self) -> int:
        return self.local + self.host + self.nixl


@dataclass
class SplitLoadMetadata(stock.MultiKVConnectorMetadata):  # type: ignore[misc]
    """With the requests whose load has two halves from this step on."""

    split_loads: frozenset[str] = frozenset()


class MultiConnector(stock.MultiConnector):  # type: ignore[misc]
    """OffloadingConnector and NixlConnector, in this order, sharing loads.

    Loads are shared where a block means the same to both: one KV cache group with full attention, each block on one
    worker. Elsewhere the connector with more tokens gets the whole load, so that D computes as little as it can.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        kinds = [type(connector) for connector in self._connectors]
        if len(kinds) != 2 or not issubclass(kinds[HOST], OffloadingConnector) or kinds[NIXL] is not NixlPullConnector:
            raise ValueError(
                "kv_connector_extra_config.connectors: expected OffloadingConnector and NixlConnector, in this order; "
                f"got {', '.join(kind.__name__ for kind in kinds) or 'none'}"
            )
        groups = kv_cache_config.kv_cache_groups
        self._can_split = (
            len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and vllm_config.parallel_config.decode_context_parallel_size == 1
        )
        self._block_size = vllm_config.cache_config.block_size
        # Scheduler's side, by request the scheduler holds: what it was offered, the blocks its load goes to, and the
        # loads that have arrived. Then loads to announce to the workers.
        self._loads: dict[str, Load] = {}
        self._loading: dict[str, tuple[list[int], ...]] = {}
        self._arrived: set[str] = set()
        self._starting: set[str] = set()
        # Worker's side: halves still on their way, and loads of which one half has failed.
        self._halves: dict[str, int] = {}
        self._failed: set[str] = set()

    # Scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the KV pool's that can be loaded; (None, False) while the host tier cannot tell yet."""
        request_id = request.request_id
        self._forget(request_id)
        from_host, _ = self._connectors[HOST].get_num_new_matched_tokens(request, num_computed_tokens)
        from_nixl, _ = self._connectors[NIXL].get_num_new_matched_tokens(request, num_computed_tokens)
        if from_host is None or from_nixl is None:
            return None, False
        found = max(from_host, from_nixl)
        if found == 0:
            return 0, False
        if from_host == found:
            self._requests_to_connector[request_id] = HOST
            load = Load(num_computed_tokens, from_host, 0)
        else:
            self._requests_to_connector[request_id] = NIXL
            whole_blocks = (num_computed_tokens + from_host) % self._block_size == 0
            host = from_host if self._can_split and whole_blocks else 0
            load = Load(num_computed_tokens, host, from_nixl - host)
        self._loads[request_id] = load
        return found, True

    def update_state_after_alloc(self, request: Any, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        load = self._loads.get(request.request_id)
        if load is None or num_external_tokens == 0:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        self._loading[request.request_id] = blocks.get_block_ids()
        if not (load.host and load.nixl):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        self._connectors[HOST].update_state_after_alloc(request, blocks, load.host)
        rest = _with_cached_prefix(blocks, (load.local + load.host) // self._block_size)
        self._connectors[NIXL].update_state_after_alloc(request, rest, load.nixl)
        self._starting.add(request.request_id)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        load = self._loads.get(request.request_id)
        if load is None or num_external_tokens == 0:
            return {}
        host = self._connectors[HOST].get_external_cache_hit_sources(request, load.host)
        nixl = self._connectors[NIXL].get_external_cache_hit_sources(request, load.nixl)
        return {**host, **nixl}

    def build_connector_meta(self, scheduler_output: Any) -> SplitLoadMetadata:
        plain = super().build_connector_meta(scheduler_output)
        starting, self._starting = frozenset(self._starting), set()
        return SplitLoadMetadata(plain.metadata, plain.extra_async_saves, starting)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        arrived = (connector_output.finished_recving or set()) - connector_output.failed_recving
        # Loads of requests that ended meanwhile arrive, too.
        self._arrived |= arrived & self._loading.keys()

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        if self._can_split and request.request_id in self._arrived:
            self._spill_unscheduled(request)
        self._forget(request.request_id)
        delayed, params = super().request_finished_all_groups(request, block_ids)
        return delayed, params

    def _spill_unscheduled(self, request: Any) -> None:
        # A shadow fetch ends when its KV has arrived, without an iteration of its own. The host tier learns from
        # iterations which blocks to keep, so it would keep nothing of a fetch, the KV that is evicted first.
        state = self._connectors[HOST].scheduler._req_status.get(request.request_id)
        if state is None or any(group.block_ids for group in state.group_states):
            return
        state.update_block_id_groups(self._loading[request.request_id])
        request.num_computed_tokens = self._loads[request.request_id].tokens

    def _forget(self, request_id: str) -> None:
        self._loads.pop(request_id, None)
        self._loading.pop(request_id, None)
        self._arrived.discard(request_id)

    # Worker's side.

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, SplitLoadMetadata)
        self._halves |= dict.fromkeys(connector_metadata.split_loads, 2)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As in the stock class, but a load with two halves is finished, or failed, with the later one."""
        results = KVConnectorTransferResults()
        for connector in self._connectors:
            found = connector.get_transfer_results(finished_req_ids)
            # The host tier keeps no request's blocks back, so that every send is NIXL's alone.
            results.finished_sending |= found.finished_sending
            self._failed |= found.failed_recving
            for request_id in found.finished_recving:
                self._halves[request_id] = self._halves.get(request_id, 1) - 1
        finished = {request_id for request_id, halves in self._halves.items() if halves == 0}
        for request_id in finished:
            del self._halves[request_id]
        results.finished_recving = finished
        results.failed_recving = self._failed & finished
        self._failed -= finished
        return results


def _with_cached_prefix(blocks: KVCacheBlocks, prefix: int) -> KVCacheBlocks:
    """The request's blocks, the first `prefix` of every group presented as a hit in the KV pool.

    NIXL fetches blocks without a hash, and counts those with one.
    """
    return KVCacheBlocks(tuple([IN_PLACE] * prefix + list(group[prefix:]) for group in blocks.blocks))
