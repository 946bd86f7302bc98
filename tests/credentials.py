"""Certificates and tokens for tests, written as a mounted secret is: every file replaced at once, one after another."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

import trustme


class Pair(NamedTuple):
    cert_file: Path
    key_file: Path


def write(path: Path, content: str | bytes) -> Path:
    """Replace a file atomically."""
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(fresh, path)
    return path


def chain(leaf: trustme.LeafCert) -> bytes:
    return b"".join(blob.bytes() for blob in leaf.cert_chain_pems)


def issue(ca: trustme.CA, folder: Path, name: str) -> Pair:
    """A certificate for loopback as NAME.crt and NAME.key; older ones are replaced."""
    leaf = ca.issue_cert("127.0.0.1", "localhost")
    return Pair(write(folder / f"{name}.crt", chain(leaf)), write(folder / f"{name}.key", leaf.private_key_pem.bytes()))


def trust(folder: Path, *authorities: trustme.CA) -> Path:
    """A file of authorities, ca.crt; an older one is replaced."""
    return write(folder / "ca.crt", b"".join(ca.cert_pem.bytes() for ca in authorities))


def shown(port: int, client: Pair | None = None) -> bytes:
    """The certificate (DER) that a loopback server shows in a new handshake; blocks."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if client is not None:
        context.load_cert_chain(*client)
    with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as secure:
        der = secure.getpeercert(binary_form=True)
        assert der is not None
        return der


def der(cert_file: Path) -> bytes:
    """The first certificate of a file."""
    first, _, _ = cert_file.read_text().partition("-----END CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(f"{first}-----END CERTIFICATE-----\n")
