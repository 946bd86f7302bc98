"""KV between P and D: what P holds for readers, and vLLM's parameters that say where it lies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class RemoteKv(NamedTuple):
    """Blocks of one request that a P instance holds for one reader."""

    host: str
    port: int
    request_id: str
    blocks: tuple[int, ...]
    # Tokens in them, from the beginning of the context.
    tokens: int


@dataclass
class Export:
    """One handed-out context, until it is read or its lease ends."""

    blocks: list[int]
    expires_at: float
    shadow: bool


class Exports:
    """What P holds for readers, by request."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease = lease_seconds
        self._held: dict[str, Export] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def shadow_blocks(self) -> int:
        """Blocks that shadow exports hold."""
        return sum(len(export.blocks) for export in self._held.values() if export.shadow)

    @property
    def next_expiry(self) -> float | None:
        """When the next lease ends."""
        return min((export.expires_at for export in self._held.values()), default=None)

    def hold(self, request_id: str, blocks: list[int], now: float, *, shadow: bool) -> None:
        self._held[request_id] = Export(blocks, now + self._lease, shadow)

    def get(self, request_id: str) -> Export | None:
        return self._held.get(request_id)

    def take(self, request_id: str) -> list[int]:
        """The reader is done: the blocks to release, none for an export that is not held."""
        export = self._held.pop(request_id, None)
        return [] if export is None else export.blocks

    def take_expired(self, now: float) -> list[list[int]]:
        """Blocks whose lease has ended."""
        over = [request_id for request_id, export in self._held.items() if export.expires_at <= now]
        self.expired += len(over)
        return [self.take(request_id) for request_id in over]


def export_params(engine_id: str, kv: RemoteKv) -> dict[str, Any]:
    """`kv_transfer_params` of an answer of P, with the keys that vLLM's NIXL connector gives them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": kv.request_id,
        "remote_block_ids": [list(kv.blocks)],
        "remote_host": kv.host,
        "remote_port": kv.port,
        "remote_num_tokens": kv.tokens,
        "tp_size": 1,
    }


def wants_export(params: Mapping[str, Any] | None) -> bool:
    """Whether a request's KV is to be handed out."""
    return bool(params and params.get("do_remote_decode"))


def remote_kv(params: Mapping[str, Any] | None) -> RemoteKv | None:
    """Where a request's KV lies; None for a request without, or with parameters that lead nowhere."""
    if not params or not params.get("do_remote_prefill"):
        return None
    groups, host, port = params.get("remote_block_ids"), params.get("remote_host"), params.get("remote_port")
    request_id, tokens = params.get("remote_request_id"), params.get("remote_num_tokens")
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], list):
        return None
    if not isinstance(host, str) or not isinstance(request_id, str):
        return None
    blocks = groups[0]
    if not all(isinstance(number, int) and number >= 0 for number in (port, tokens, *blocks)):
        return None
    assert isinstance(port, int)
    assert isinstance(tokens, int)
    return RemoteKv(host, port, request_id, tuple(blocks), tokens)
