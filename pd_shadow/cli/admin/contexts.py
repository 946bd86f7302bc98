"""Which controllers an operator talks to, and how: a small YAML file like kubectl's.

Secrets never enter it: a token is named by its file or its environment variable, a key by its path.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from pd_shadow.common.address import Address, is_loopback
from pd_shadow.common.config import Config, ConfigError, load, parse

DEFAULT_ADDRESS = "127.0.0.1:7070"
FILE_VARIABLE = "PD_SHADOW_CONTEXTS"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class Context(Config):
    """One controller."""

    address: Address = DEFAULT_ADDRESS
    """The controller's gRPC address."""
    ca: Path | None = None
    """PEM file with the authority that signed the controller's certificate; unset for a connection without TLS."""
    cert: Path | None = None
    """PEM file with this operator's own certificate, for mTLS."""
    key: Path | None = None
    """PEM file with the key of `cert`."""
    server_name: str | None = Field(default=None, min_length=1)
    """The name expected in the controller's certificate; unset: the host of `address`. For port-forwards."""
    token_file: Path | None = None
    """File with the bearer token, its first one."""
    token_env: str | None = Field(default=None, min_length=1)
    """Environment variable with the bearer token."""

    @model_validator(mode="after")
    def _goes_together(self) -> Context:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key: set both or none")
        if self.cert is not None and self.ca is None:
            raise ValueError("cert: needs ca, since without TLS nobody asks for it")
        if self.server_name is not None and self.ca is None:
            raise ValueError("server_name: needs ca, since without TLS there is no certificate")
        if self.token_file is not None and self.token_env is not None:
            raise ValueError("token_file and token_env: set one of them")
        has_token = self.token_file is not None or self.token_env is not None
        if has_token and self.ca is None and not is_loopback(self.address):
            raise ValueError("ca: a token goes over TLS only, except to this machine itself")
        return self


class Contexts(Config):
    """The whole file."""

    current: str | None = None
    """The context that is used where --context names no other."""
    contexts: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Context] = Field(default_factory=dict)
    """Controllers by name."""

    @model_validator(mode="after")
    def _current_is_there(self) -> Contexts:
        if self.current is not None and self.current not in self.contexts:
            raise ValueError(f"current: there is no context {self.current!r}")
        return self

    def chosen(self, name: str | None) -> Context:
        """The context of that name, else the current one, else the default. Raises ConfigError."""
        wanted = name or self.current
        if wanted is None:
            return Context()
        return self.contexts[self.checked(wanted)]

    def checked(self, name: str) -> str:
        """The name itself; raises ConfigError, with the names there are, if there is no such context."""
        if name not in self.contexts:
            raise ConfigError(f"no context {name!r}; there are: {', '.join(sorted(self.contexts)) or 'none'}")
        return name

    def with_context(self, name: str, changes: Mapping[str, Any]) -> Contexts:
        """With a context made or changed; the first one made is current. Raises ConfigError."""
        known = self.contexts.get(name)
        before = known.model_dump(exclude_unset=True) if known else {}
        after = {**before, **{key: value for key, value in changes.items() if value is not None}}
        contexts = {**self._given(), name: parse(Context, after, f"context {name}").model_dump(exclude_unset=True)}
        return parse(Contexts, {"current": self.current or name, "contexts": contexts}, "contexts")

    def without(self, name: str) -> Contexts:
        """With a context deleted; raises ConfigError if there is none."""
        self.checked(name)
        contexts = {other: context for other, context in self._given().items() if other != name}
        return parse(Contexts, {"current": None if self.current == name else self.current, "contexts": contexts})

    def using(self, name: str) -> Contexts:
        """With another current context; raises ConfigError if there is none of that name."""
        return self.model_copy(update={"current": self.checked(name)})

    def _given(self) -> dict[str, Any]:
        return {name: context.model_dump(exclude_unset=True) for name, context in self.contexts.items()}


def at(address: str, context: Context) -> Context:
    """The context with another address; raises ConfigError."""
    return parse(Context, {**context.model_dump(exclude_unset=True), "address": address}, "context")


def path() -> Path:
    """Where the file is: $PD_SHADOW_CONTEXTS, or pd-shadow/contexts.yaml in the user's configuration folder."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "pd-shadow" / "contexts.yaml"


def read() -> Contexts:
    """The file's contexts, none where there is no file. Raises ConfigError."""
    file = path()
    return load(Contexts, file) if file.exists() else Contexts()


def write(contexts: Contexts) -> Path:
    """Replace the file, readable by its owner only; raises ConfigError where it cannot be written."""
    file = path()
    text = yaml.safe_dump(contexts.model_dump(mode="json", exclude_unset=True, exclude_none=True), sort_keys=True)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made with mode 0600, and whole or not at all.
        number, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(number, "w") as out:
                out.write(text)
            os.replace(scratch, file)
        except OSError:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise ConfigError(f"{file}: {os.strerror(error.errno or 0)}") from error
    return file
