"""Server-sent events: cutting a byte stream into events, and adding up what the model has said."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson

from pd_shadow.gateway.tokens import Tokens, pack

DONE = b"[DONE]"


class SseSplitter:
    """Cuts bytes into the data of whole events; comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of every event that `data` completes."""
        lines = (self._rest + data).replace(b"\r\n", b"\n")
        *events, self._rest = lines.split(b"\n\n")
        for event in events:
            parts = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if parts:
                yield b"\n".join(parts)


def frame(data: bytes) -> bytes:
    """One event as it goes over the wire."""
    return b"data: " + data + b"\n\n"


def parse(data: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None if it is none (such as [DONE])."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


class Output:
    """The first choice's output, from stream chunks or from a whole response."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}
        # Generated tokens of all choices; an estimate (one a chunk) unless chunks carry token ids.
        self.tokens = 0
        # The first choice's, as far as the engine tells them.
        self.token_ids: Tokens[int] = pack(())

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        """Take one chunk of a stream."""
        for choice in _dicts(chunk.get("choices")):
            delta = choice.get("delta")
            said = delta if isinstance(delta, dict) else choice
            ids = choice.get("token_ids")
            if isinstance(ids, list):
                self.tokens += len(ids)
            elif any(said.get(field) for field in ("content", "text", "tool_calls", "reasoning", "reasoning_content")):
                self.tokens += 1
            if choice.get("index", 0) == 0:
                self._add(said)
                self._add_ids(ids)

    def add_response(self, response: dict[str, Any]) -> None:
        """Take a whole response."""
        for choice in _dicts(response.get("choices")):
            if choice.get("index", 0) == 0:
                message = choice.get("message")
                self._add(message if isinstance(message, dict) else choice)
                self._add_ids(choice.get("token_ids"))

    @property
    def text(self) -> str:
        """The text so far; reasoning is left out, as chat templates drop it from earlier turns."""
        return "".join(self._text)

    @property
    def has_tool_calls(self) -> bool:
        """Whether the model has begun to call tools."""
        return bool(self._tool_calls)

    def message(self) -> dict[str, Any]:
        """The assistant message a caller would append to its history."""
        text = self.text
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if self._tool_calls else "")}
        if self._tool_calls:
            message["tool_calls"] = [call for _, call in sorted(self._tool_calls.items())]
        return message

    def _add_ids(self, ids: Any) -> None:
        with suppress(TypeError, OverflowError):
            self.token_ids += pack(ids or ())

    def _add(self, said: dict[str, Any]) -> None:
        text = said.get("content") if "content" in said else said.get("text")
        if isinstance(text, str):
            self._text.append(text)
        for position, call in enumerate(_dicts(said.get("tool_calls"))):
            index = call.get("index")
            self._add_tool_call(index if isinstance(index, int) else position, call)

    def _add_tool_call(self, index: int, call: dict[str, Any]) -> None:
        held = self._tool_calls.setdefault(
            index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        held["id"] = call.get("id") or held["id"]
        function = call.get("function")
        if isinstance(function, dict):
            # A stream names the function once and sends its arguments in pieces.
            held["function"]["name"] = function.get("name") or held["function"]["name"]
            held["function"]["arguments"] += function.get("arguments") or ""


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
