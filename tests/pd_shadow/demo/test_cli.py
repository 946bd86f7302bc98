"""`pd-shadow demo` from the outside."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_shadow.cli.demo import demo
from pd_shadow.demo import demo as whole
from pd_shadow.demo.process import ProcessDiedError


def test_help_has_examples_and_exit_codes() -> None:
    text = CliRunner().invoke(demo, ["--help"]).output
    assert "pd-shadow demo --quick" in text
    assert "Exit code 0" in text


@pytest.mark.parametrize("arguments", [["--sessions", "0"], ["--engine", "gpu"], ["--json", "no/such/dir/f.json"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(demo, arguments).exit_code == 2


def test_a_dead_engine_is_exit_code_1_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def dies(*_: object) -> None:
        raise ProcessDiedError("demo-small-prefill ended with exit code 1; the end of its log:\n  boom")

    monkeypatch.setattr(whole, "run", dies)
    result = CliRunner().invoke(demo, ["--keep-logs", str(tmp_path)])
    assert result.exit_code == 1
    assert "boom" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
