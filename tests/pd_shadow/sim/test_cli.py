"""`pd-shadow simulate` from the outside."""

import contextlib
import csv
import json
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from pd_shadow.cli import simulate as command
from pd_shadow.sim import results, runner, simulation
from pd_shadow.sim.capacity import Capacities, Capacity
from pd_shadow.sim.config import RunConfig

from .rig import MODELS, Inline

RUN = {"models": list(MODELS), "seconds": 5, "warm_up_seconds": 1, "instances": 2, "sessions_per_second": 0.5}


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command.simulate, [str(each) for each in arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the capacities of RUN are known."""
    made = tmp_path / "results"
    made.mkdir()
    known = Capacities(made / "capacities.json")
    for mode, split in (("colocated", None), ("disaggregated", 1)):
        for name in MODELS:
            known.add(RunConfig.model_validate({**RUN, "mode": mode}), name, Capacity(0.5, split))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path, **fields: object) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, **fields}))
    return file


def test_help_has_examples_and_exit_codes() -> None:
    text = invoke("--help").output
    assert "pd-shadow simulate --preset 8d --quick" in text
    assert "pd-shadow simulate --config run.yaml --what-if" in text
    assert "Exit code 0: simulated. 1: a run failed. 2: wrong usage or configuration. 130: interrupted." in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --preset (one of the paper's figures) or --config"),
        (["--preset", "8d", "--config", "run.yaml"], "give --preset (one of the paper's figures) or --config"),
        (["--preset", "8c"], "'8c' is not one of '2', '4'"),
        (["--preset", "8d", "--what-if"], "--what-if: needs --config"),
        (["--preset", "8d", "--seeds", "0"], "--seeds"),
        (["--preset", "8d", "--seconds", "nan"], "--seconds: nan is no duration"),
        (["--preset", "8d", "--window", "night"], "'peak', 'median', 'trough'"),
        (["--preset", "8d", "--idle-watts", "100"], "'75', '300'"),
        (["--preset", "8d", "--json", "no/such/dir/f.json"], "--json: no/such/dir is not a directory"),
        (["--preset", "8d", "--csv", "no/such/dir/f.csv"], "--csv: no/such/dir is not a directory"),
        (["--config", "run.yaml", "--window", "peak"], "--window, --pairs, --trace, --evicts: only with --preset"),
        (["--config", "run.yaml", "--trace", "FusionBench"], "only with --preset"),
        (["--config", "run.yaml", "--evicts", "blocks"], "only with --preset"),
        (["--config", "no-such.yaml"], "no-such.yaml: No such file or directory"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lode": 1}, "lode: unknown key; did you mean 'mode'?"),
        ({"instances": 1}, "instances: a disaggregated model needs 2 at least"),
        ({"models": ["L8", "L-9000"]}, "models: unknown model 'L-9000'; did you mean"),
        ({"trace": "Fusionbench"}, "trace: unknown 'Fusionbench'; did you mean 'FusionBench'?"),
        ({"router": "markov"}, "switch_probability: needed with router: markov"),
        ({"approach": "no-shadow"}, "approach: no-shadow is what the others are compared with"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, folder: Path, fields: dict[str, object], says: str
) -> None:
    result = invoke("--config", written(tmp_path, **fields), "--folder", folder)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.splitlines()) == 1


def test_what_is_no_text_is_told_with_its_file(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe")
    result = invoke("--config", file, "--folder", folder)
    assert result.exit_code == 2
    assert f"{file}: " in result.output


@pytest.mark.parametrize("option", ["--folder", "--plot"])
def test_folders_that_cannot_be_are_exit_code_2(tmp_path: Path, file: Path, folder: Path, option: str) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        result = invoke("--config", file, "--folder", folder, option, place)
        assert result.exit_code == 2
        assert option in result.output


def test_a_configuration_is_compared_with_no_shadow(tmp_path: Path, file: Path, folder: Path) -> None:
    rows_file, table_file, plots = tmp_path / "rows.json", tmp_path / "rows.csv", tmp_path / "plots"
    arguments = ["--config", file, "--folder", folder, "--seeds", "1", "--jobs", "1"]
    result = invoke(*arguments, "--json", rows_file, "--csv", table_file, "--plot", plots)
    assert result.exit_code == 0, result.output
    assert "disaggregated" in result.output
    rows = json.loads(rows_file.read_text())
    assert {row["setting"] for row in rows} == {"disaggregated, harvest-slo"}
    assert {row["se"] for row in rows} == {None}
    by_metric = {row["metric"]: row["ours"] for row in rows}
    assert by_metric["hit_rate"] > 0
    with table_file.open() as table:
        assert {row["metric"]: float(row["ours"]) for row in csv.DictReader(table)} == by_metric
    assert len(list(plots.glob("*.pdf"))) == len(rows)
    # What is there is not run again, and is the same.
    kept = rows_file.read_text()
    assert invoke(*arguments, "--json", rows_file).exit_code == 0
    assert rows_file.read_text() == kept


def test_what_if_tells_every_approach_on_both_kinds_of_cluster(tmp_path: Path, file: Path, folder: Path) -> None:
    rows_file = tmp_path / "rows.json"
    result = invoke(
        "--config", file, "--what-if", "--folder", folder, "--seeds", "1", "--jobs", "1", "--json", rows_file
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    settings = {row["setting"] for row in json.loads(rows_file.read_text())}
    assert len(settings) == 10 + 9
    assert {"colocated, dedicated", "disaggregated, warm-first"} <= settings


def test_overloaded_runs_are_told(tmp_path: Path, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "LEAST_DRAIN_SECONDS", 1.0)
    monkeypatch.setattr(simulation, "LONGEST_DRAIN", 0.5)
    monkeypatch.setattr(command, "_executor", lambda dask, jobs: contextlib.nullcontext(Inline()))
    result = invoke("--config", file, "--folder", folder, "--seeds", "1")
    assert result.exit_code == 0, result.output
    assert "2 of 2 runs were overloaded" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("a request of 9 tokens does not fit"), 1, "error: a request of 9 tokens does not fit"),
        (OSError("no space left"), 1, "error: no space left"),
        (MemoryError(), 1, "error: out of memory"),
        (BrokenExecutor(), 1, "try fewer --jobs"),
        (KeyboardInterrupt(), 130, "interrupted; what is finished is in"),
    ],
)
def test_a_run_that_fails_is_one_line_and_an_exit_code(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(runner, "execute", fails)
    result = invoke("--config", file, "--folder", folder)
    assert result.exit_code == code
    assert says in result.output
    assert "Traceback" not in result.output


def test_seeds_and_seconds_of_the_command_line_win(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunConfig] = []

    def seen(configs: list[RunConfig], *_: object) -> dict[RunConfig, object]:
        asked.extend(configs)
        return {}

    monkeypatch.setattr(runner, "execute", seen)
    assert invoke("--config", file, "--folder", folder, "--seeds", "2", "--seconds", "7").exit_code == 0
    assert {(config.seed, config.seconds) for config in asked} == {(0, 7.0), (1, 7.0)}
    asked.clear()
    assert invoke("--preset", "8d", "--preset", "8d", "--quick", "--folder", folder).exit_code == 0
    assert {(config.seed, config.window, config.seconds) for config in asked} == {(0, "peak", 200.0)}
    assert len(asked) == len(set(asked)) == 4 * 2 * 3
    assert results.load(folder, asked[0]) is None
