"""Bodies of engine requests, and what engine answers say."""

from typing import Any

import pytest

from pd_shadow.api.v1 import common_pb2
from pd_shadow.gateway import legs
from pd_shadow.gateway.legs import Endpoint
from pd_shadow.gateway.rendering import NotRenderableError, tokenize_body
from pd_shadow.gateway.sse import Output, SseSplitter

DROPPED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_tokens": 5,
    "stop": ["x"],
    "stop_token_ids": [1],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"1": 2},
    "structured_outputs": {"regex": "a"},
    "repetition_detection": {},
}
KEPT: dict[str, Any] = {
    "messages": [],
    "tools": [{}],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"a": 1},
    "temperature": 0.5,
    "seed": 3,
    "cache_salt": "s",
    "vllm_xargs": {"a": 1},
    "unknown_field": [1],
}


def test_the_prefill_leg_keeps_the_prompt_and_drops_what_could_end_it_early() -> None:
    body = legs.prefill_body({**DROPPED, **KEPT, "max_tokens": 900}, Endpoint.CHAT, return_token_ids=True)
    for field, value in KEPT.items():
        assert body.pop(field) == value
    assert body.pop("kv_transfer_params") == legs.export_params()
    assert body == {"stream": False, "max_tokens": 1, "n": 1, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize(
    ("endpoint", "given", "expected"),
    [
        (Endpoint.CHAT, {"max_completion_tokens": 77}, 1),
        (Endpoint.CHAT, {"max_tokens": 77}, None),
        (Endpoint.COMPLETIONS, {"max_completion_tokens": 77}, None),
    ],
)
def test_max_completion_tokens_only_where_given(endpoint: Endpoint, given: dict[str, Any], expected: Any) -> None:
    assert legs.prefill_body(given, endpoint, return_token_ids=False).get("max_completion_tokens") == expected


def test_the_decode_leg_is_the_callers_request() -> None:
    given = {**DROPPED, **KEPT, "max_tokens": 900}
    assert legs.decode_body(given, None) == given
    transfer = {"remote_host": "h", "remote_prefill_cached_tokens": 9}
    body = legs.decode_body({"stream": True, "stream_options": {"continuous_usage_stats": True}}, transfer)
    assert body == {
        "stream": True,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
        "kv_transfer_params": {"remote_host": "h"},
    }
    assert "stream_options" not in legs.decode_body({"stream": False}, None)


def test_forwarding_strips_what_callers_may_not_say() -> None:
    body = {
        "model": "a",
        "task": "t",
        "priority": -1,
        "kv_transfer_params": {},
        "ec_transfer_params": {},
        "session_id": "s",
    }
    xargs = {"kv_transfer_params": 1, "pd_shadow_leg": "export", "pd_shadow_routed": 0, "x": 2}
    kept = {"model": "a", "session_id": "s", "cache_salt": "salt"}
    assert legs.forwarded({**body, "vllm_xargs": xargs}, "salt", None) == {**kept, "vllm_xargs": {"x": 2}}
    assert legs.forwarded(body, "salt", None) == kept
    routed = {"pd_shadow_routed": 1, "pd_shadow_session": "acme/a%2Fb"}
    assert legs.forwarded({**body, "vllm_xargs": xargs}, "salt", ("acme", "a/b")) == {
        **kept,
        "vllm_xargs": {"x": 2, **routed},
    }


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"covered_tokens": 256, "computed_tokens": 128, "end": "no_room"}, (256, 128, common_pb2.LEG_END_NO_ROOM)),
        ({"covered_tokens": 256, "computed_tokens": 0, "end": 3}, (256, 0, common_pb2.LEG_END_UNSPECIFIED)),
        ({"covered_tokens": 256, "computed_tokens": 0, "end": "new"}, (256, 0, common_pb2.LEG_END_UNSPECIFIED)),
        ({"covered_tokens": -1, "computed_tokens": 0, "end": "done"}, None),
        ({"covered_tokens": 256, "end": "done"}, None),
        ([], None),
        (None, None),
    ],
)
def test_what_an_engine_with_the_plugin_says_of_a_leg(result: Any, expected: tuple[int, int, int] | None) -> None:
    assert legs.shadow_result({"kv_transfer_params": {"pd_shadow": result}}) == expected


