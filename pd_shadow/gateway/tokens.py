"""Token id sequences: compact storage and longest common prefix."""

from array import array
from collections.abc import Iterable

Tokens = array  # of typecode "i"

_STRIDE = 4_096


def pack(ids: Iterable[int]) -> "Tokens[int]":
    """Four bytes a token. Raises TypeError or OverflowError for anything that is no list of token ids."""
    return array("i", ids)


def common_prefix(a: "Tokens[int]", b: "Tokens[int]") -> int:
    """Length of the longest common prefix, in tokens."""
    most = min(len(a), len(b))
    for start in range(0, most, _STRIDE):
        end = min(start + _STRIDE, most)
        # Slices compare at C speed; only the stride that differs is walked.
        if a[start:end] != b[start:end]:
            return next(i for i in range(start, end) if a[i] != b[i])
    return most
