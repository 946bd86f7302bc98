"""`pd-shadow bench transfer`: which rows its options mean, and what it makes of them."""

import asyncio
import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from pd_shadow.bench.transfer import MODELS, Plan, Sweep, kv_layout, usual_cases
from pd_shadow.bench.transfer_report import build, plot, render, write_csv
from pd_shadow.cli.main import main
from pd_shadow.perf import models
from tests.transfer.bench.rows import row
from transfer.bench.contention import Contention, Side
from transfer.bench.drills import Drill
from transfer.transport.base import TransportError

# Whoever runs the tests in the background may have them ignore Ctrl-C. Not set by preexec_fn: a fork that runs Python
# while other threads are inside gRPC dies now and then.
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from pd_shadow.cli.main import main; main()"
)
SIDE = Side(200, 0.010, 0.010, 0.011, 0.012, 0.02)
CROSSED = Contention(SIDE, SIDE._replace(mean_s=0.0104, p99_s=0.020), 0.01, 0.009, 5.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_tokens", [16, 128])
def test_a_models_blocks_hold_its_kv(name: str, block_tokens: int) -> None:
    layout = kv_layout(name, block_tokens)
    assert layout.block_bytes == block_tokens * models.model(name).kv_bytes_per_token


def test_descriptors_are_those_of_vllms_blocks() -> None:
    """64 KB and 512 KB of Llama 3.1 8B, half as much of Qwen2.5 7B with half the KV heads."""
    assert [kv_layout(name, tokens).plane_bytes >> 10 for name in MODELS for tokens in (16, 128)] == [64, 512, 32, 256]


def test_a_block_of_stated_bytes_is_one_descriptor() -> None:
    assert kv_layout(MODELS[0], 16, block_bytes=1 << 20, layers=2).plane_bytes == 1 << 20


def test_a_sweep_is_every_combination() -> None:
    sweep = Sweep(models=MODELS, block_tokens=(16, 128), directions=("write", "read"), run_lengths=(0, 1))
    cases = sweep.cases()
    assert len(set(cases)) == len(cases) == 16


def test_the_usual_cases_hold_both_models_both_blocks_and_tcp() -> None:
    cases = usual_cases()
    assert {(case.model, case.layout.block_tokens, case.tcp) for case in cases} == {
        (name, tokens, tcp) for name in MODELS for tokens in (16, 128) for tcp in (False, True)
    }


def test_what_does_not_fit_into_memory_is_refused_before_it_is_tried() -> None:
    with pytest.raises(
        ValueError, match=r"--chunk-tokens: 4096 tokens of .* need 2.1 GB of memory and 1.0 GB are free"
    ):
        Plan(cases=Sweep().cases()).check(10**9)
    with pytest.raises(ValueError, match=r"--chunk-tokens: a chunk of 8.6 GB is too large"):
        Plan(cases=Sweep(chunk_tokens=(65536,)).cases()).check(10**15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "L9"], "did you mean 'L8'"),
        (["--run-length", "0"], "--run-length"),
        (["--layers", "33", "--model", "L8"], "--layers: 33 is not in 1…32"),
        (["--block-bytes", "100"], "--block-bytes: 100 are no whole bytes"),
        (["--chunk-tokens", "100", "--block-size", "16"], "--chunk-tokens: 100 are no whole blocks of 16 tokens"),
        (["--no-sweep"], "--no-sweep: leaves nothing to measure"),
        (["--no-sweep", "--model", "L8", "--drills"], "--no-sweep: not with options"),
        (["--csv", "/nowhere/rows.csv"], "--csv: /nowhere is not a directory"),
        (["--plot", "rows.txt"], "--plot: rows.txt does not end in"),
    ],
)
def test_wrong_usage_names_the_option(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "transfer", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_figures_are_data_with_verdicts(tmp_path: Path) -> None:
    figures = build([row(), row(descriptors_after=8192, ratio_to_limit=0.8)], CROSSED, [Drill("a", 0.1, True, "")], 1)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["rows"][0]["verdicts"][0]["reason"] == "near_limit"
    assert figures["rows"][1]["verdicts"][0]["reason"] == "descriptor_size"
    assert figures["limits"]["single_copy"]["median_gb_per_s"] == 13.0
    assert not figures["failed"]
    write_csv(figures, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as stream:
        assert [each["verdicts"] for each in csv.DictReader(stream)] == ["near_limit", "descriptor_size"]


def test_contention_is_judged_by_one_chunk_and_five_percent() -> None:
    good = build([], CROSSED, [], 1)["contention"]["verdicts"]
    assert good == {"p99_within_one_chunk": True, "mean_within_5_percent": True}
    late = CROSSED._replace(with_shadow=SIDE._replace(mean_s=0.0106, p99_s=0.0211))
    bad = build([], late, [], 1)["contention"]["verdicts"]
    assert bad == {"p99_within_one_chunk": False, "mean_within_5_percent": False}


def test_a_drill_that_ends_otherwise_fails_the_run() -> None:
    assert build([], None, [Drill("peer_killed", 0.1, False, "deadline")], 1)["failed"]


def test_a_person_reads_rows_waits_and_drills() -> None:
    console = Console(record=True, width=200, force_terminal=False)
    render(build([row()], CROSSED, [Drill("peer_hung", 0.5, False, "[late]")], 1), console)
    text = console.export_text()
    for said in ("L3.1-8B 512 MB, 16, 256", "8192 → 32", "nothing to gain", "Longest wait", "peer_hung", "[late]"):
        assert said in text


def test_rows_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(build([row()], None, [], 1), tmp_path / "rows.svg")
    assert "</svg>" in (tmp_path / "rows.svg").read_text()


def test_a_small_row_with_nixlbenchs_names_over_both_backends(tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    out = tmp_path / "figures.json"
    arguments = ["--model", "L8", "--layers", "1", "--isl", "256", "--op_type", "WRITE", "--num_iter", "2"]
    arguments += ["--backend", "UCX", "--backend", "tcp", "--json", str(out)]
    # UCX reads where to log when the first agent of a process is made.
    command = [sys.executable, "-c", COMMAND, "bench", "transfer", *arguments]
    result = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    free, held = json.loads(out.read_text())["rows"]
    assert (free["backend"], free["descriptor_bytes"]) == ("ucx", 65536)
    assert (held["backend"], held["descriptor_bytes"]) == ("tcp", 65536)
    assert ("cma" in free["lanes"]) == (free["limit"] == "single_copy")
    assert "tcp" in held["lanes"]
    assert "cma" not in held["lanes"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_it_leaves_no_process_behind(number: signal.Signals) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    sweep = ["--model", "L8", "--layers", "1", "--chunk-tokens", "256", "--repeat", "10000", "--backend", "tcp"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COMMAND, "bench", "transfer", *sweep, cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    while not (children := receivers(process.pid)):
        assert process.returncode is None, await process.communicate()
        await asyncio.sleep(0.02)
    process.send_signal(number)
    output, _ = await process.communicate()
    assert process.returncode == 130, output.decode()
    assert b"interrupted; everything is stopped" in output
    assert psutil.wait_procs(children, timeout=10)[1] == []


def receivers(parent: int) -> list[psutil.Process]:
    """The benchmark's other process, without Python's resource tracker."""
    return [child for child in psutil.Process(parent).children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize("lines", [["--drills"], ["--contention", "--quick"]])
def test_parts_without_a_sweep_are_all_there_is(tmp_path: Path, lines: list[str]) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    out = tmp_path / "figures.json"
    result = CliRunner().invoke(main, ["bench", "transfer", "--no-sweep", *lines, "--json", str(out)])
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert figures["rows"] == []
    assert lines[0].removeprefix("--") in figures


def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise TransportError("NIXL is not installed (pip install 'pd-shadow[transfer]')")

    monkeypatch.setattr("pd_shadow.bench.transfer.run_case", missing)
    result = CliRunner().invoke(main, ["bench", "transfer", "--quick"])
    assert result.exit_code == 1
    assert "error: NIXL is not installed (pip install 'pd-shadow[transfer]')" in result.output
