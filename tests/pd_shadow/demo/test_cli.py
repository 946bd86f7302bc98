"""`pd-shadow demo` from the outside."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_shadow.cli.demo import ENGINES, MODES, demo
from pd_shadow.demo import demo as whole
from pd_shadow.demo.cluster import Engines, Mode
from pd_shadow.demo.process import ProcessDiedError
from pd_shadow.policy.approach import Approach


def test_help_has_examples_and_exit_codes() -> None:
    text = CliRunner().invoke(demo, ["--help"]).output
    assert "pd-shadow demo --quick" in text
    assert "Exit code 0" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sessions", "0"], "--sessions"),
        (["--engine", "gpu"], "'vllm'"),
        (["--json", "no/such/dir/f.json"], "is not a directory"),
        (["--mode", "split"], "'colocated'"),
        (["--engine", "vllm", "--speed", "2"], "only with --engine emulated"),
        (["--speed", "0"], "--speed"),
        (["--router", "best"], "'gate'"),
        (["--approach", "harvest-sol"], "did you mean 'harvest-slo'?"),
        (["--approach", "host-tier"], "it cannot run here"),
        (["--approach", "oracle"], "only the simulator runs it"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    ("arguments", "engines", "mode", "approach"),
    [
        ([], Engines.EMULATED, Mode.DISAGGREGATED, Approach.HARVEST_SLO),
        (["--engine", "vllm"], Engines.VLLM, Mode.DISAGGREGATED, Approach.HARVEST_SLO),
        (["--mode", "colocated", "--approach", "predictive"], Engines.EMULATED, Mode.COLOCATED, Approach.PREDICTIVE),
        (["--quick", "--approach", "eager"], Engines.EMULATED, Mode.DISAGGREGATED, Approach.EAGER),
    ],
)
def test_engines_mode_and_approach_reach_the_plan(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    engines: Engines,
    mode: Mode,
    approach: Approach,
) -> None:
    plans: list[whole.Plan] = []

    async def seen(plan: whole.Plan, *_: object) -> None:
        plans.append(plan)
        raise RuntimeError("enough")

    monkeypatch.setattr(whole, "run", seen)
    assert CliRunner().invoke(demo, [*arguments, "--keep-logs", str(tmp_path)]).exit_code == 1
    assert [(plan.engines, plan.mode, plan.approach) for plan in plans] == [(engines, mode, approach)]


def test_the_help_names_every_mode_and_approach() -> None:
    text = " ".join(CliRunner().invoke(demo, ["--help"]).output.split())
    assert set(MODES) == set(Mode)
    assert set(ENGINES) == set(Engines)
    assert "no-shadow, harvest, harvest-slo, predictive or eager" in text
    assert {approach.value for approach in whole.APPROACHES} == {
        "no-shadow", "harvest", "harvest-slo", "predictive", "eager"
    }  # fmt: skip


def test_a_dead_engine_is_exit_code_1_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def dies(*_: object) -> None:
        raise ProcessDiedError("demo-small-prefill ended with exit code 1; the end of its log:\n  boom")

    monkeypatch.setattr(whole, "run", dies)
    result = CliRunner().invoke(demo, ["--keep-logs", str(tmp_path)])
    assert result.exit_code == 1
    assert "boom" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
