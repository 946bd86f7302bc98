"""One request inside an emulated engine: a call, or the carrier of a shadow leg."""

from array import array
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from pd_shadow.engine.emulated import block_pool
from pd_shadow.engine.emulated.handoff import RemoteKv
from pd_shadow.engine.tags import CallTag


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"
    # Its KV is on its way from P.
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


class End(NamedTuple):
    """The last word about a request."""

    finish_reason: str
    kv_transfer_params: Mapping[str, Any] | None


class EngineRequest:
    """`on_token` and `on_end` are called by the engine; neither after the request was aborted."""

    def __init__(
        self,
        request_id: str,
        prompt: "array[int]",
        *,
        max_tokens: int,
        finish_reason: str = "length",
        salt: str = "",
        priority: int = 0,
        xargs: Mapping[str, Any] | None = None,
        exports: bool = False,
        remote: RemoteKv | None = None,
        on_token: Callable[[int], None] = lambda token: None,
        on_end: Callable[[End], None] = lambda end: None,
    ) -> None:
        self.request_id = request_id
        self.tokens = array("i", prompt)
        self.prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.finish_reason = finish_reason
        self.priority = priority
        self.xargs = xargs
        # Whether its KV is to be handed out, and where it comes from.
        self.exports = exports
        self.remote = remote
        self.on_token = on_token
        self.on_end = on_end
        self.state = State.WAITING
        self.tag = CallTag()
        self.arrived = 0.0
        self.ttft_slo = 0.0
        self.first_token_at: float | None = None
        self.blocks: list[int] = []
        # Prompt tokens that were found or received, and tokens whose KV is there.
        self.cached = 0
        self.computed = 0
        self._root = block_pool.root_hash(salt)
        self._hashes: list[bytes] = []

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def hashes(self, blocks: int, block_size: int) -> list[bytes]:
        """Prefix hashes of its first blocks, which are whole."""
        while len(self._hashes) < blocks:
            start = len(self._hashes) * block_size
            before = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(block_pool.content_of(before, self.tokens[start : start + block_size].tobytes()))
        return self._hashes[:blocks]

    def hash_at(self, place: int, block_size: int) -> bytes:
        """The prefix hash of the block at that place."""
        if place >= len(self._hashes):
            self.hashes(place + 1, block_size)
        return self._hashes[place]

    def cut(self, tokens: int) -> None:
        """Forget what lies behind so many tokens of the prompt."""
        del self.tokens[tokens:]
        self.prompt_tokens = tokens
