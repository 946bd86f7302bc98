"""OpenAI request bodies as vLLM takes them, and its errors.

Several choices and log-probabilities are refused; sampling parameters and stop strings have no effect on made-up text.
"""

import contextlib
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from pd_shadow.engine.emulated.config import EmulatedEngine
from pd_shadow.engine.emulated.handoff import RemoteKv, remote_kv, wants_export
from pd_shadow.engine.emulated.tokenizer import LARGEST_ID, Tokenizer

ANSWER_TOKENS = 256
"""Length of an answer to a request that sets none: the model ends there by itself."""
_TYPES = {404: "NotFoundError"}
Json = dict[str, Any]


class BadRequestError(Exception):
    """The client's mistake; `status` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status

    def body(self) -> Json:
        """As vLLM puts it."""
        kind = _TYPES.get(self.status, "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


class Ask(NamedTuple):
    """A generating request, understood."""

    prompt: "array[int]"
    max_tokens: int
    # Why it ends once it has them.
    finish_reason: str
    stream: bool
    include_usage: bool
    return_token_ids: bool
    salt: str
    priority: int
    xargs: Mapping[str, Any] | None
    exports: bool
    remote: RemoteKv | None


def check_model(body: Any, config: EmulatedEngine) -> Json:
    """The body, an object for this model; raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    model = body.get("model", config.served_name)
    if model != config.served_name:
        raise BadRequestError(f"The model `{model}` does not exist.", param="model", status=404)
    return body


def ask(body: Json, prompt: "array[int]", config: EmulatedEngine, *, chat: bool) -> Ask:
    """A generating request over a prompt. Raises BadRequestError."""
    window = config.context_tokens
    if not prompt:
        raise BadRequestError("the prompt is empty", param="messages" if chat else "prompt")
    if len(prompt) >= window:
        raise BadRequestError(
            f"This model's maximum context length is {window} tokens. However, your request has {len(prompt)} input "
            "tokens. Please reduce the length of the input messages.",
            param="input_tokens",
        )
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise BadRequestError(f"{name}: the emulated engine gives one choice", param=name)
    for name in ("logprobs", "prompt_logprobs", "echo", "use_beam_search"):
        if body.get(name) not in (None, False, 0):
            raise BadRequestError(f"{name}: the emulated engine has none; leave it out", param=name)
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    named = next((name for name in names if body.get(name) is not None), None)
    limit = _count(body, named) if named else None
    if limit is None:
        limit, reason = min(ANSWER_TOKENS, window - len(prompt)), "stop"
    else:
        reason = "length"
    if len(prompt) + limit > window:
        raise BadRequestError(
            f"This model's maximum context length is {window} tokens. However, you requested {limit} output tokens and "
            f"your prompt contains {len(prompt)} input tokens. Please reduce one of them.",
            param=named,
        )
    options, xargs = body.get("stream_options"), body.get("vllm_xargs")
    salt, priority = body.get("cache_salt"), body.get("priority", 0)
    params = body.get("kv_transfer_params")
    for name, value, kind in (
        ("stream_options", options, dict),
        ("vllm_xargs", xargs, dict),
        ("cache_salt", salt, str),
        ("priority", priority, int),
        ("kv_transfer_params", params, dict),
    ):
        if value is not None and not isinstance(value, kind):
            raise BadRequestError(f"{name}: expected {kind.__name__}, got {type(value).__name__}", param=name)
    return Ask(
        prompt,
        limit,
        reason,
        stream=bool(body.get("stream")),
        include_usage=bool((options or {}).get("include_usage")),
        return_token_ids=bool(body.get("return_token_ids")),
        salt=salt or "",
        priority=priority or 0,
        xargs=xargs,
        exports=wants_export(params),
        remote=remote_kv(params),
    )


def chat_prompt(body: Json, tokenizer: Tokenizer, *, generation_prompt: bool) -> "array[int]":
    """Token ids of a conversation. Raises BadRequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise BadRequestError("messages: expected a list of at least one message", param="messages")
    continued = bool(body.get("continue_final_message"))
    if continued and generation_prompt:
        raise BadRequestError(
            "continue_final_message: cannot be set together with add_generation_prompt", param="continue_final_message"
        )
    try:
        return tokenizer.chat(
            messages, tools=body.get("tools"), generation_prompt=generation_prompt, continue_final=continued
        )
    except ValueError as error:
        raise BadRequestError(str(error), param="messages") from error


def text_prompt(body: Json, tokenizer: Tokenizer) -> "array[int]":
    """Token ids of a completion's prompt, a text or token ids. Raises BadRequestError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, list):
        # At C speed: shadow legs carry tens of thousands of ids.
        with contextlib.suppress(TypeError, OverflowError):
            ids = array("i", prompt)
            if not ids or min(ids) >= 0:
                return ids
    raise BadRequestError(f"prompt: expected one text, or one list of token ids from 0 to {LARGEST_ID}", param="prompt")


def _count(body: Json, name: str) -> int:
    value = body[name]
    if type(value) is not int or value < 1:
        raise BadRequestError(f"{name} must be at least 1, got {value!r}."[:200], param=name)
    return value
