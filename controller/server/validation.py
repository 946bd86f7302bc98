"""Checks on what comes in over the wire; each names the field and the rule."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor

from controller.core.rejection import RejectedError, invalid_field
from controller.core.session import Digest, SessionKey
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import placement_pb2 as pb

MAX_NAME = 256
MAX_TENANT = 128
MAX_TASK = 64
MAX_HARDWARE = 128
MAX_URL = 2048
MAX_MESSAGES = 4096
MAX_RESIDENT = 4096
MIN_HASH_BYTES, MAX_HASH_BYTES = 8, 32


def invalid(field: str, message: str) -> RejectedError:
    return invalid_field(field, message)


def name(field: str, value: str, *, limit: int = MAX_NAME, empty: bool = False) -> str:
    """A printable name of at most `limit` characters."""
    if not value and not empty:
        raise invalid(field, "must not be empty")
    if len(value) > limit:
        raise invalid(field, f"is {len(value)} characters long; at most {limit} are allowed")
    if not value.isprintable():
        raise invalid(field, "must consist of printable characters")
    return value


def session_key(field: str, key: common.SessionKey) -> SessionKey:
    return SessionKey(
        name(f"{field}.tenant", key.tenant, limit=MAX_TENANT, empty=True),
        name(f"{field}.session_id", key.session_id),
    )


def digests(request: pb.BeginCallRequest) -> tuple[Digest, ...]:
    """The rolling hashes, with running token counts that never fall."""
    if len(request.messages) > MAX_MESSAGES:
        raise invalid("messages", f"{len(request.messages)} given; at most {MAX_MESSAGES} are allowed")
    found: list[Digest] = []
    for index, message in enumerate(request.messages):
        if not MIN_HASH_BYTES <= len(message.rolling_hash) <= MAX_HASH_BYTES:
            raise invalid(
                f"messages[{index}].rolling_hash",
                f"is {len(message.rolling_hash)} bytes; {MIN_HASH_BYTES} to {MAX_HASH_BYTES} are expected",
            )
        if found and message.running_tokens < found[-1].running_tokens:
            raise invalid(f"messages[{index}].running_tokens", "is smaller than the message before's")
        found.append(Digest(bytes(message.rolling_hash), message.running_tokens))
    return tuple(found)


def enum_value(field: str, descriptor: EnumDescriptor, value: int) -> int:
    """A value that the enum has; 0 for unspecified."""
    if value not in descriptor.values_by_number:
        raise invalid(field, f"{value} is not a value of {descriptor.name}")
    return value
