"""Bearer tokens: which service asks for which, checked before a servicer sees the call."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from controller.config import AuthConfig
from controller.core.rejection import RejectedError
from controller.server.errors import abort
from pd_shadow.api.v1 import admin_pb2, common_pb2, engine_pb2, placement_pb2
from pd_shadow.common.credential_files import OnStale
from pd_shadow.common.reasons import label
from pd_shadow.common.tokens import AcceptedTokens, bearer

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Scope(enum.StrEnum):
    """What a token is good for."""

    ADMIN = "admin"
    GATEWAY = "gateway"
    INSTANCE = "instance"


# Orchestrators probe without credentials; the answer says no more than up or down.
_OPEN = frozenset({"grpc.health.v1.Health"})
_SCOPES = {
    placement_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name: Scope.GATEWAY,
    engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name: Scope.INSTANCE,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name: Scope.ADMIN,
}


class Auth:
    """Decides whether a call may pass. Raises CredentialError when a token file cannot be used."""

    def __init__(self, config: AuthConfig, *, on_stale: OnStale) -> None:
        files = {
            Scope.ADMIN: config.admin_token_file,
            Scope.GATEWAY: config.gateway_token_file,
            Scope.INSTANCE: config.instance_token_file,
        }
        self._tokens = {
            scope: AcceptedTokens(path, field=f"auth.{scope}_token_file", on_stale=on_stale)
            for scope, path in files.items()
            if path is not None
        }

    @property
    def open_scopes(self) -> list[Scope]:
        """Scopes that ask for no token."""
        return [scope for scope in Scope if scope not in self._tokens]

    def check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises RejectedError unless the token in the call's metadata is good for `method` (/package.Service/Name).

        Whatever is no service of this API, such as reflection, is an operator's: it tells what there is to attack.
        """
        service = method.lstrip("/").partition("/")[0]
        scope = _SCOPES.get(service, Scope.ADMIN)
        if service in _OPEN or scope not in self._tokens:
            return
        header = next((value for key, value in metadata if key == "authorization"), None)
        token = bearer(header if isinstance(header, str) else None)
        if token is None:
            raise RejectedError(
                common_pb2.REJECTION_REASON_TOKEN_MISSING,
                f"{service} needs metadata 'authorization: Bearer TOKEN' with a token of scope {scope}",
            )
        # All of them are asked, so that the time tells nothing about which one knew the token.
        accepted = {known for known, tokens in self._tokens.items() if tokens.accept(token)}
        if accepted & {scope, Scope.ADMIN}:
            return
        if accepted:
            raise RejectedError(
                common_pb2.REJECTION_REASON_TOKEN_SCOPE,
                f"{service} needs a token of scope {scope}; this one's scope is {', '.join(sorted(accepted))}",
            )
        raise RejectedError(
            common_pb2.REJECTION_REASON_TOKEN_UNKNOWN,
            f"{service} needs a token of scope {scope}; this one is not known here",
        )


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls without the right token; `refused` is called with the reason's label."""

    def __init__(self, auth: Auth, refused: Callable[[str], None]) -> None:
        self._auth = auth
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        try:
            self._auth.check(handler_call_details.method, handler_call_details.invocation_metadata or ())
        except RejectedError as error:
            self._refused(label(common_pb2.RejectionReason.DESCRIPTOR, error.reason))
            return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: RejectedError) -> Handler:
    """Ends an RPC of any kind without reading what it sends."""

    async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
