"""Bearer tokens in files, one a line, so that a new one can be valid before the old one ends; or in a variable."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pd_shadow.common.config import ConfigError
from pd_shadow.common.credential_files import CredentialFile, OnStale, Watched

MAX_LINES = 10_000
# What HTTP headers and gRPC metadata carry unchanged.
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")
_RULE = "a token is 1 to 512 printable ASCII characters without blanks"


def token_lines(file: CredentialFile) -> Iterator[tuple[int, str]]:
    """Numbered lines but empty ones and '#' comments, blanks around them cut; raises CredentialError."""
    try:
        lines = file.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise file.error("is not UTF-8 text") from error
    if len(lines) > MAX_LINES:
        raise file.error(f"has {len(lines)} lines; at most {MAX_LINES} are allowed")
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def checked(file: CredentialFile, number: int, token: str) -> str:
    """The token of a line; raises CredentialError, which never repeats it."""
    if not _TOKEN.fullmatch(token):
        raise file.error(f"line {number}: {_RULE}")
    return token


def fingerprint(token: str) -> bytes:
    """What is kept and compared instead of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def bearer(header: str | None) -> str | None:
    """The token of an Authorization header; None if there is none."""
    scheme, _, token = (header or "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


class AcceptedTokens:
    """The tokens a server takes; the file is read again when it changes. Raises CredentialError at first."""

    def __init__(self, path: Path, *, field: str, on_stale: OnStale) -> None:
        file = CredentialFile(field, path)
        self._watched = Watched([file], lambda: tuple(fingerprint(token) for token in _tokens(file)), on_stale)

    def accept(self, token: str) -> bool:
        """Whether the token is one of them; takes the same time for every token."""
        given = fingerprint(token)
        found = False
        for known in self._watched.current():
            found |= hmac.compare_digest(known, given)
        return found


class OwnToken:
    """The token a client shows, the first of its file; read again when the file changes."""

    def __init__(self, path: Path, *, field: str, on_stale: OnStale) -> None:
        file = CredentialFile(field, path)
        self._watched = Watched([file], lambda: _tokens(file)[0], on_stale)

    def current(self) -> str:
        return self._watched.current()


class EnvironmentToken:
    """The token a client shows, from an environment variable of this moment; raises ConfigError without its content."""

    def __init__(self, variable: str, *, field: str, environ: Mapping[str, str] = os.environ) -> None:
        self._token = environ.get(variable, "").strip()
        if not self._token:
            raise ConfigError(f"{field}: ${variable} holds no token; set it to one")
        if not _TOKEN.fullmatch(self._token):
            raise ConfigError(f"{field}: ${variable}: {_RULE}")

    def current(self) -> str:
        return self._token


def _tokens(file: CredentialFile) -> list[str]:
    tokens = [checked(file, number, line) for number, line in token_lines(file)]
    if not tokens:
        raise file.error("holds no token; write one a line")
    return tokens
