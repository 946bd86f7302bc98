"""Why a request is refused, as an exception that the servers translate to a gRPC status with details."""

from __future__ import annotations

from collections.abc import Iterable

from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.suggestion import nearest


class RejectedError(Exception):
    """The request cannot be granted; `field` names the offending request field, if one does."""

    def __init__(self, reason: pb.RejectionReason.ValueType, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field


def invalid_field(field: str, message: str) -> RejectedError:
    """A request field that is missing, malformed or out of bounds."""
    return RejectedError(pb.REJECTION_REASON_INVALID_FIELD, f"{field}: {message}", field=field)


def unknown(
    reason: pb.RejectionReason.ValueType, what: str, name: str, known: Iterable[str], *, field: str
) -> RejectedError:
    """A name that nothing has, with the nearest one that something has."""
    near = nearest(name, known)
    hint = f"; did you mean {near!r}?" if near is not None else f"; no {what} is known"
    return RejectedError(reason, f"no {what} {name!r}{hint}", field=field)
