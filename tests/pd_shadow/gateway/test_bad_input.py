"""Every mistake gets an OpenAI-shaped error that names it."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from .rig import Refusal, Rig, reason, running

CHAT = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}


def check(payload: Any, **expected: Any) -> str:
    """The error's message, after checking its shape."""
    assert set(payload) == {"error"}
    error = payload["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for field, value in expected.items():
        assert error[field] == value
    message = error["message"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff"])
async def test_not_a_json_object(rig: Rig, path: str, body: bytes) -> None:
    status, payload, _ = await rig.post(path, body)
    assert status == 400
    check(payload, type="invalid_request_error", code="invalid_json")


@pytest.mark.parametrize("model", [None, "", 7])
async def test_missing_model_names_the_known_ones(rig: Rig, model: Any) -> None:
    status, payload, _ = await rig.post("/v1/chat/completions", {**CHAT, "model": model})
    assert status == 400
    assert "a, b" in check(payload, code="missing_model", param="model")


async def test_unknown_model(rig: Rig) -> None:
    rig.controller.refusal = Refusal(grpc.StatusCode.NOT_FOUND, "?", [reason("REJECTION_REASON_UNKNOWN_MODEL")])
    status, payload, _ = await rig.chat(model="zzz")
    assert status == 404
    message = check(payload, code="model_not_found", param="model")
    assert "'zzz'" in message
    assert "a, b" in message
    assert rig.metric("requests_total", model="unknown", endpoint="chat", outcome="rejected") == 1


async def test_body_too_large() -> None:
    async with running({"caps": {"body_bytes": 100}}) as rig:
        status, payload, _ = await rig.chat("x" * 200)
        assert status == 413
        assert "100 bytes" in check(payload, code="body_too_large")


@pytest.mark.parametrize("value", ["", "x" * 5_000, "a\x00b", "line\nbreak", "del\x7f", 12, ["s"]])
async def test_bad_session_in_the_body(rig: Rig, value: Any) -> None:
    status, payload, _ = await rig.post("/v1/chat/completions", {**CHAT, "session_id": value})
    assert status == 400
    message = check(payload, code="invalid_identity", param="session_id")
    assert "body field session_id" in message
    assert "1 to 256 printable" in message
    assert rig.controller.begun == []


@pytest.mark.parametrize("header", ["X_Session_ID", "X_Tenant_ID", "X_Task"])
@pytest.mark.parametrize("value", ["x" * 5_000, "tab\tinside"])
async def test_bad_identity_headers(rig: Rig, header: str, value: str) -> None:
    status, payload, _ = await rig.post("/v1/chat/completions", CHAT, **{header: value})
    assert status == 400
    assert f"header {header.replace('_', '-')}" in check(payload, code="invalid_identity")


async def test_empty_session_header_does_not_fall_through_to_the_body(rig: Rig) -> None:
    status, payload, _ = await rig.post("/v1/chat/completions", {**CHAT, "session_id": "fine"}, X_Session_ID="")
    assert status == 400
    check(payload, code="invalid_identity")


async def test_the_longest_ids_are_taken(rig: Rig) -> None:
    status, _, _ = await rig.post("/v1/chat/completions", {**CHAT, "session_id": "ü" * 256, "task": "t" * 64})
    assert status == 200
    assert rig.controller.begun[0].session.session_id == "ü" * 256


async def test_bad_task_and_salt(rig: Rig) -> None:
    status, payload, _ = await rig.chat(task="t" * 65)
    assert status == 400
    assert "1 to 64" in check(payload, param="task")
    status, payload, _ = await rig.chat(cache_salt=5)
    assert status == 400
    check(payload, param="cache_salt")


async def test_no_ready_instance(rig: Rig) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=7))
    rig.controller.refusal = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "?", [reason("NO_READY_INSTANCE"), retry])
    status, payload, headers = await rig.chat()
    assert status == 503
    assert headers["Retry-After"] == "7"
    check(payload, type="server_error", code="no_ready_instance")


async def test_controller_refusals_keep_their_details(rig: Rig) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="task", description="too long")
    rig.controller.refusal = Refusal(
        grpc.StatusCode.INVALID_ARGUMENT,
        "bad",
        [reason("INVALID_FIELD"), error_details_pb2.BadRequest(field_violations=[violation])],
    )
    status, payload, _ = await rig.chat()
    assert status == 400
    assert check(payload, code="invalid_field", param="task") == "task: too long"
    rig.controller.refusal = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [reason("TOO_MANY_CALLS")])
    status, payload, headers = await rig.chat()
    assert (status, headers["Retry-After"]) == (429, "1")
    check(payload, type="rate_limit_error", code="too_many_calls")
    rig.controller.refusal = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "9000 > 8192", [reason("PROMPT_TOO_LONG")])
    status, payload, _ = await rig.chat()
    assert status == 400
    check(payload, code="context_length_exceeded", message="9000 > 8192")


async def test_too_many_calls_in_flight() -> None:
    async with running({"caps": {"in_flight_calls": 1}}) as rig:
        rig.ap.go.clear()
        first = asyncio.create_task(rig.chat())
        await rig.ap.until(lambda: bool(rig.ap.seen))
        status, payload, headers = await rig.chat()
        assert (status, headers["Retry-After"]) == (429, "1")
        check(payload, code="too_many_calls")
        rig.ap.go.set()
        assert (await first)[0] == 200


async def test_unknown_routes_and_methods(rig: Rig) -> None:
    status, payload, _ = await rig.post("/v1/nothing", {})
    assert status == 404
    check(payload)
    status, payload = await rig.get("/v1/chat/completions")
    assert status == 405
    check(payload)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "a"},
        {"model": "a", "messages": "no"},
        {"model": "a", "messages": [1, None]},
        {"model": "a", "prompt": None},
        {"model": "a", "prompt": [[], "x", {}]},
        {"model": "a", "messages": [], "tools": 3, "stream_options": 1, "vllm_xargs": [], "n": "x"},
        b'{"model": "a", "messages": [{"role": "user", "content": 99999999999999999999999}]}',
        b'{"model": "a", "messages": [{"role": "user", "content": "\\ud800"}]}',
        {"model": "a", "continue_final_message": True, "messages": []},
    ],
)
async def test_odd_bodies_are_left_to_the_engine(rig: Rig, body: Any) -> None:
    mistake = (400, {"error": {"message": "engine says no", "type": "BadRequestError", "param": None, "code": 400}})
    rig.ap.script = rig.ad.script = lambda seen: mistake
    rig.controller.targets = [rig.target("b")]
    status, payload, _ = await rig.post("/v1/chat/completions", body, X_Session_ID="s")
    assert status == 400
    assert "engine says no" in check(payload) or "JSON" in check(payload)
