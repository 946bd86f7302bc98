"""Configuration of emulated engines, and `pd-shadow serve engine --emulated` from the outside."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_shadow.cli.serve_engine import engine as command
from pd_shadow.common.config import ConfigError, parse
from pd_shadow.engine.emulated.config import EmulatedEngines

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
