"""What the controller learns of a prompt: one rolling hash per message and estimated token counts, never text."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from pd_shadow.api.v1 import placement_pb2

# The controller takes this many digests; the middle of a longer history is left out.
MAX_DIGESTS = 4_096
HASH_BYTES = 16
# A prompt without messages is digested in pieces, so that a longer prompt still shows what it shares with a shorter.
PIECE_CHARS = 4_096
PIECE_TOKENS = 1_024

# Fields beside the messages that a chat template renders into the prompt's head.
_HEAD_FIELDS = ("tools", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """A prompt's digests and its estimated length in tokens."""

    messages: list[placement_pb2.MessageDigest]
    prompt_tokens: int
    # Bytes of text behind the estimate; 0 when the caller sent token ids, whose count is exact.
    text_bytes: int


def digest(body: Mapping[str, Any], bytes_per_token: float) -> PromptDigest:
    """Digest a request body; `bytes_per_token` is the model's ratio as far as it is known."""
    rolling = hashlib.blake2b(digest_size=HASH_BYTES)
    digests: list[placement_pb2.MessageDigest] = []
    text_bytes, tokens = 0, 0.0
    head = {field: body[field] for field in _HEAD_FIELDS if body.get(field) is not None}
    if head:
        encoded = orjson.dumps(head)
        rolling.update(encoded)
        text_bytes, tokens = len(encoded), len(encoded) / bytes_per_token
    for piece, exact_tokens in _pieces(body):
        rolling.update(len(piece).to_bytes(8, "big"))
        rolling.update(piece)
        if exact_tokens:
            tokens += exact_tokens
        else:
            text_bytes += len(piece)
            tokens += len(piece) / bytes_per_token
        digests.append(placement_pb2.MessageDigest(rolling_hash=rolling.digest(), running_tokens=max(1, round(tokens))))
    if len(digests) > MAX_DIGESTS:
        digests = [*digests[: MAX_DIGESTS - 1], digests[-1]]
    return PromptDigest(digests, max(1, round(tokens)), text_bytes)


def _pieces(body: Mapping[str, Any]) -> Iterator[tuple[bytes, int]]:
    """(bytes, exact token count or 0) of every message, or of every piece of a prompt."""
    messages = body.get("messages")
    if isinstance(messages, list):
        for message in messages:
            yield orjson.dumps(message), 0
        return
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    for one in prompts:
        if isinstance(one, str):
            for start in range(0, len(one), PIECE_CHARS):
                yield one[start : start + PIECE_CHARS].encode("utf-8", "surrogatepass"), 0
        elif isinstance(one, list):
            for start in range(0, len(one), PIECE_TOKENS):
                ids = one[start : start + PIECE_TOKENS]
                yield orjson.dumps(ids), len(ids)


class TokenRatios:
    """Bytes of request text per prompt token, learned per model from what engines count."""

    DEFAULT = 4.0
    WEIGHT = 0.2
    MAX_MODELS = 256

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    def of(self, model: str) -> float:
        """The model's ratio so far."""
        return self._ratios.get(model, self.DEFAULT)

    def learn(self, model: str, text_bytes: int, prompt_tokens: int) -> None:
        """Take one finished call into account."""
        if text_bytes <= 0 or prompt_tokens <= 0:
            return
        if model not in self._ratios and len(self._ratios) >= self.MAX_MODELS:
            return
        seen = min(16.0, max(0.5, text_bytes / prompt_tokens))
        before = self._ratios.get(model)
        self._ratios[model] = seen if before is None else before + self.WEIGHT * (seen - before)
