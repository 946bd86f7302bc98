"""TLS for servers and clients whose certificates can be replaced while they run.

Servers look at their files at every handshake, clients at every new connection.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import grpc
from pydantic import model_validator

from pd_shadow.common.config import Config
from pd_shadow.common.credential_files import CredentialFile, OnStale, Watched


class KeyPairFiles(Config):
    """A server's certificate. PEM files; the certificate first in its file, intermediate ones after it."""

    cert_file: Path
    """The certificate."""
    key_file: Path
    """Its key."""


class ServerTls(KeyPairFiles):
    """A server's certificate, and whose clients it takes."""

    client_ca_file: Path | None = None
    """Set: only clients with a certificate of these authorities are served (mTLS)."""


class ClientTls(Config):
    """What a client trusts and shows."""

    ca_file: Path | None = None
    """Unset: the public authorities that gRPC ships."""
    cert_file: Path | None = None
    """The client's own certificate, for servers that ask for one."""
    key_file: Path | None = None
    """The key of `cert_file`."""
    server_name: str | None = None
    """The name expected in the server's certificate; unset: the host of its address."""

    @model_validator(mode="after")
    def _both_or_none(self) -> ClientTls:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: set both, or neither")
        return self


class _Pair(NamedTuple):
    cert: CredentialFile
    key: CredentialFile

    @classmethod
    def of(cls, field: str, cert: Path, key: Path) -> _Pair:
        return cls(CredentialFile(f"{field}.cert_file", cert), CredentialFile(f"{field}.key_file", key))

    def load(self, context: ssl.SSLContext) -> tuple[bytes, bytes]:
        """Put the pair into a context; (key, certificate chain). Raises CredentialError for files that are no pair."""
        certificate, key = self.cert.read(), self.key.read()
        try:
            # No password: an encrypted key is an error instead of a question on the terminal.
            context.load_cert_chain(self.cert.path, self.key.path, password=lambda: b"")
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", None) or type(error).__name__)
            if why == "KEY_VALUES_MISMATCH":
                raise self.key.error(f"is not the key of the certificate in {self.cert.path}") from error
            raise self.key.error(
                f"no unencrypted PEM key here, or no PEM certificate in {self.cert.path} ({why.lower()})"
            ) from error
        return key, certificate


def _authorities(file: CredentialFile) -> bytes:
    content = file.read()
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise file.error("holds no PEM certificates") from error
    return content


def grpc_server_credentials(tls: ServerTls, *, field: str, on_stale: OnStale) -> grpc.ServerCredentials:
    """Credentials that follow their files; `field` is the configuration's name for `tls`. Raises CredentialError."""
    pair = _Pair.of(field, tls.cert_file, tls.key_file)
    clients = CredentialFile(f"{field}.client_ca_file", tls.client_ca_file) if tls.client_ca_file else None

    def read() -> grpc.ServerCertificateConfiguration:
        authorities = _authorities(clients) if clients else None
        return grpc.ssl_server_certificate_configuration(
            [pair.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))], authorities
        )

    watched = Watched((*pair, clients) if clients else pair, read, on_stale)
    first = given = watched.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Handshakes ask one at a time, each before it begins; None means that nothing changed.
        nonlocal given
        latest = watched.current()
        if latest is given:
            return None
        given = latest
        return latest

    # The stubs miss that the second argument may answer None.
    return grpc.dynamic_ssl_server_credentials(
        first,
        changed,  # type: ignore[arg-type]
        require_client_authentication=clients is not None,
    )


def ssl_server_context(tls: KeyPairFiles, *, field: str, on_stale: OnStale) -> ssl.SSLContext:
    """A context for asyncio and aiohttp whose certificate follows its files. Raises CredentialError."""
    pair = _Pair.of(field, tls.cert_file, tls.key_file)

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        pair.load(context)
        return context

    watched = Watched(pair, read, on_stale)

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        # Called in every handshake, also when the client names no server. A loaded context cannot be loaded again
        # safely: a key that does not fit would leave it without one.
        connection.context = watched.current()

    front = read()
    front.sni_callback = choose
    return front


class ClientTlsFields(NamedTuple):
    """What the caller's configuration calls the files of a ClientTls, for errors."""

    ca_file: str
    cert_file: str
    key_file: str

    @classmethod
    def of(cls, section: str) -> ClientTlsFields:
        """The names where the configuration holds a ClientTls under `section`."""
        return cls(*(f"{section}.{file}" for file in cls._fields))


class ChannelCredentials:
    """A client's credentials; made anew when their files change. Raises CredentialError at first."""

    def __init__(self, tls: ClientTls, *, fields: ClientTlsFields, on_stale: OnStale) -> None:
        ca = CredentialFile(fields.ca_file, tls.ca_file) if tls.ca_file else None
        pair = None
        if tls.cert_file and tls.key_file:
            pair = _Pair(CredentialFile(fields.cert_file, tls.cert_file), CredentialFile(fields.key_file, tls.key_file))

        def read() -> grpc.ChannelCredentials:
            authorities = _authorities(ca) if ca else None
            key, chain = pair.load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)) if pair else (None, None)
            return grpc.ssl_channel_credentials(authorities, key, chain)

        files = [file for file in (ca, *(pair or ())) if file is not None]
        self._watched = Watched(files, read, on_stale)

    def current(self) -> grpc.ChannelCredentials:
        """The same object for as long as the files stay as they are."""
        return self._watched.current()
