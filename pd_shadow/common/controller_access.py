"""The way to the controller, for everything that calls it: channels and the token to show."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import grpc

from pd_shadow.common.credential_files import OnStale
from pd_shadow.common.grpc_options import CLIENT_OPTIONS
from pd_shadow.common.tls import ChannelCredentials, ClientTls, ClientTlsFields
from pd_shadow.common.tokens import EnvironmentToken, OwnToken

Metadata = tuple[tuple[str, str], ...]


class AccessFields(NamedTuple):
    """What the caller's configuration calls its credentials, for errors."""

    tls: ClientTlsFields
    token_file: str
    token_env: str = "token_env"


# In the configurations of the gateway and the reporter.
CONFIGURED = AccessFields(ClientTlsFields.of("controller_tls"), "controller_token_file")


class ControllerAccess:
    """One controller's address with TLS (None: plain text) and token (both None: none).

    Raises CredentialError for a file and ConfigError for a variable that cannot be used, named as `fields` says.
    """

    def __init__(
        self,
        address: str,
        tls: ClientTls | None,
        token_file: Path | None,
        token_env: str | None = None,
        *,
        fields: AccessFields = CONFIGURED,
        on_stale: OnStale,
    ) -> None:
        self.address = address
        self._tls = ChannelCredentials(tls, fields=fields.tls, on_stale=on_stale) if tls else None
        self._token: OwnToken | EnvironmentToken | None = None
        if token_file is not None:
            self._token = OwnToken(token_file, field=fields.token_file, on_stale=on_stale)
        elif token_env is not None:
            self._token = EnvironmentToken(token_env, field=fields.token_env)
        self._options: tuple[tuple[str, int | str], ...] = CLIENT_OPTIONS
        if tls and tls.server_name:
            self._options += (("grpc.ssl_target_name_override", tls.server_name),)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for plain text; another object once the certificates changed, and new connections should use that."""
        return self._tls.current() if self._tls else None

    def metadata(self) -> Metadata:
        """What every call to the controller carries."""
        return (("authorization", f"Bearer {self._token.current()}"),) if self._token else ()

    def channel(self) -> grpc.Channel:
        """A channel with the certificates of this moment."""
        credentials = self.credentials()
        if credentials is None:
            return grpc.insecure_channel(self.address, options=self._options)
        return grpc.secure_channel(self.address, credentials, options=self._options)

    def aio_channel(self, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        """A channel for asyncio with what `credentials` returned."""
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options=self._options)
        return grpc.aio.secure_channel(self.address, credentials, options=self._options)
