"""Figures as files."""

import math
from pathlib import Path

import pytest

from pd_shadow.sim.figures.base import Figure, Row

pytest.importorskip("matplotlib")
from pd_shadow.sim import plots

CALLS, HITS = "llm_call_latency_reduction", "hit_rate"


def row(setting: str, metric: str = CALLS, ours: float = 5.0, se: float = 0.5, paper: float | None = None) -> Row:
    return Row("9e", setting, metric, ours, se, 3, paper)


def drawn(rows: list[Row], folder: Path, figure: str = "9e") -> list[str]:
    files = plots.draw([Figure(figure, "Load", [])], rows, folder)
    assert all(file.read_bytes().startswith(b"%PDF") for file in files)
    assert sorted(file.name for file in folder.iterdir()) == sorted(file.name for file in files)
    return [file.name for file in files]


def test_there_is_one_file_per_metric(tmp_path: Path) -> None:
    rows = [row("0.2, harvest-slo", paper=4.4), row("0.9, harvest-slo"), row("0.2, harvest-slo", HITS)]
    assert drawn(rows, tmp_path / "new" / "folder") == [
        "figure-9e-llm-call-latency-reduction.pdf",
        "figure-9e-hit-rate.pdf",
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [row("one")],
        [row("one", se=math.nan)],
        [row("one", ours=math.nan), row("two")],
        [row("one, a", paper=1.0), row("one, b", paper=None), row("two, a"), row("three")],
        [row(f"{point}, {name}") for point in range(8) for name in "ab"],
    ],
)
def test_settings_of_any_kind_can_be_drawn(tmp_path: Path, rows: list[Row]) -> None:
    assert drawn(rows, tmp_path) == ["figure-9e-llm-call-latency-reduction.pdf"]


def test_what_is_not_a_number_is_not_drawn(tmp_path: Path) -> None:
    assert drawn([row("one", ours=math.nan)], tmp_path) == []
    assert drawn([], tmp_path) == []


def test_rows_of_other_figures_are_left_out(tmp_path: Path) -> None:
    assert drawn([row("one")], tmp_path, figure="9d") == []


def test_file_names_have_no_blanks(tmp_path: Path) -> None:
    rows = [row("one")._replace(figure="4-6, 8a-c")]
    (name,) = drawn(rows, tmp_path, figure="4-6, 8a-c")
    assert " " not in name
