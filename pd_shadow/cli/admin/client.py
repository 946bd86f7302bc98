"""The connection to a controller's AdminService."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import admin_pb2_grpc
from pd_shadow.cli.admin.contexts import Context
from pd_shadow.common.config import ConfigError
from pd_shadow.common.grpc_options import CLIENT_OPTIONS

# Of one page; the server allows no more.
PAGE = 1000


class AnswerError(Exception):
    """The controller said no, or could not be reached; the message says which and why."""


class Client:
    """Calls RPCs by name, with a deadline, the context's credentials, and errors for people."""

    def __init__(self, context: Context, timeout: float) -> None:
        """Raises ConfigError for a credential that cannot be read."""
        self.address = context.address
        self._timeout = timeout
        self._metadata = _authorization(context)
        credentials = _credentials(context)
        options: tuple[tuple[str, int | str], ...] = CLIENT_OPTIONS
        if context.server_name is not None:
            options += (("grpc.ssl_target_name_override", context.server_name),)
        if credentials is None:
            self._channel = grpc.insecure_channel(context.address, options=options)
        else:
            self._channel = grpc.secure_channel(context.address, credentials, options=options)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, rpc: str, request: Message) -> Any:
        """The answer; raises AnswerError."""
        try:
            return getattr(self._stub, rpc)(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._explained(error) from error

    def stream(self, rpc: str, request: Message) -> Iterator[Any]:
        """Answers as they come; raises AnswerError. Closing the iterator cancels the stream."""
        call = getattr(self._stub, rpc)(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._explained(error) from error
        finally:
            call.cancel()

    def collect(self, rpc: str, request: Any, field: str, limit: int) -> tuple[list[Any], bool]:
        """Up to `limit` items over as many pages as it takes, and whether there are more; raises AnswerError."""
        found: list[Any] = []
        while True:
            request.page_size = min(PAGE, limit - len(found))
            answer = self.call(rpc, request)
            found += getattr(answer, field)
            if not answer.next_page_token or len(found) >= limit:
                return found, bool(answer.next_page_token)
            request.page_token = answer.next_page_token

    def names(self, pick: Callable[[Client], list[str]]) -> list[str]:
        """Names for shell completion: none where the controller does not answer."""
        try:
            return pick(self)
        except AnswerError:
            return []

    def _explained(self, error: grpc.RpcError) -> AnswerError:
        code, message = error.code(), error.details() or ""
        match code:
            case grpc.StatusCode.UNAVAILABLE:
                return AnswerError(f"cannot reach the controller at {self.address}: {message}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return AnswerError(f"the controller at {self.address} did not answer within {self._timeout:g} s")
            case grpc.StatusCode.UNIMPLEMENTED:
                return AnswerError(f"the controller at {self.address} is of another version: {message}")
            case _:
                return AnswerError(f"{code.name.lower()}: {message}")


def instance_names(client: Client) -> list[str]:
    """Every instance's name; raises AnswerError."""
    instances, _ = client.collect("ListInstances", pb.ListInstancesRequest(), "instances", PAGE)
    return [instance.endpoint.ref.name for instance in instances]


def model_names(client: Client) -> list[str]:
    """Every model's name; raises AnswerError."""
    models, _ = client.collect("ListModels", pb.ListModelsRequest(), "models", PAGE)
    return [model.name for model in models]


def _credentials(context: Context) -> grpc.ChannelCredentials | None:
    if context.ca is None:
        return None
    return grpc.ssl_channel_credentials(
        _bytes("ca", context.ca),
        _bytes("key", context.key) if context.key else None,
        _bytes("cert", context.cert) if context.cert else None,
    )


def _authorization(context: Context) -> tuple[tuple[str, str], ...]:
    if context.token_file is not None:
        token = _first_token(_bytes("token_file", context.token_file).decode("ascii", "replace"))
        where = f"token_file: {context.token_file}"
    elif context.token_env is not None:
        token = os.environ.get(context.token_env, "").strip()
        where = f"token_env: ${context.token_env}"
    else:
        return ()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{where} holds no token")
    return (("authorization", f"Bearer {token}"),)


def _first_token(text: str) -> str:
    """The one to show of a file with a token a line, as docs/security.md has it; empty where there is none."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def _bytes(field: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {os.strerror(error.errno or 0)}") from error
