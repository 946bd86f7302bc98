"""HOST:PORT: what is taken, what is refused, and what counts as this machine alone."""

from __future__ import annotations

import pytest

from pd_shadow.common.address import Address, ListenAddress, is_loopback, join_address, split_address
from pd_shadow.common.config import Config, ConfigError, parse


class Both(Config):
    controller: Address = "c:1"
    listen: ListenAddress = ":0"


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("pd-shadow-controller.agents.svc.cluster.local:7070", "pd-shadow-controller.agents.svc.cluster.local", 7070),
        ("h:65535", "h", 65_535),
        ("h:1", "h", 1),
    ],
)
def test_a_whole_address_is_good_for_both(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address
    both = parse(Both, {"controller": address, "listen": address})
    assert (both.controller, both.listen) == (address, address)


@pytest.mark.parametrize("address", [":8000", "127.0.0.1:0", "[::]:0", ":0"])
def test_every_interface_and_any_port_are_for_listening(address: str) -> None:
    assert parse(Both, {"listen": address}).listen == address
    with pytest.raises(ConfigError, match=r"controller: expected HOST:PORT, such as controller:7070 or .*, got "):
        parse(Both, {"controller": address})


@pytest.mark.parametrize(
    "address",
    [
        *("", "h", "h:", ":", "h:x", "h:-1", "h:+1", "h:65536", "h:123456", "h:٣", "h:1 ", " h:1", "h h:1", "h:1\n"),
        *("::1:80", "a:b:1", "[::1]", "[]:1", "[h]:1", "[127.0.0.1]:1", "[::1:1", "::1]:1"),
        *("http://h:1", "dns:///h:1", "h/x:1", "user@h:1"),
    ],
)
def test_anything_else_is_refused_with_the_field_and_the_form(address: str) -> None:
    for field in ("controller", "listen"):
        with pytest.raises(ConfigError) as caught:
            parse(Both, {field: address})
        assert str(caught.value).startswith(f"configuration: {field}: expected HOST:PORT, such as ")
        assert str(caught.value).endswith(f"got {address!r}")


@pytest.mark.parametrize(
    ("address", "alone"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        (":1", False),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
        ("no address", False),
    ],
)
def test_loopback(address: str, alone: bool) -> None:
    assert is_loopback(address) is alone
