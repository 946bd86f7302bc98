"""Configuration of emulated engines, and `pd-shadow serve engine --emulated` from the outside."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_shadow.cli.serve_engine import engine as command
from pd_shadow.common.config import ConfigError, parse
from pd_shadow.engine.emulated.clock import EngineClock
from pd_shadow.engine.emulated.config import EmulatedEngine, EmulatedEngines
from pd_shadow.engine.emulated.mover import TimedLink
from pd_shadow.engine.emulated.movers import mover_for, mover_name

ONE = {"name": "a", "model": "L3.1-8B", "role": "prefill"}


def test_groups_are_expanded_with_names_and_ports() -> None:
    config = parse(EmulatedEngines, {"engines": [{**ONE, "port": 9000, "replicas": 3}, {**ONE, "name": "b"}]})
    assert [(engine.name, engine.port) for engine in config.all()] == [
        ("a-0", 9000), ("a-1", 9001), ("a-2", 9002), ("b", 8000)
    ]  # fmt: skip


def test_sizes_follow_from_model_and_gpu() -> None:
    (engine,) = parse(EmulatedEngines, {"engines": [ONE]}).all()
    assert engine.served_name == "Llama-3.1-8B-Instruct"
    assert engine.blocks * engine.block_size > engine.context_tokens == 131_072
    assert engine.link_bytes_per_second == 40e9


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rol": "x"}, "engines.0.rol: unknown key; did you mean 'role'?"),
        ({"plugin": {"cap_shar": 1}}, "engines.0.plugin.cap_shar: unknown key; did you mean 'cap_share'?"),
        ({"model": "L9"}, "unknown model 'L9'"),
        ({"gpu": "A1"}, "unknown GPU 'A1'"),
        ({"role": "both"}, "engines.0.role"),
        ({"speed": 0}, "engines.0.speed"),
        ({"tensor_parallel": 3}, "tensor_parallel=3"),
        ({"kv_tokens": 100, "max_model_len": 200}, "do not fit"),
        ({"port": 65_535, "replicas": 2}, "run out of ports"),
        ({"plugin": {"role": "decode"}}, "plugin.role"),
        ({"plugin": {"reporter": {"controller": "c:1", "name": "n", "url": "http://u"}}}, "set `controller` instead"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(EmulatedEngines, {"engines": [{**ONE, **given}]})
    assert says in str(caught.value)


def test_names_and_ports_are_unique() -> None:
    with pytest.raises(ConfigError, match="two are named 'a'"):
        parse(EmulatedEngines, {"engines": [ONE, ONE]})
    with pytest.raises(ConfigError, match="has a port"):
        parse(EmulatedEngines, {"engines": [ONE, {**ONE, "name": "b"}]})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say --emulated"),
        (["--emulated"], "give --model and --role"),
        (["--emulated", "--model", "L9", "--role", "prefill"], "unknown model"),
        (["--emulated", "--config", "no-such.yaml"], "no-such.yaml"),
        (["--emulated", "--config", "x.yaml", "--port", "1"], "--port: not with --config"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_config_file_is_strict(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("engines: [{name: a, model: L3.1-8B, role: prefill, prot: 9}]")
    result = CliRunner().invoke(command, ["--emulated", "--config", str(file)])
    assert result.exit_code == 2
    assert "engines.0.prot: unknown key; did you mean 'port'?" in result.output


def test_nixl_where_it_is_installed_and_there_is_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_shadow.engine.emulated.config.nixl_installed", lambda: True)
    one = {"name": "e", "model": "L3.1-8B", "role": "decode"}
    assert EmulatedEngine(**one).moves_bytes
    assert not EmulatedEngine(**{**one, "role": "colocated"}).moves_bytes
    assert not EmulatedEngine(**one, kv_transfer="timed").moves_bytes


@pytest.mark.parametrize(
    ("replicas", "kv_transfer", "moves"),
    [(2, "auto", True), (100, "auto", False), (100, "nixl", True), (2, "timed", False)],
)
def test_many_engines_of_one_process_move_bytes_only_when_told_to(
    monkeypatch: pytest.MonkeyPatch, replicas: int, kv_transfer: str, moves: bool
) -> None:
    monkeypatch.setattr("pd_shadow.engine.emulated.config.nixl_installed", lambda: True)
    group = {**ONE, "replicas": replicas, "kv_transfer": kv_transfer}
    config = parse(EmulatedEngines, {"engines": [{**group, "port": 0}]})
    assert {engine.moves_bytes for engine in config.all()} == {moves}


def test_without_nixl_auto_is_the_timed_link_and_nixl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_shadow.engine.emulated.config.nixl_installed", lambda: False)
    one = {"name": "e", "model": "L3.1-8B", "role": "decode"}
    assert mover_for(EmulatedEngine(**one), EngineClock()).name == TimedLink.name == mover_name(EmulatedEngine(**one))
    with pytest.raises(ValueError, match="kv_transfer: NIXL is not installed; install it"):
        EmulatedEngine(**one, kv_transfer="nixl")


def test_access_goes_with_a_controller_and_to_every_reporter() -> None:
    access = {"controller_tls": {"ca_file": "/tls/ca.crt", "server_name": "c"}, "controller_token_file": "/token"}
    with pytest.raises(ConfigError, match="are for a controller; set it"):
        parse(EmulatedEngines, {"engines": [ONE], **access})
    config = parse(EmulatedEngines, {"controller": "c:7070", "engines": [{**ONE, "host": "fd00::7"}], **access})
    reporter = config.all()[0].attached_to(config.attach, 8000).reporter
    assert reporter is not None
    assert reporter.controller_tls is not None
    assert (reporter.controller_tls.server_name, reporter.controller_token_file) == ("c", Path("/token"))
    assert reporter.url == "http://[fd00::7]:8000"


def test_name_and_host_may_come_on_top_of_a_file_of_one_engine() -> None:
    config = parse(EmulatedEngines, {"engines": [ONE]}).with_only_engine({"name": "pod-0", "host": "10.0.0.7"})
    assert [(engine.name, engine.host) for engine in config.all()] == [("pod-0", "10.0.0.7")]
    with pytest.raises(ConfigError, match="name: for a file of one engine"):
        parse(EmulatedEngines, {"engines": [ONE, {**ONE, "name": "b", "port": 1}]}).with_only_engine({"name": "c"})
    with pytest.raises(ConfigError, match=r"engines\.0\.name"):
        config.with_only_engine({"name": "not a name"})


def test_a_token_file_that_is_not_there_is_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    engine = {**ONE, "port": 0, "kv_transfer": "timed"}
    settings = {"controller": "127.0.0.1:1", "controller_token_file": str(tmp_path / "token"), "engines": [engine]}
    file.write_text(json.dumps(settings))
    result = CliRunner().invoke(command, ["--emulated", "--config", str(file)])
    assert result.exit_code == 2
    assert "controller_token_file" in result.output
