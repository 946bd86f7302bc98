"""Bodies of the requests the gateway sends to engines, and what their answers say. Pure functions."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from pd_shadow.api.v1 import common_pb2
from pd_shadow.engine import session_tag, tags

Json = dict[str, Any]


class Endpoint(Enum):
    """The two generating endpoints; the value is the path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"

    @property
    def label(self) -> str:
        """Name for metric labels."""
        return self.name.lower()


# Gateway fields, and fields that would let a caller reach other callers' KV or overtake them.
_NEVER_FORWARDED = frozenset({"task", "kv_transfer_params", "ec_transfer_params", "priority"})
# P only computes the prompt. Its one token must always be generated and end the request by length: P exports nothing
# for a request that was aborted, and a stop string aborts.
_NOT_FOR_PREFILL = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "echo",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "repetition_detection",
        "return_prompt_text",
        "return_tokens_as_token_ids",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "thinking_token_budget",
        "top_logprobs",
    }
)
_EXPORT_PARAMS: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_TOKEN_IDS = ("prompt_token_ids", "token_ids")
# With this D would report P's cached tokens as its own, and nobody could tell whether the KV arrived.
_PREFILL_CACHED = "remote_prefill_cached_tokens"


def forwarded(body: Mapping[str, Any], cache_salt: str | None, session: tuple[str, str] | None) -> Json:
    """The caller's request as engines may see it; a call of a session (tenant, session id) says that it is routed."""
    out = {key: value for key, value in body.items() if key not in _NEVER_FORWARDED}
    xargs: Json = {}
    if isinstance(out.get("vllm_xargs"), dict):
        # A caller that could tag its request as shadow work, or as routed, would speak for others.
        xargs = {
            k: v for k, v in out["vllm_xargs"].items() if k not in _NEVER_FORWARDED and not k.startswith(tags.PREFIX)
        }
    if session is not None:
        xargs |= {tags.ROUTED: 1, tags.SESSION: session_tag.encode(*session)}
    if xargs or "vllm_xargs" in out:
        out["vllm_xargs"] = xargs
    if cache_salt is not None:
        out["cache_salt"] = cache_salt
    return out


def transferable(body: Mapping[str, Any]) -> bool:
    """Whether the KV of this request can move from P to D.

    P hands out one prompt's blocks to one reader: several prompts or choices would read blocks that are free already.
    Prompt log-probabilities exist only where the prompt is computed.
    """
    prompt = body.get("prompt")
    several_prompts = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    several_choices = any(isinstance(body.get(k), int) and body[k] > 1 for k in ("n", "best_of"))
    prompt_logprobs = body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None)
    return not (several_prompts or several_choices or prompt_logprobs or body.get("use_beam_search"))


def prefill_body(forward: Mapping[str, Any], endpoint: Endpoint, *, return_token_ids: bool) -> Json:
    """The P leg of a call: the same prompt, one token that is thrown away, and the KV handed out."""
    out = {key: value for key, value in forward.items() if key not in _NOT_FOR_PREFILL}
    out.update(stream=False, max_tokens=1, n=1, ignore_eos=True, kv_transfer_params=dict(_EXPORT_PARAMS))
    if endpoint is Endpoint.CHAT and forward.get("max_completion_tokens") is not None:
        out["max_completion_tokens"] = 1
    out["return_token_ids"] = return_token_ids
    return out


