"""From phases to figures, verdicts and the table."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from pd_shadow.bench import report
from pd_shadow.bench.modes import Mode
from pd_shadow.bench.samples import Leg, Phase, Sample
from pd_shadow.bench.slo import Isolated, Slo
from pd_shadow.demo.models import SMALL
from pd_shadow.engine.settings import SloSettings
from pd_shadow.engine.steps import StepRecord
from pd_shadow.policy.base import StepReason

SLO = Slo(Isolated([(100, 0.02)], 0.002), SloSettings())


def sample(ttft: float = 0.1, tpot: float = 0.01, tokens: int = 5) -> Sample:
    return Sample(100, tuple(ttft + tpot * n for n in range(tokens)))


def phase(samples: Sequence[Sample] = (), tokens: Sequence[int] = (), opened: float = 0.0) -> Phase:
    legs = [Leg(opened + 1.0, each, "done") for each in tokens]
    return Phase(opened, opened + 10.0, list(samples), legs)


def build(
    phases: Mapping[Mode, Sequence[Phase]],
    routed: Sequence[tuple[Phase, Phase]] = (),
    records: Sequence[StepRecord] | None = None,
) -> dict[str, Any]:
    figures = report.build(
        SLO, phases, routed, records, seed=4, config={"rate": 4}, engine={"block_size": 128}, model=SMALL
    )
    parsed: dict[str, Any] = json.loads(json.dumps(figures))
    return parsed


def test_a_mode_is_figured_over_all_of_its_phases() -> None:
    gap = Sample(100, (0.1, 0.11, 0.91))
    modes = build({Mode.STOCK_LOW: [phase([sample()] * 3, [4096]), phase([gap], [4096, 1808], opened=20.0)]})["modes"]
    low = modes["stock_low"]
    assert low["ttft_s"]["n"] == low["requests"] == 4
    assert low["ttft_s"]["p50"] == pytest.approx(0.1)
    assert low["longest_gap_s"]["max"] == pytest.approx(0.8)
    assert low["longest_gap_s"]["p99"] < 0.8
    assert low["slo_attainment"] == 0.75
    assert low["shadow_tokens_per_s"] == 500.0
    assert low["shadow_legs_by_end"] == {"done": 3}
    assert low["over_budget_share"] is None


def test_failed_requests_are_counted_shown_and_missed_slos() -> None:
    figures = build({Mode.NO_SHADOW: [phase([sample(), Sample(100, error="HTTP 500: no")])]})
    assert figures["failed"] == figures["modes"]["no_shadow"]["failed"] == 1
    assert figures["errors"] == ["HTTP 500: no"]
    assert figures["modes"]["no_shadow"]["slo_attainment"] == 0.5
    assert figures["modes"]["no_shadow"]["ttft_s"]["n"] == 1


def test_only_the_plugin_has_a_trace_and_only_of_its_own_phases() -> None:
    records = [StepRecord(at, StepReason.IDLE, 0.05, 256, 0, 0.04, 0.06) for at in (5.0, 15.0, 25.0)]
    modes = build({Mode.PLUGIN: [phase(opened=0.0), phase(opened=20.0)], Mode.STOCK_LOW: [phase()]}, records=records)[
        "modes"
    ]
    assert modes["plugin"]["steps_by_reason"] == {"idle": 2}
    assert modes["plugin"]["over_budget_seconds_mean"] == pytest.approx(0.01)
    assert modes["stock_low"]["steps_by_reason"] is None


def test_the_stretch_of_routed_calls_is_over_tokens_not_requests() -> None:
    # One call of 100 decode tokens that is not stretched, one of 10 that takes twice as long.
    before = phase([sample(tpot=0.01, tokens=101), sample(tpot=0.01, tokens=11)])
    after = phase([sample(tpot=0.01, tokens=101), sample(ttft=0.2, tpot=0.02, tokens=11)], [1000])
    routed = build({Mode.PLUGIN: [phase()]}, [(before, after), (before, before)])["routed"]
    assert routed["stretch"] == pytest.approx(1.0 + 0.1 / 2.2, abs=1e-4)
    assert routed["stretch_by_pass"] == [pytest.approx(1.2 / 1.1, abs=1e-4), 1.0]
    assert (routed["bound"], routed["within_bound"]) == (pytest.approx(1.025), False)
    assert routed["ttft"]["with_shadow"]["p50"] == pytest.approx(0.1)
    assert routed["tpot"]["without_shadow"]["mean"] == pytest.approx(0.01)
    assert routed["shadow_tokens_per_s"] == 50.0


def figures_of(attainment: float, ttft_p99: float, tokens: float) -> dict[str, Any]:
    return {"slo_attainment": attainment, "ttft_s": {"p99": ttft_p99, "n": 9}, "shadow_tokens_per_s": tokens}


def test_verdicts() -> None:
    modes = {
        "no_shadow": figures_of(0.9, 0.100, 0.0),
        "plugin": figures_of(0.9, 0.110, 900.0),
        "stock_low": figures_of(0.5, 2.0, 1000.0),
    }
    assert report.verdicts(modes, 0.0125) == {
        "slo_not_below_no_shadow": True,
        "ttft_p99_within_one_iteration": True,
        "shadow_throughput_vs_stock_low": 0.9,
    }
    worse = report.verdicts({**modes, "plugin": figures_of(0.8999, 0.113, 900.0)}, 0.0125)
    assert (worse["slo_not_below_no_shadow"], worse["ttft_p99_within_one_iteration"]) == (False, False)


def test_no_verdict_without_its_modes_or_requests() -> None:
    plugin = figures_of(0.9, 0.1, 900.0)
    assert set(report.verdicts({"plugin": plugin}, 0.01).values()) == {None}
    empty = {"slo_attainment": None, "ttft_s": {"p99": None, "n": 0}, "shadow_tokens_per_s": 0.0}
    assert set(report.verdicts({"plugin": plugin, "no_shadow": empty, "stock_low": empty}, 0.01).values()) == {None}


def test_one_iteration_is_half_the_tpot_slo() -> None:
    assert report.one_iteration(SLO) == pytest.approx(0.0125)


def test_the_table_shows_every_mode_the_slos_and_what_they_are_worth() -> None:
    out = io.StringIO()
    whole = {mode: [phase([sample()], [4096])] for mode in Mode}
    report.render(build(whole, [(phase([sample()]), phase([sample()]))], []), Console(file=out, width=160))
    text = out.getvalue()
    assert all(mode.value in text for mode in Mode)
    assert "25.0 ms" in text
    assert "plugin to stock_low: 1.00" in text
    assert "cannot show" in text


def test_the_table_says_what_is_missing_instead_of_failing() -> None:
    out = io.StringIO()
    report.render(build({Mode.STOCK_EQUAL: [phase()]}), Console(file=out, width=160))
    assert "plugin to stock_low: -" in out.getvalue()
