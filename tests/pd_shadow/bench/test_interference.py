"""The whole benchmark, with scripted servers in the place of vLLM's."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from pd_shadow.bench import interference as bench
from pd_shadow.bench import load
from pd_shadow.bench.modes import Mode
from pd_shadow.cli.bench_interference import MODES, interference
from pd_shadow.cli.main import main
from pd_shadow.demo import models
from pd_shadow.demo.process import ProcessDiedError
from pd_shadow.engine.vllm.command import EngineCommand

from . import scripted_engine

PLAN = bench.Plan(seconds=0.6, rate=20, rounds=2, routed_requests=2, warm_up_requests=2, warm_up_shadow_seconds=0.01)


def argv(command: EngineCommand) -> list[str]:
    trace = [str(command.plugin.trace_file)] if command.plugin else []
    return [sys.executable, scripted_engine.__file__, str(command.port), *trace]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCommand, "argv", argv)
    monkeypatch.setattr(models, "build", lambda spec, cache: cache)
    monkeypatch.setattr(load, "RETRY_SECONDS", 0.01)


@pytest.mark.usefixtures("scripted")
async def test_every_mode_gets_the_same_requests_and_figures(tmp_path: Path) -> None:
    figures = await bench.run(PLAN, tmp_path / "run", tmp_path, Console(quiet=True))
    figures = json.loads(json.dumps(figures))
    assert list(figures["modes"]) == [mode.value for mode in Mode]
    assert figures["failed"] == 0
    counts = {mode["requests"] for mode in figures["modes"].values()}
    assert len(counts) == 1
    assert counts.pop() > 0
    assert figures["modes"]["no_shadow"]["shadow_tokens_per_s"] == 0
    assert all(figures["modes"][mode]["shadow_tokens_per_s"] > 0 for mode in ("plugin", "stock_low", "stock_equal"))
    assert figures["modes"]["plugin"]["over_budget_share"] == 1.0
    assert figures["modes"]["stock_low"]["over_budget_share"] is None
    assert len(figures["routed"]["stretch_by_pass"]) == PLAN.rounds
    assert figures["routed"]["tpot"]["with_shadow"]["n"] == PLAN.rounds * PLAN.routed_requests
    assert None not in figures["verdicts"].values()
    assert figures["config"]["seed"] == figures["seed"] == 1
    assert figures["engine"]["plugin"]["minimum_tokens"] == PLAN.minimum_tokens
    assert figures["engine"]["plugin"]["slo"]["tpot_floor_seconds"] == figures["slo"]["tpot_floor_s"]


@pytest.mark.usefixtures("scripted")
async def test_a_part_of_the_modes(tmp_path: Path) -> None:
    plan = replace(PLAN, modes=(Mode.STOCK_LOW,))
    figures = await bench.run(plan, tmp_path / "run", tmp_path, Console(quiet=True))
    assert list(figures["modes"]) == ["stock_low"]
    assert figures["routed"] is None
    assert set(figures["verdicts"].values()) == {None}
    assert figures["engine"]["plugin"] is None


@pytest.mark.usefixtures("scripted")
async def test_an_engine_that_ends_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCommand, "argv", lambda command: [sys.executable, "-c", "raise SystemExit('no model')"])
    with pytest.raises(ProcessDiedError, match=r"no_shadow engine ended with exit code 1(?s:.*)no model"):
        await bench.run(PLAN, tmp_path / "run", tmp_path, Console(quiet=True))


def test_modes_differ_by_the_plugin_only(tmp_path: Path) -> None:
    commands = bench.engine_commands(bench.Plan(), tmp_path, tmp_path / "trace")
    shapes = {mode: command.model_dump(exclude={"port", "plugin"}) for mode, command in commands.items()}
    assert all(shape == shapes[Mode.NO_SHADOW] for shape in shapes.values())
    assert [mode for mode, command in commands.items() if command.plugin is not None] == [Mode.PLUGIN]
    assert len({command.port for command in commands.values()}) == len(Mode)


# Whoever runs the tests in the background may have them ignore Ctrl-C. Not set by preexec_fn: a fork that runs Python
# while other threads are inside gRPC dies now and then.
INTERRUPTED = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
import pytest
from tests.pd_shadow.bench import test_interference as test
patch = pytest.MonkeyPatch()
patch.setattr(test.EngineCommand, "argv", test.argv)
patch.setattr(test.models, "build", lambda spec, cache: cache)
patch.setattr(test.bench.Plan, "quick", classmethod(lambda cls: cls(seconds=600)))
test.interference(["--quick", "--keep-logs", sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_it_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED, str(tmp_path), cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    while len(children := psutil.Process(process.pid).children()) < len(Mode):
        assert process.returncode is None, await process.communicate()
        await asyncio.sleep(0.05)
    # A trace means that the plugin's engine is at work.
    while not (tmp_path / "plugin-trace.jsonl").exists():
        assert process.returncode is None, await process.communicate()
        await asyncio.sleep(0.05)
    process.send_signal(number)
    output, _ = await process.communicate()
    assert process.returncode == 130, output.decode()
    assert b"interrupted; everything is stopped" in output
    assert not [child for child in children if child.is_running()]


def test_help_has_modes_examples_and_exit_codes() -> None:
    text = " ".join(CliRunner().invoke(main, ["bench", "interference", "--help"]).output.split())
    assert "pd-shadow bench interference --quick" in text
    assert "Exit code 0" in text
    assert all(mode in text for mode in MODES)


def test_the_command_knows_every_mode_without_importing_the_benchmark() -> None:
    assert tuple(mode.value for mode in Mode) == MODES


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--mode", "eager"], "--mode"),
        (["--seconds", "0"], "--seconds"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "many"], "--rate"),
        (["--seed", "x"], "--seed"),
        (["--tpot-floor", "0"], "--tpot-floor"),
        (["--minimum-tokens", "0"], "--minimum-tokens"),
        (["--json", "no/such/dir/f.json"], "--json"),
        (["--verbose"], "--verbose"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_option(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(interference, arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_a_dead_engine_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def dies(*_: object) -> None:
        raise ProcessDiedError("plugin engine ended with exit code 1; the end of its log:\n  boom")

    monkeypatch.setattr(bench, "run", dies)
    result = CliRunner().invoke(interference, ["--keep-logs", str(tmp_path)])
    assert result.exit_code == 1
    assert "boom" in result.output
