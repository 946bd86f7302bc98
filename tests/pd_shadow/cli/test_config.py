"""`pd-shadow config`, and the reference made from the models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from click.testing import CliRunner

from pd_shadow.cli.admin.contexts import Contexts
from pd_shadow.cli.config import PROCESSES
from pd_shadow.cli.main import main
from pd_shadow.common.config import Config
from pd_shadow.common.config_reference import keys

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config_docs", ROOT / "tools" / "generate_config_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_models_say(generator: ModuleType) -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == generator.reference()


@pytest.mark.parametrize("model", [*(process.model for process in PROCESSES.values()), Contexts])
def test_every_key_is_described(model: type[Config]) -> None:
    assert [key.path for key in keys(model) if not key.description] == []


def test_the_reference_has_units_defaults_and_bounds() -> None:
    found = {key.path: key for key in keys(PROCESSES["controller"].model)}
    wait = found["shadow.backoff_seconds"]
    assert (wait.kind, wait.unit, wait.default, wait.bounds) == ("number", "seconds", "`0.5`", "> 0")
    assert found["discovery.static[].url"].default == "required"
    assert found["shadow.chunk_tokens"].bounds == "≥ 256, ≤ 131072"


def test_a_good_file_passes_and_is_shown_with_the_environment_on_top(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("shadow: {approach: predictive}")
    env = {"PD_SHADOW_CONTROLLER__SHADOW__TOP_K": "2"}
    checked = CliRunner().invoke(main, ["config", "check", "controller", str(path)], env=env)
    assert (checked.exit_code, checked.stdout) == (0, f"{path}: ok\n")
    for form, read in (([], yaml.safe_load), (["--json"], json.loads)):
        shown = CliRunner().invoke(main, ["config", "show", "controller", str(path), *form], env=env)
        shadow = read(shown.stdout)["shadow"]
        assert (shadow["approach"], shadow["top_k"], shadow["chunk_tokens"]) == ("predictive", 2, 4096)


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_what_is_shown_is_a_file_that_passes(process: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CliRunner().invoke(main, ["config", "show", process]).stdout)
    assert CliRunner().invoke(main, ["config", "check", process, str(path)]).exit_code == 0


@pytest.mark.parametrize(
    ("process", "text", "env", "says"),
    [
        ("controller", "shadow: {topk: 1}", {}, "shadow.topk: unknown key; did you mean 'top_k'?"),
        ("gateway", "caps: {session: 1}", {}, "caps.session: unknown key; did you mean 'sessions'?"),
        ("gateway", "", {"PD_SHADOW_GATEWAY__CAP__SESSIONS": "1"}, "PD_SHADOW_GATEWAY__CAP__SESSIONS: unknown key"),
        (
            "controller",
            "shadow: {approach: no-shadow, enabled: true}",
            {},
            "shadow.enabled: approach no-shadow does no",
        ),
    ],
)
def test_a_bad_setting_exits_with_2_and_is_named(
    process: str, text: str, env: dict[str, str], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    for command in (["config", "check", process, str(path)], ["serve", process, "--config", str(path)]):
        result = CliRunner().invoke(main, command, env=env)
        assert result.exit_code == 2
        assert says in result.stderr


def test_the_schema_knows_every_section() -> None:
    schema = json.loads(CliRunner().invoke(main, ["config", "schema", "gateway"]).stdout)
    assert {"deadlines", "caps", "shadow"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
