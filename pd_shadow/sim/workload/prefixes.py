"""Which requests of a trace of block hashes extend each other."""

from array import array

BLOCK_TOKENS = 512
"""Of the Mooncake traces. Equal ids mean equal blocks after equal beginnings."""
LEAST_SHARE = 0.25
"""Of the context's last request, in blocks, that a request must share to join it. Any shared system prompt would do
otherwise, and each conversation would cut off another. In Mooncake's conversation trace (12,031 requests) 34.5 % of
the prompt tokens stay reusable this way, of 37.4 % that an infinite cache would hit; with 0.1 or 0.5 fewer do."""


class PrefixContexts:
    """Assigns each request, in order of arrival, to the context with which it shares most, or to a new one."""

    def __init__(self) -> None:
        self._last: list[array[int]] = []  # by context, the blocks of its last request
        self._holder: dict[int, int] = {}  # by block, the context that had it last

    def place(self, blocks: "array[int]") -> tuple[int, int]:
        """The request's context and how many first blocks it shares with the context's last request."""
        context, shared = self._longest(blocks)
        if not shared or shared < LEAST_SHARE * len(self._last[context]):
            context, shared = len(self._last), 0
            self._last.append(blocks)
        self._last[context] = blocks
        for block in blocks:
            self._holder[block] = context
        return context, shared

    def _longest(self, blocks: "array[int]") -> tuple[int, int]:
        for depth in range(len(blocks), 0, -1):
            context = self._holder.get(blocks[depth - 1])
            if context is not None and self._last[context][:depth] == blocks[:depth]:
                return context, depth
        return -1, 0
