"""The way to the controller, for everything that calls it: channels and the token to show."""

from __future__ import annotations

from pathlib import Path

import grpc

from pd_shadow.common.credential_files import OnStale
from pd_shadow.common.grpc_options import CLIENT_OPTIONS
from pd_shadow.common.tls import ChannelCredentials, ClientTls
from pd_shadow.common.tokens import OwnToken

Metadata = tuple[tuple[str, str], ...]


class ControllerAccess:
    """One controller's address with TLS (None: plain text) and token (None: none). Raises CredentialError.

    Error messages name fields as the gateway's and the reporter's configuration do: controller_tls.ca_file and so on.
    """

    def __init__(self, address: str, tls: ClientTls | None, token_file: Path | None, *, on_stale: OnStale) -> None:
        self.address = address
        self._tls = ChannelCredentials(tls, field="controller_tls", on_stale=on_stale) if tls else None
        self._token = OwnToken(token_file, field="controller_token_file", on_stale=on_stale) if token_file else None
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
