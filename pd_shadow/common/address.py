"""HOST:PORT in configurations: where to connect to, and where to listen."""

import ipaddress
import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

# A name, an IPv4 address, or an IPv6 address in brackets; none for every interface.
_FORM = re.compile(r"(?:\[(?P<ipv6>[^\[\]\s]+)\]|(?P<name>[^\s:/@\[\]]*)):(?P<port>[0-9]{1,5})")


class HostPort(NamedTuple):
    host: str
    """Without brackets; empty for every interface."""
    port: int
    """0 for any that is free."""


def split_address(address: str) -> HostPort:
    """The parts of HOST:PORT as somebody listens on it. Raises ValueError naming the rule."""
    found = _FORM.fullmatch(address)
    if found is None or int(found["port"]) > 65_535 or not _is_ipv6(found["ipv6"]):
        raise ValueError(f"expected HOST:PORT, such as 0.0.0.0:7070 or [::1]:7070, got {address!r}")
    return HostPort(found["ipv6"] or found["name"], int(found["port"]))


def join_address(host: str, port: int | str) -> str:
    """HOST:PORT of parts: an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is reachable from this machine alone; a host name other than localhost counts as not."""
    try:
        host = split_address(address).host
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_ipv6(host: str | None) -> bool:
    """Also true for none."""
    try:
        return host is None or bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


def _listened(address: str) -> str:
    split_address(address)
    return address


def _connected(address: str) -> str:
    try:
        host, port = split_address(address)
    except ValueError:
        host, port = "", 0
    if not host or not port:
        raise ValueError(f"expected HOST:PORT, such as controller:7070 or [::1]:7070, got {address!r}")
    return address


# The patterns are for schemas: editors and Helm check a little of what the validators do.
Address = Annotated[str, AfterValidator(_connected), Field(json_schema_extra={"pattern": r"^[^\s]+:\d{1,5}$"})]
"""HOST:PORT where somebody listens."""
ListenAddress = Annotated[str, AfterValidator(_listened), Field(json_schema_extra={"pattern": r"^[^\s]*:\d{1,5}$"})]
"""HOST:PORT to listen on: no host is every interface, port 0 any that is free."""