def decode_body(forward: Mapping[str, Any], transfer: Mapping[str, Any] | None) -> Json:
    """The D leg of a call: the caller's request, the KV to pull, and usage always asked for."""
    out = dict(forward)
    if transfer is not None:
        out["kv_transfer_params"] = handed_over(transfer)
    if out.get("stream"):
        options = out.get("stream_options")
        out["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return out


def colocated_body(forward: Mapping[str, Any], *, return_token_ids: bool) -> Json:
    """The one leg of a call on a colocated instance: like a D leg without transfer, with token ids if asked."""
    out = decode_body(forward, None)
    if return_token_ids:
        out["return_token_ids"] = True
    return out


def tells_token_ids(body: Mapping[str, Any]) -> bool:
    """Whether the answer can carry token ids and say the same as without: one prompt, one choice, nothing echoed."""
    return transferable(body) and not body.get("echo")


def without_token_ids(payload: Json) -> Json:
    """The same payload, its token ids empty as in an answer to a caller who asked for none."""
    out = {**payload, "prompt_token_ids": None} if payload.get("prompt_token_ids") is not None else payload
    choices = out.get("choices")
    if not isinstance(choices, list) or not any(_has_token_ids(choice) for choice in choices):
        return out
    emptied = [
        {key: None if key in _TOKEN_IDS else value for key, value in choice.items()}
        if _has_token_ids(choice)
        else choice
        for choice in choices
    ]
    return {**out, "choices": emptied}


def _has_token_ids(choice: Any) -> bool:
    return isinstance(choice, dict) and any(choice.get(key) is not None for key in _TOKEN_IDS)


def handed_over(transfer: Mapping[str, Any]) -> Json:
    """P's transfer parameters as D gets them."""
    return {key: value for key, value in transfer.items() if key not in (_PREFILL_CACHED, tags.RESULT)}


def transfer_params(payload: Any) -> Json | None:
    """The transfer parameters in P's answer; None if they lead nowhere."""
    params = payload.get("kv_transfer_params") if isinstance(payload, dict) else None
    if not isinstance(params, dict) or not params.get("do_remote_prefill") or not params.get("remote_engine_id"):
        return None
    return params


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether the caller of a stream asked for a usage chunk."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def prompt_token_ids(payload: Any) -> list[int] | None:
    """The prompt's token ids in a response to return_token_ids; chat and completions put them in different places."""
    if not isinstance(payload, dict):
        return None
    choices = payload.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    ids = payload.get("prompt_token_ids") or first.get("prompt_token_ids")
    return ids if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None


def usage_count(payload: Any, field: str) -> int:
    """A count from a response's usage; 0 if it has none."""
    usage = payload.get("usage") if isinstance(payload, dict) else None
    value = usage.get(field) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else 0


def cached_tokens(payload: Any) -> int | None:
    """Cached prompt tokens from a response's usage; None if the engine does not say."""
    usage = payload.get("usage") if isinstance(payload, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if isinstance(value, int) else None


def with_cached_tokens(payload: Json, cached: int) -> Json:
    """The same payload, its usage reporting P's cached tokens: D's own count holds everything that was handed off."""
    usage = payload["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return {**payload, "usage": {**usage, "prompt_tokens_details": {**details, "cached_tokens": cached}}}


def handoff(d_cached: int | None, prompt_tokens: int, block_size: int) -> common_pb2.Handoff.ValueType:
    """Whether D really received the prompt's KV, judged by D's own counters; UNSPECIFIED if D does not say.

    D computes at least the last token itself, and counts whole blocks.
    """
    if d_cached is None:
        return common_pb2.HANDOFF_UNSPECIFIED
    received = d_cached >= prompt_tokens - block_size
    return common_pb2.HANDOFF_HANDED_OFF if received else common_pb2.HANDOFF_RECOMPUTED


def shadow_body(
    model: str,
    token_ids: Sequence[int],
    priority: int,
    cache_salt: str | None,
    xargs: Mapping[str, str | float],
    transfer: Mapping[str, Any] | None = None,
) -> Json:
    """A shadow leg: the prefix as token ids, one token that is thrown away, behind all normal work.

    `xargs` tag it for engines with the plugin, which generate no token; a stock engine does not look at them.
    """
    body: Json = {
        "vllm_xargs": dict(xargs),
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
        "stream": False,
    }
    if priority:
        body["priority"] = priority
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if transfer is not None:
        body["kv_transfer_params"] = dict(transfer)
    return body


def shadow_xargs(kind: common_pb2.LegKind.ValueType, session: tuple[str, str], probability: float) -> Json:
    """Tags of a shadow leg for a session (tenant, session id) that comes to this model next with `probability`."""
    leg = {
        common_pb2.LEG_KIND_PREFILL: tags.LegKind.PREFILL,
        common_pb2.LEG_KIND_EXPORT: tags.LegKind.EXPORT,
        common_pb2.LEG_KIND_FETCH: tags.LegKind.FETCH,
    }[kind]
    return {tags.LEG: leg.value, tags.SESSION: session_tag.encode(*session), tags.PROBABILITY: probability}


class ShadowResult(NamedTuple):
    """An engine with the plugin on a leg: tokens it holds now, tokens it computed for the leg, and why it ended."""

    covered_tokens: int
    computed_tokens: int
    end: common_pb2.LegEnd.ValueType


def shadow_result(payload: Any) -> ShadowResult | None:
    """The plugin's word in a leg's answer; None from a stock engine, which covers all it was asked."""
    params = payload.get("kv_transfer_params") if isinstance(payload, dict) else None
    result = params.get(tags.RESULT) if isinstance(params, dict) else None
    if not isinstance(result, dict):
        return None
    covered, computed, end = (result.get(key) for key in ("covered_tokens", "computed_tokens", "end"))
    if not isinstance(covered, int) or not isinstance(computed, int) or covered < 0 or computed < 0:
        return None
    # A newer plugin may know more ends.
    known = dict(common_pb2.LegEnd.items()).get(f"LEG_END_{str(end).upper()}", common_pb2.LEG_END_UNSPECIFIED)
    return ShadowResult(covered, computed, known)


def export_params() -> Json:
    """Parameters that make P hand out the KV of a request."""
    return dict(_EXPORT_PARAMS)
