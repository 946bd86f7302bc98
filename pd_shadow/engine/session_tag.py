"""How a session is named inside requests and engines: tenant and session id in one string of plain ASCII."""

from typing import NamedTuple
from urllib.parse import quote, unquote

MAX_TENANT_CHARS = 128
MAX_SESSION_CHARS = 256
"""Longest tenant name and session id that the API takes."""


class SessionName(NamedTuple):
    """An agent's conversation, as in the API's SessionKey; the default tenant is empty."""

    tenant: str
    session_id: str


def encode(tenant: str, session_id: str) -> str:
    """The tag of a session: both parts percent-encoded, a slash between them.

    Equal sessions have equal tags and others have others. Raises ValueError for what the API takes for no session.
    """
    _check("tenant", tenant, 0, MAX_TENANT_CHARS)
    _check("session id", session_id, 1, MAX_SESSION_CHARS)
    return f"{quote(tenant, safe='')}/{quote(session_id, safe='')}"


def decode(tag: str) -> SessionName:
    """The session of a tag; raises ValueError for a string that `encode` does not make."""
    tenant, slash, session_id = tag.partition("/")
    try:
        name = SessionName(unquote(tenant, errors="strict"), unquote(session_id, errors="strict"))
        made = bool(slash) and encode(*name) == tag
    except UnicodeDecodeError:
        made = False
    if not made:
        raise ValueError("not a session tag; expected a percent-encoded TENANT/SESSION")
    return name


def _check(what: str, value: str, least: int, most: int) -> None:
    if not least <= len(value) <= most or not value.isprintable():
        raise ValueError(f"{what}: expected {least} to {most} printable characters")
