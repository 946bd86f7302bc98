"""Clients' bearer keys: each names the tenant its calls belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pd_shadow.common.credential_files import CredentialFile, OnStale, Watched
from pd_shadow.common.tokens import checked, fingerprint, token_lines
from pd_shadow.engine import session_tag

FIELD = "api_keys_file"


class ApiKeys:
    """Lines of TENANT:KEY; a tenant may have several keys. The file is read again when it changes.

    Raises CredentialError when it cannot be used at first.
    """

    def __init__(self, path: Path, *, on_stale: OnStale) -> None:
        file = CredentialFile(FIELD, path)
        self._watched = Watched([file], lambda: _read(file), on_stale)

    def tenant(self, key: str) -> str | None:
        """Whose key it is; None for nobody's.

        How long the search takes depends on the key's fingerprint only, which tells nothing about other keys.
        """
        return self._watched.current().get(fingerprint(key))


def _read(file: CredentialFile) -> Mapping[bytes, str]:
    tenants: dict[bytes, str] = {}
    for number, line in token_lines(file):
        tenant, colon, key = line.partition(":")
        most = session_tag.MAX_TENANT_CHARS
        if not colon or not 1 <= len(tenant) <= most or not tenant.isprintable():
            raise file.error(f"line {number}: expected TENANT:KEY with a tenant of 1 to {most} printable characters")
        known = tenants.setdefault(fingerprint(checked(file, number, key)), tenant)
        if known != tenant:
            raise file.error(f"line {number}: this key is {known}'s already; give every tenant keys of its own")
    if not tenants:
        raise file.error("holds no key; write one TENANT:KEY a line")
    return tenants
