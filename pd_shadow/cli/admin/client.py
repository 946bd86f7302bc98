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
from pd_shadow.common.controller_access import AccessFields, ControllerAccess
from pd_shadow.common.tls import ClientTls, ClientTlsFields

# Of one page; the server allows no more.
PAGE = 1000
# What a context calls its credentials.
FIELDS = AccessFields(ClientTlsFields("ca", "cert", "key"), "token_file", "token_env")


class AnswerError(Exception):
    """The controller said no, or could not be reached; the message says which and why."""


class Client:
    """Calls RPCs by name, with a deadline, the context's credentials, and errors for people."""

    def __init__(self, context: Context, timeout: float) -> None:
        """Raises ConfigError for a credential that cannot be used."""
        self.address = context.address
        self._timeout = timeout
        # Where files go bad during a watch, what was read before goes on; the controller says when it no longer counts.
        self._access = ControllerAccess(
            context.address,
            _tls(context),
            _at(context.token_file),
            context.token_env,
            fields=FIELDS,
            on_stale=lambda _: None,
        )
        self._channel = self._access.channel()
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, rpc: str, request: Message) -> Any:
        """The answer; raises AnswerError."""
        try:
            return getattr(self._stub, rpc)(request, timeout=self._timeout, metadata=self._access.metadata())
        except grpc.RpcError as error:
            raise self._explained(error) from error

    def stream(self, rpc: str, request: Message) -> Iterator[Any]:
        """Answers as they come; raises AnswerError. Closing the iterator cancels the stream."""
        call = getattr(self._stub, rpc)(request, metadata=self._access.metadata())
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


def _tls(context: Context) -> ClientTls | None:
    if context.ca is None:
        return None
    return ClientTls(
        ca_file=_at(context.ca),
        cert_file=_at(context.cert),
        key_file=_at(context.key),
        server_name=context.server_name,
    )


def _at(path: Path | None) -> Path | None:
    """Contexts are written by hand too: a ~ is the home folder. One that names nobody stays, and is no file then."""
    return Path(os.path.expanduser(path)) if path is not None else None
