"""Refusals on the wire: a gRPC status with google.rpc details."""

from __future__ import annotations

from typing import NoReturn, Protocol

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from controller.core.rejection import RejectedError
from pd_shadow.api.v1 import common_pb2 as pb

DOMAIN = "pdshadow.v1"
# A message may quote what came in, and gRPC drops a status whose metadata is longer than 8 KiB: percent-encoded once
# and twice in the details, this many bytes fit.
MAX_MESSAGE_BYTES = 1200

_CODES: dict[int, grpc.StatusCode] = {
    pb.REJECTION_REASON_INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    pb.REJECTION_REASON_PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    pb.REJECTION_REASON_UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    pb.REJECTION_REASON_UNKNOWN_CALL: grpc.StatusCode.NOT_FOUND,
    pb.REJECTION_REASON_UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
    pb.REJECTION_REASON_UNKNOWN_INSTANCE: grpc.StatusCode.NOT_FOUND,
    pb.REJECTION_REASON_UNKNOWN_SHADOW_JOB: grpc.StatusCode.NOT_FOUND,
    pb.REJECTION_REASON_ALL_DRAINING: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REJECTION_REASON_INSTANCE_NOT_READY: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REJECTION_REASON_NO_READY_INSTANCE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REJECTION_REASON_STALE_INCARNATION: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REJECTION_REASON_BLOCK_SIZE_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REJECTION_REASON_HASH_ALGORITHM_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REJECTION_REASON_MIXED_ROLES: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REJECTION_REASON_TOO_MANY_CALLS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REJECTION_REASON_TOO_MANY_STREAMS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REJECTION_REASON_SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    pb.REJECTION_REASON_NOT_LEADER: grpc.StatusCode.UNAVAILABLE,
    pb.REJECTION_REASON_TOKEN_MISSING: grpc.StatusCode.UNAUTHENTICATED,
    pb.REJECTION_REASON_TOKEN_UNKNOWN: grpc.StatusCode.UNAUTHENTICATED,
    pb.REJECTION_REASON_TOKEN_SCOPE: grpc.StatusCode.PERMISSION_DENIED,
}
# Seconds after which trying again may help, for the refusals where it may.
_RETRY_SECONDS = {
    pb.REJECTION_REASON_NO_READY_INSTANCE: 1,
    pb.REJECTION_REASON_ALL_DRAINING: 1,
    pb.REJECTION_REASON_TOO_MANY_CALLS: 1,
    pb.REJECTION_REASON_TOO_MANY_STREAMS: 5,
    pb.REJECTION_REASON_SHUTTING_DOWN: 2,
    pb.REJECTION_REASON_NOT_LEADER: 2,
}


class Context(Protocol):
    """The part of grpc.aio.ServicerContext that refusing needs."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
    ) -> NoReturn: ...


def status_of(error: RejectedError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """The status code and the google.rpc.Status with ErrorInfo, BadRequest and RetryInfo as they apply."""
    code = _CODES[error.reason]
    text = error.message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=pb.RejectionReason.Name(error.reason), domain=DOMAIN)
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    retry = _RETRY_SECONDS.get(error.reason)
    if retry is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=retry)))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return code, status_pb2.Status(code=code.value[0], message=text, details=packed)


async def abort(context: Context, error: RejectedError) -> NoReturn:
    """End the RPC with the refusal."""
    code, status = status_of(error)
    await context.abort(code, status.message, (("grpc-status-details-bin", status.SerializeToString()),))
