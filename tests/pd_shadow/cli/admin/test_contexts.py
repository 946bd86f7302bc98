"""The file of contexts, through the command."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import trustme
import yaml
from click.testing import CliRunner, Result

from pd_shadow.cli.admin.client import Client
from pd_shadow.cli.admin.contexts import Context, read
from pd_shadow.cli.main import main
from pd_shadow.common.config import ConfigError, parse
from tests.credentials import issue, trust, write
from tests.pd_shadow.cli.admin.conftest import Running, serving


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "contexts.yaml"
    monkeypatch.setenv("PD_SHADOW_CONTEXTS", str(path))
    return path


def context(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["admin", "context", *arguments])


def test_contexts_are_set_used_changed_and_deleted(file: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("very-secret")
    assert context("set", "dev", "--address", "127.0.0.1:9000", "--token-file", str(token)).exit_code == 0
    assert context("set", "prod", "--address", "p:1", "--ca", "ca.pem", "--token-env", "TOKEN").exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "very-secret" not in file.read_text()
    # The first one made is current; what is not given stays; paths hold from anywhere.
    assert read().chosen(None).address == "127.0.0.1:9000"
    assert context("set", "prod", "--address", "p:2").exit_code == 0
    prod = read().chosen("prod")
    assert (prod.address, prod.token_env, prod.ca) == ("p:2", "TOKEN", Path.cwd() / "ca.pem")
    assert context("use", "prod").exit_code == 0
    listed = context("list")
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [["dev", "127.0.0.1:9000"], ["*", "prod"]]
    assert context("delete", "prod").exit_code == 0
    assert read().current is None
    assert list(read().contexts) == ["dev"]
    assert [p.name for p in file.parent.iterdir()] == ["contexts.yaml"]


def test_a_context_leads_the_command_to_its_controller(controller: Running) -> None:
    assert context("set", "here", "--address", controller.address).exit_code == 0
    assert "a-p0" in CliRunner().invoke(main, ["admin", "instances", "list"]).stdout
    assert context("set", "away", "--address", "127.0.0.1:1").exit_code == 0
    assert CliRunner().invoke(main, ["admin", "--context", "away", "ledger"]).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["use", "nope"], "no context 'nope'; there are: dev"),
        (["delete", "nope"], "no context 'nope'"),
        (["set", "x y"], "should match pattern"),
        (["set", "x", "--address", "nohost"], "context x: address: expected HOST:PORT"),
        (["set", "x", "--cert", "c.pem"], "cert and key: set both or none"),
        (["set", "x", "--cert", "c.pem", "--key", "k.pem"], "cert: needs ca"),
        (["set", "x", "--token-env", "A", "--token-file", "b"], "token_file and token_env: set one"),
        (["set", "x", "--server-name", "c"], "server_name: needs ca"),
        (["set", "x", "--address", "far:1", "--token-env", "A"], "ca: a token goes over TLS only"),
    ],
)
def test_a_context_that_cannot_be_is_wrong_usage_and_changes_nothing(
    file: Path, arguments: list[str], says: str
) -> None:
    context("set", "dev", "--address", "127.0.0.1:9000")
    before = file.read_text()
    result = context(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("contexts: {a: {adress: 'h:1'}}", "contexts.a.adress: unknown key; did you mean 'address'?"),
        ("current: gone", "there is no context 'gone'"),
        ("- a", "expected a mapping"),
    ],
)
def test_a_broken_file_is_told_by_path(file: Path, text: str, says: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    for arguments in (["admin", "context", "list"], ["admin", "ledger"]):
        result = CliRunner().invoke(main, arguments)
        assert (result.exit_code, says in result.stderr) == (2, True)


def test_a_file_that_cannot_be_written_is_told(file: Path) -> None:
    file.parent.write_text("not a folder")
    result = context("set", "dev")
    assert result.exit_code == 2
    assert str(file) in result.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"token_env": "PD_SHADOW_TEST_TOKEN"}, r"token_env: \$PD_SHADOW_TEST_TOKEN holds no token"),
        ({"token_file": "/nowhere/token"}, "token_file: /nowhere/token: No such file"),
        ({"ca": "/nowhere/ca"}, "ca: /nowhere/ca: No such file"),
        ({"ca": "~/ca"}, "ca: .*/home/ca: holds no PEM certificates"),
        ({"ca": "~nobody-of-this-name/ca"}, "ca: ~nobody-of-this-name/ca: No such file"),
        ({"token_file": "~/two words"}, "token_file: .*/home/two words: line 1: a token is 1 to 512"),
    ],
)
def test_credentials_that_cannot_be_used_are_told_by_the_context_s_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], says: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("ca", "two words"):
        write(home / name, name)
    with pytest.raises(ConfigError, match=f"^{says}"):
        Client(parse(Context, given), 1.0)


def test_a_key_of_another_certificate_is_told_by_the_context_s_name(tmp_path: Path) -> None:
    ca = trustme.CA()
    own, other = issue(ca, tmp_path, "own"), issue(ca, tmp_path, "other")
    given = {"ca": trust(tmp_path, ca), "cert": own.cert_file, "key": other.key_file}
    with pytest.raises(ConfigError, match=r"^key: .*other.key: is not the key of the certificate in"):
        Client(parse(Context, given), 1.0)


def test_the_token_goes_with_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc

    seen: list[str] = []

    class Servicer(admin_pb2_grpc.AdminServiceServicer):
        def GetLedger(self, request: object, context: grpc.ServicerContext) -> admin_pb2.GetLedgerResponse:  # noqa: N802
            seen.append(str(dict(context.invocation_metadata()).get("authorization")))
            return admin_pb2.GetLedgerResponse()

    monkeypatch.setenv("PD_SHADOW_TEST_TOKEN", "abc\n")
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        given = parse(Context, {"address": f"127.0.0.1:{port}", "token_env": "PD_SHADOW_TEST_TOKEN"})
        with Client(given, 10.0) as client:
            client.call("GetLedger", admin_pb2.GetLedgerRequest())
        server.stop(None).wait()
    assert seen == ["Bearer abc"]


def test_a_context_with_mutual_tls_and_a_token_opens_a_secured_controller(file: Path, tmp_path: Path) -> None:
    ca = trustme.CA()
    trusted, server, own = trust(tmp_path, ca), issue(ca, tmp_path, "server"), issue(ca, tmp_path, "operator")
    tokens = write(tmp_path / "admin.tokens", "# the first is shown\ngood-token-of-some-length\nolder-token\n")
    secured = {
        "tls": {"cert_file": server.cert_file, "key_file": server.key_file, "client_ca_file": trusted},
        "auth": {"admin_token_file": tokens},
    }
    with serving(**secured) as controller:
        by_name = controller.address.replace("127.0.0.1", "localhost")
        tls = ("--ca", str(trusted), "--cert", str(own.cert_file), "--key", str(own.key_file))
        assert context("set", "good", "--address", by_name, *tls, "--token-file", str(tokens)).exit_code == 0
        result = CliRunner().invoke(main, ["admin", "instances", "list"])
        assert result.exit_code == 0, result.stderr
        assert "a-p0" in result.stdout
        named = ("--address", controller.address, "--server-name", "localhost", "--token-file", str(tokens))
        assert context("set", "forwarded", *tls, *named).exit_code == 0
        assert CliRunner().invoke(main, ["admin", "--context", "forwarded", "ledger"]).exit_code == 0
        assert context("set", "tokenless", "--address", by_name, *tls).exit_code == 0
        assert context("set", "plain", "--address", controller.address).exit_code == 0
        for name, says in (("tokenless", "unauthenticated: "), ("plain", "cannot reach the controller")):
            refused = CliRunner().invoke(main, ["admin", "--context", name, "--timeout", "5", "ledger"])
            assert (refused.exit_code, says in refused.stderr) == (1, True), refused.stderr


def test_the_default_place_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PD_SHADOW_CONTEXTS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert context("set", "dev").exit_code == 0
    written: Callable[[str], object] = yaml.safe_load
    assert written((tmp_path / "pd-shadow" / "contexts.yaml").read_text()) == {
        "contexts": {"dev": {}},
        "current": "dev",
    }
