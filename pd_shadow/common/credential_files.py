"""Certificates, keys and tokens in files: read at start, and again when the files change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pd_shadow.common.config import ConfigError

MAX_BYTES = 4 * 1024 * 1024
"""Longest credential file; a bundle of all public authorities is a twentieth of it."""
_ATTEMPTS = 3

T = TypeVar("T")


class CredentialError(ConfigError):
    """A credential file cannot be used; the message names field, path and reason, and nothing of the content."""

    def __init__(self, field: str, path: Path, why: str) -> None:
        super().__init__(f"{field}: {path}: {why}")
        self.field = field


OnStale = Callable[[CredentialError], None]
"""Told once when changed files cannot be used, so that the older content goes on; may run in any thread."""


class CredentialFile(NamedTuple):
    """One file, and the configuration field that names it."""

    field: str
    path: Path

    def read(self) -> bytes:
        """The content; raises CredentialError."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise self.error(os.strerror(error.errno or 0)) from error
        if len(content) > MAX_BYTES:
            raise self.error(f"is longer than {MAX_BYTES} bytes")
        return content

    def error(self, why: str) -> CredentialError:
        return CredentialError(self.field, self.path, why)


_Stamp = tuple[tuple[int, int, int, int] | None, ...]


class Watched(Generic[T]):
    """What `read` makes of some files. A look at them is one stat each, so every handshake and call can afford it.

    The first reading raises CredentialError. Later ones do not: what was read last stays in use, also when the files
    are gone, because one that replaces several files is seen between the first and the last.
    """

    def __init__(self, files: Sequence[CredentialFile], read: Callable[[], T], on_stale: OnStale) -> None:
        self._files = tuple(files)
        self._read = read
        self._on_stale = on_stale
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._value = self._consistent()

    def current(self) -> T:
        """The latest content that could be used; the same object for as long as the files stay as they are."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                try:
                    self._value = self._consistent()
                except CredentialError as error:
                    self._on_stale(error)
            return self._value

    def _consistent(self) -> T:
        """One reading during which no file changed."""
        for _ in range(_ATTEMPTS):
            before = self._stamp()
            value = self._read()
            if self._stamp() == before:
                self._seen = before
                return value
        raise self._files[0].error("changes faster than it can be read")

    def _stamp(self) -> _Stamp:
        return tuple(_stamp(file.path) for file in self._files)


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    """What changes when a file is written or replaced, symbolic links on the way included; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
