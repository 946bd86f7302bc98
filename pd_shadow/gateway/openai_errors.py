"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Sequence
from typing import Any

import grpc
import orjson
from google.rpc import error_details_pb2, status_pb2

from pd_shadow.api.v1 import common_pb2
from pd_shadow.common.reasons import label

# Answers an engine gives to a caller's mistake; anything else it answers with is the cluster's trouble.
CLIENT_MISTAKES = frozenset({400, 413, 422})

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}
_DETAILS_KEY = "grpc-status-details-bin"
_CLIENT_STATUSES = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 503,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}


class ApiError(Exception):
    """A refusal or failure the client sees; `status` is the HTTP status, `retry_after` is in whole seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        """Headers that belong to the error."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def unknown_model(model: str, known: Sequence[str]) -> ApiError:
    """404 that names the models there are."""
    message = f"The model {model!r} does not exist; {_known(known)}."
    return ApiError(404, message, code="model_not_found", param="model")


def missing_model(known: Sequence[str]) -> ApiError:
    """400: the request names no model."""
    return ApiError(400, f"model: must name a model; {_known(known)}.", code="missing_model", param="model")


def _known(known: Sequence[str]) -> str:
    return f"known models: {', '.join(known) if known else 'none yet'}"


def no_ready_instance(model: str, retry_after: int = 1) -> ApiError:
    """503: the model is known, but nothing serves it now."""
    return ApiError(
        503, f"No instance of the model {model!r} is ready.", code="no_ready_instance", retry_after=retry_after
    )


def from_controller(error: grpc.aio.AioRpcError, model: str, known: Sequence[str]) -> ApiError | None:
    """What a refusal by the controller means to the client; None if the controller did not really answer."""
    status = _CLIENT_STATUSES.get(error.code())
    if status is None:
        return None
    reason, violations, retry_after = _details(error)
    if status == 404:
        return unknown_model(model, known)
    if reason == common_pb2.REJECTION_REASON_PROMPT_TOO_LONG:
        return ApiError(400, error.details() or "The prompt is too long.", code="context_length_exceeded")
    if status == 503:
        return no_ready_instance(model, retry_after or 1)
    code = label(common_pb2.RejectionReason.DESCRIPTOR, reason) if reason else None
    if status == 429:
        message = error.details() or "Too many calls are in flight."
        return ApiError(429, message, code=code or "too_many_calls", retry_after=retry_after or 1)
    message = "; ".join(f"{v.field}: {v.description}" for v in violations) or error.details() or "Invalid request."
    return ApiError(400, message, code=code or "invalid_field", param=violations[0].field if violations else None)


def from_engine(status: int, payload: Any, role: str) -> ApiError:
    """The error of an engine: the client's own mistakes pass through, everything else is a bad gateway."""
    error = payload.get("error", payload) if isinstance(payload, dict) else {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    message = str(error.get("message") or f"The {role} instance answered with status {status}.")
    if status not in CLIENT_MISTAKES:
        return ApiError(502, f"The {role} instance failed: {message}", code="engine_failed")
    code, param = error.get("code"), error.get("param")
    return ApiError(
        status, message, code=None if code is None else str(code), param=None if param is None else str(param)
    )


def _details(
    error: grpc.aio.AioRpcError,
) -> tuple[int, list[error_details_pb2.BadRequest.FieldViolation], int | None]:
    """(RejectionReason, field violations, seconds to wait) from google.rpc details, as far as they are there."""
    reason, retry_after = 0, None
    violations: list[error_details_pb2.BadRequest.FieldViolation] = []
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != _DETAILS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, bad, retry = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info):
                reason = _reason(info.reason)
            elif detail.Unpack(bad):
                violations = list(bad.field_violations)
            elif detail.Unpack(retry):
                retry_after = max(1, retry.retry_delay.seconds + (retry.retry_delay.nanos > 0))
    return reason, violations, retry_after


def _reason(name: str) -> int:
    """The enum value of a reason, spelled as the enum's name, with or without its prefix, in either case."""
    upper = name.upper()
    known = common_pb2.RejectionReason.DESCRIPTOR.values_by_name
    value = known.get(upper) or known.get(f"REJECTION_REASON_{upper}")
    return value.number if value else 0
