"""Host memory that keeps what the pool gave up of session contexts (paper section 3.3)."""

from collections import OrderedDict
from typing import NamedTuple


class Span(NamedTuple):
    """Tokens [start, end) of a context."""

    start: int
    end: int


class HostTier:
    """One span per context, the least recently spilled dropped first; capacity in tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._spans: OrderedDict[int, Span] = OrderedDict()
        self._held = 0

    @property
    def held(self) -> int:
        """Tokens in host memory."""
        return self._held

    def spill(self, context: int, start: int, end: int) -> None:
        """Keep tokens [start, end). A pool gives contexts up from their end, so that spans grow downwards."""
        before = self._spans.pop(context, None)
        if before is not None:
            self._held -= before.end - before.start
            if before.start <= end <= before.end:
                end = before.end
        if end - start > self._capacity:
            return
        self._spans[context] = Span(start, end)
        self._held += end - start
        while self._held > self._capacity:
            _, dropped = self._spans.popitem(last=False)
            self._held -= dropped.end - dropped.start

    def end_of(self, context: int, held: int) -> int:
        """Where a context ends that is in the pool up to `held`: there, or at the end of the span that continues it."""
        span = self._spans.get(context)
        return span.end if span is not None and span.start <= held < span.end else held

    def truncate(self, context: int, tokens: int) -> None:
        """The context's history was rewritten after so many tokens."""
        span = self._spans.get(context)
        if span is None or span.end <= tokens:
            return
        self._held -= span.end - max(tokens, span.start)
        if span.start < tokens:
            self._spans[context] = Span(span.start, tokens)
        else:
            del self._spans[context]
