"""How a conversation is put to another model's engine to be rendered into token ids. Pure functions."""

from collections.abc import Mapping
from typing import Any

from pd_shadow.gateway.legs import Json
from pd_shadow.gateway.sse import Output

# Fields beside the messages that shape the prompt and that /tokenize takes as they are.
_RENDER_FIELDS = (
    "tools",
    "chat_template",
    "add_special_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
)


class NotRenderableError(Exception):
    """This conversation cannot be rendered for another model; the message says why, without its text."""


def tokenize_body(model: str, body: Mapping[str, Any], output: Output | None, *, partial: bool) -> Json:
    """A /tokenize request for `body`'s prompt and the output it got so far.

    Raises NotRenderableError for prompts that mean nothing to another model's tokenizer.
    """
    if "messages" in body:
        return _chat(model, body, output, partial=partial)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise NotRenderableError("only a single text prompt can be rendered for another model")
    text = prompt + (output.text if output is not None else "")
    return {"model": model, "prompt": text, "add_special_tokens": body.get("add_special_tokens", True)}


def _chat(model: str, body: Mapping[str, Any], output: Output | None, *, partial: bool) -> Json:
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise NotRenderableError("messages are not a list of objects")
    if any(_has_media(message) for message in messages):
        raise NotRenderableError("media content is not part of a token-id prompt")
    # A partial message is rendered open-ended; a tool call that is not complete cannot be.
    open_ended = bool(body.get("continue_final_message")) if output is None else partial
    if output is not None:
        messages = _continued(messages, output) if body.get("continue_final_message") else [*messages, output.message()]
    request: Json = {"model": model, "messages": messages, "add_generation_prompt": False}
    request.update({field: body[field] for field in _RENDER_FIELDS if body.get(field) is not None})
    kwargs = _template_kwargs(body)
    if kwargs:
        request["chat_template_kwargs"] = kwargs
    if open_ended:
        request["continue_final_message"] = True
    return request


def _continued(messages: list[Json], output: Output) -> list[Json]:
    """The history when the call continued its own last message."""
    before = messages[-1].get("content") or "" if messages else None
    if not isinstance(before, str):
        raise NotRenderableError("the message to continue is no text")
    said = output.message()
    return [*messages[:-1], {**messages[-1], **said, "content": before + (said["content"] or "")}]


def _template_kwargs(body: Mapping[str, Any]) -> Json:
    """Template arguments as vLLM's chat endpoint assembles them; its /tokenize takes them in one field."""
    kwargs = dict(body.get("chat_template_kwargs") or {})
    if body.get("documents") is not None:
        kwargs["documents"] = body["documents"]
    effort = body.get("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    return kwargs


def _has_media(message: Json) -> bool:
    content = message.get("content")
    if not isinstance(content, list):
        return False
    return any(isinstance(part, dict) and part.get("type", "text") not in ("text", "refusal") for part in content)
