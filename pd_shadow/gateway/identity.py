"""Who a call belongs to: tenant, session, task, request id, and the cache salt that keeps tenants apart."""

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pd_shadow.api.v1 import common_pb2
from pd_shadow.common.tokens import bearer
from pd_shadow.engine import session_tag
from pd_shadow.gateway.api_keys import ApiKeys
from pd_shadow.gateway.openai_errors import ApiError

MAX_ID_CHARS = 256
MAX_TASK_CHARS = 64
# Salts the gateway makes start with this; a caller's salt that does too is hashed like a tenant's, so nobody can
# write another tenant's salt by hand.
SALT_PREFIX = "pds-"


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """The identity of one call; `session_id` is empty when the caller named none."""

    tenant: str
    session_id: str
    task: str
    request_id: str
    cache_salt: str | None

    @property
    def session(self) -> common_pb2.SessionKey | None:
        """The session key, or None for a call without a session."""
        if not self.session_id:
            return None
        return common_pb2.SessionKey(tenant=self.tenant, session_id=self.session_id)


def authenticate(headers: Mapping[str, str], keys: ApiKeys | None) -> str:
    """The tenant a request belongs to: its key's; without keys, whichever it names in X-Tenant-ID.

    Raises ApiError: 401 without a valid key, 403 for a key and another tenant's name, 400 for a malformed name.
    """
    named = headers.get("X-Tenant-ID", "")
    if named:
        _check(named, "header X-Tenant-ID", session_tag.MAX_TENANT_CHARS)
    if keys is None:
        return named
    key = bearer(headers.get("Authorization"))
    tenant = None if key is None else keys.tenant(key)
    if tenant is None:
        said = "Missing API key" if key is None else "Incorrect API key"
        raise ApiError(401, f"{said}; expected header 'Authorization: Bearer KEY'.", code="invalid_api_key")
    if named not in ("", tenant):
        raise ApiError(403, "Header X-Tenant-ID names another tenant than the API key's.", code="wrong_tenant")
    return tenant


def identify(headers: Mapping[str, str], body: Mapping[str, Any], tenant: str) -> CallIdentity:
    """Read a call's identity; raises ApiError (400) that names the place and the rule."""
    return CallIdentity(
        tenant=tenant,
        session_id=_value(headers, "X-Session-ID", body, "session_id", MAX_ID_CHARS),
        task=_value(headers, "X-Task", body, "task", MAX_TASK_CHARS),
        request_id=_request_id(headers.get("X-Request-Id", "")),
        cache_salt=cache_salt(tenant, body.get("cache_salt")),
    )


def cache_salt(tenant: str, given: Any) -> str | None:
    """The salt engines see. Hashed for tenants: engines take 128 characters at most and refuse some characters."""
    if given is not None and not isinstance(given, str):
        raise ApiError(400, "Body field cache_salt must be a string.", param="cache_salt", code="invalid_cache_salt")
    if not tenant and not (given or "").startswith(SALT_PREFIX):
        return given
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}:{given or ''}".encode())
    return SALT_PREFIX + digest.hexdigest()


def _value(headers: Mapping[str, str], header: str, body: Mapping[str, Any], field: str, most: int) -> str:
    if header in headers:
        return _check(headers[header], f"header {header}", most)
    if body.get(field) is None:
        return ""
    return _check(body[field], f"body field {field}", most, param=field)


def _check(value: Any, place: str, most: int, param: str | None = None) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
        raise ApiError(
            400,
            f"Invalid {place}: expected a string of 1 to {most} printable characters without control characters.",
            code="invalid_identity",
            param=param,
        )
    return value


def _request_id(given: str) -> str:
    sane = 1 <= len(given) <= 128 and given.isascii() and given.isprintable() and " " not in given
    return given if sane else uuid.uuid4().hex