def test_a_stock_engine_says_nothing_of_a_leg() -> None:
    assert legs.shadow_result({"kv_transfer_params": None}) is legs.shadow_result([]) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": []}, True),
        ({"prompt": "x", "n": 1, "logprobs": 3}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["x"]}, True),
        ({"prompt": ["x", "y"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"n": 2}, False),
        ({"best_of": 2}, False),
        ({"use_beam_search": True}, False),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True, "logprobs": 1}, False),
    ],
)
def test_transferable(body: dict[str, Any], expected: bool) -> None:
    assert legs.transferable(body) is expected


@pytest.mark.parametrize(
    ("cached", "prompt", "expected"),
    [
        (None, 100, common_pb2.HANDOFF_UNSPECIFIED),
        (99, 100, common_pb2.HANDOFF_HANDED_OFF),
        (84, 100, common_pb2.HANDOFF_HANDED_OFF),
        (83, 100, common_pb2.HANDOFF_RECOMPUTED),
        (0, 100, common_pb2.HANDOFF_RECOMPUTED),
        (0, 16, common_pb2.HANDOFF_HANDED_OFF),
    ],
)
def test_handoff_is_judged_by_ds_own_count(cached: int | None, prompt: int, expected: int) -> None:
    assert legs.handoff(cached, prompt, 16) == expected


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": []},
    ],
)
def test_params_that_lead_nowhere(payload: Any) -> None:
    assert legs.transfer_params(payload) is None


def test_prompt_token_ids_of_both_endpoints() -> None:
    assert legs.prompt_token_ids({"prompt_token_ids": [1], "choices": []}) == [1]
    assert legs.prompt_token_ids({"choices": [{"prompt_token_ids": [2]}]}) == [2]
    for payload in (None, {}, {"choices": [None]}, {"prompt_token_ids": ["x"]}):
        assert legs.prompt_token_ids(payload) is None


def test_events_cut_anywhere_are_the_same() -> None:
    stream = b'data: {"a":1}\n\n: comment\n\ndata: x\ndata: y\n\nevent: e\r\ndata:z\r\n\r\ndata: [DONE]\n\n'
    expected = [b'{"a":1}', b"x\ny", b"z", b"[DONE]"]
    for size in range(1, len(stream) + 1):
        splitter = SseSplitter()
        got = [e for i in range(0, len(stream), size) for e in splitter.feed(stream[i : i + size])]
        assert got == expected


def test_output_adds_up_tool_calls() -> None:
    output = Output()
    pieces: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "Let me "},
        {"reasoning": "hmm"},
        {"content": "see"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "ls", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "cat", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    for delta in pieces:
        output.add_chunk({"choices": [{"index": 0, "delta": delta}]})
    assert output.message() == {
        "role": "assistant",
        "content": "Let me see",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}},
            {"id": "c2", "type": "function", "function": {"name": "cat", "arguments": "{}"}},
        ],
    }
    whole = Output()
    whole.add_response(
        {"choices": [{"index": 0, "message": output.message()}, {"index": 1, "message": {"content": "no"}}]}
    )
    assert whole.message() == output.message()


def said(text: str) -> Output:
    output = Output()
    output.add_response({"choices": [{"index": 0, "message": {"content": text}, "text": text}]})
    return output


def test_tokenize_bodies() -> None:
    user = {"role": "user", "content": "q"}
    assert tokenize_body("b", {"messages": [user]}, None, partial=False) == {
        "model": "b",
        "messages": [user],
        "add_generation_prompt": False,
    }
    partial = tokenize_body("b", {"messages": [user]}, said("ans"), partial=True)
    assert partial["messages"] == [user, {"role": "assistant", "content": "ans"}]
    assert partial["continue_final_message"] is True
    begun = {"role": "assistant", "content": "I say "}
    continued = {"messages": [user, begun], "continue_final_message": True}
    assert tokenize_body("b", continued, said("ans"), partial=False)["messages"][-1]["content"] == "I say ans"
    assert tokenize_body("b", {"prompt": "p"}, said("ans"), partial=False)["prompt"] == "pans"
    assert tokenize_body("b", {"prompt": ["p"]}, None, partial=False)["prompt"] == "p"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": [1, 2]},
        {"prompt": ["a", "b"]},
        {"messages": "x"},
        {"messages": [3]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [], "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}], "continue_final_message": True},
    ],
)
def test_not_renderable(body: dict[str, Any]) -> None:
    with pytest.raises(NotRenderableError):
        tokenize_body("b", body, said("x"), partial=False)
