"""A reversible tokenizer without a vocabulary, another one for every model, and an append-only chat template.

A token is up to four ASCII characters, one byte of anything else, or one of the template's markers, all as one number
below 2^31 that the model's key scrambles: two models have no token prefix in common. Like that of a real tokenizer,
the last token of a text may change when more is appended, and no other.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

CHARACTERS_PER_TOKEN = 4
# With their first byte at 0x80 or above these are no ASCII chunk, and with two bytes no single byte.
_MARKERS = 0x8000
_ROLES = ("system", "user", "assistant", "tool", "developer")
_END = len(_ROLES)
_TOOLS = _END + 1
_OTHER = _END + 2
# NUL leads no chunk: a chunk's length is told by its leading zero bytes.
_RUNS = re.compile(rb"[\x01-\x7f]+|[\x00\x80-\xff]")
LARGEST_ID = 0x7FFF_FFFF


class Tokenizer:
    """Pure functions of a model's name."""

    def __init__(self, model: str) -> None:
        self._key = int.from_bytes(hashlib.blake2b(model.encode(), digest_size=4).digest(), "big") & LARGEST_ID

    def encode(self, text: str) -> "array[int]":
        """Token ids of a text."""
        ids = array("i")
        # Lone surrogates come through JSON, and UTF-8 has no place for them.
        for run in _RUNS.findall(text.encode("utf-8", "replace")):
            if run[0] in range(1, 0x80):
                whole = len(run) // CHARACTERS_PER_TOKEN * CHARACTERS_PER_TOKEN
                ids.frombytes((np.frombuffer(run[:whole], ">u4").astype(np.int32) ^ self._key).tobytes())
                run = run[whole:]
            if run:
                ids.append(int.from_bytes(run, "big") ^ self._key)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; markers say nothing, and what is no token of this model reads as U+FFFD."""
        return b"".join(self._bytes(value ^ self._key) for value in ids).decode("utf-8", "replace")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> "array[int]":
        """Token ids of a conversation; without a generation prompt, those of a longer one begin with them.

        `continue_final` leaves the last message open-ended. Raises ValueError, naming the field, for what is no text.
        """
        ids = array("i")
        if tools:
            ids.append(self._marker(_TOOLS))
            ids += self.encode(json.dumps(tools, sort_keys=True))
        for place, message in enumerate(messages):
            role = str(message.get("role"))
            ids.append(self._marker(_ROLES.index(role) if role in _ROLES else _OTHER))
            ids += self.encode(_text(message, place))
            if not (continue_final and place == len(messages) - 1):
                ids.append(self._marker(_END))
        if generation_prompt:
            ids.append(self._marker(_ROLES.index("assistant")))
        return ids

    def word(self, number: int) -> int:
        """The id of an ordinary word that the number picks: a space and three letters."""
        letters = bytes(ord("a") + number // 26**place % 26 for place in range(3))
        return int.from_bytes(b" " + letters, "big") ^ self._key

    def _marker(self, place: int) -> int:
        return (_MARKERS + place) ^ self._key

    @staticmethod
    def _bytes(value: int) -> bytes:
        if _MARKERS <= value <= _MARKERS + _OTHER:
            return b""
        if not 0 <= value <= LARGEST_ID:
            return "\ufffd".encode()
        return value.to_bytes(max(1, -(-value.bit_length() // 8)), "big")


def _text(message: Mapping[str, Any], place: int) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                raise ValueError(f"messages.{place}.content: the emulated engine takes text parts only")  # noqa: TRY004
            parts.append(text)
        content = "".join(parts)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"messages.{place}.content: expected a string or a list of text parts")
    calls = message.get("tool_calls")
    return (content or "") + (json.dumps(calls, sort_keys=True) if calls else "")
