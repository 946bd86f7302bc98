"""Certificate files that are no good, and servers whose certificates are replaced between two handshakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from pd_shadow.common.config import ConfigError, parse
from pd_shadow.common.credential_files import CredentialError
from pd_shadow.common.tls import (
    ChannelCredentials,
    ClientTls,
    ClientTlsFields,
    KeyPairFiles,
    ServerTls,
    grpc_server_credentials,
    ssl_server_context,
)
from tests.credentials import Pair, der, issue, shown, trust, write

Make = Callable[[Pair, Path], object]


def encrypted(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, None)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )


def nothing(error: CredentialError) -> None:
    raise AssertionError("nothing changed")


def grpc_server(pair: Pair, ca_file: Path) -> object:
    return grpc_server_credentials(ServerTls(client_ca_file=ca_file, **pair._asdict()), field="tls", on_stale=nothing)


def http_server(pair: Pair, ca_file: Path) -> object:
    return ssl_server_context(KeyPairFiles(**pair._asdict()), field="tls", on_stale=nothing)


def client(pair: Pair, ca_file: Path) -> object:
    tls = ClientTls(ca_file=ca_file, **pair._asdict())
    return ChannelCredentials(tls, fields=ClientTlsFields.of("tls"), on_stale=nothing)


PAIR_FAULTS = {
    "no certificate": (lambda pair, other: pair.cert_file.unlink(), "cert_file", "No such file or directory"),
    "no key": (lambda pair, other: pair.key_file.unlink(), "key_file", "No such file or directory"),
    "another's key": (
        lambda pair, other: write(pair.key_file, other.key_file.read_bytes()),
        "key_file",
        "is not the key of the certificate in",
    ),
    "key no PEM": (lambda pair, other: write(pair.key_file, "no PEM"), "key_file", "no unencrypted PEM key here"),
    "certificate no PEM": (lambda pair, other: write(pair.cert_file, "no PEM"), "key_file", "or no PEM certificate in"),
    "encrypted key": (
        lambda pair, other: write(pair.key_file, encrypted(pair.key_file.read_bytes())),
        "key_file",
        "no unencrypted PEM key here",
    ),
}


@pytest.mark.parametrize("make", [grpc_server, http_server, client])
@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_an_unusable_pair_is_told_with_field_and_path(tmp_path: Path, make: Make, fault: str) -> None:
    ca = trustme.CA()
    pair, other = issue(ca, tmp_path, "server"), issue(ca, tmp_path, "other")
    spoil, field, why = PAIR_FAULTS[fault]
    spoil(pair, other)
    with pytest.raises(CredentialError) as caught:
        make(pair, trust(tmp_path, ca))
    message = str(caught.value)
    assert message.startswith(f"tls.{field}: {getattr(pair, field)}: ")
    assert why in message


@pytest.mark.parametrize(("make", "field"), [(grpc_server, "tls.client_ca_file"), (client, "tls.ca_file")])
@pytest.mark.parametrize("content", ["", "no PEM"])
def test_authorities_that_are_none_are_told(tmp_path: Path, make: Make, field: str, content: str) -> None:
    pair = issue(trustme.CA(), tmp_path, "server")
    with pytest.raises(CredentialError, match=f"^{field}: .*ca.crt: holds no PEM certificates"):
        make(pair, write(tmp_path / "ca.crt", content))


def test_half_a_client_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="cert_file and key_file: set both, or neither"):
        parse(ClientTls, {"cert_file": "/x"})


def test_client_credentials_change_with_their_files_only(tmp_path: Path) -> None:
    ca = trustme.CA()
    stale: list[CredentialError] = []
    tls = ClientTls(ca_file=trust(tmp_path, ca), **issue(ca, tmp_path, "client")._asdict())
    credentials = ChannelCredentials(tls, fields=ClientTlsFields.of("controller_tls"), on_stale=stale.append)
    first = credentials.current()
    assert credentials.current() is first
    trust(tmp_path, ca, trustme.CA())
    second = credentials.current()
    assert second is not first
    (tmp_path / "ca.crt").unlink()
    assert credentials.current() is second
    assert [error.field for error in stale] == ["controller_tls.ca_file"]


async def test_an_http_server_shows_the_certificate_of_the_moment(tmp_path: Path) -> None:
    ca = trustme.CA()
    pair = issue(ca, tmp_path, "server")
    stale: list[CredentialError] = []
    context = ssl_server_context(KeyPairFiles(**pair._asdict()), field="tls", on_stale=stale.append)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        first = der(pair.cert_file)
        assert await asyncio.to_thread(shown, port) == first
        key = pair.key_file.read_bytes()
        issue(ca, tmp_path, "server")
        fresh_key = pair.key_file.read_bytes()
        second = der(pair.cert_file)
        write(pair.key_file, key)
        # Between the two files of a rotation: the older pair goes on.
        assert await asyncio.to_thread(shown, port) == first
        assert [error.field for error in stale] == ["tls.key_file"]
        write(pair.key_file, fresh_key)
        assert await asyncio.to_thread(shown, port) == second
