"""The paper's figures as sets of runs."""

from collections import Counter
from dataclasses import replace

import pytest

from pd_shadow.cli.simulate import FIGURES as NAMED
from pd_shadow.cli.simulate import TRACES, WINDOWS
from pd_shadow.perf.energy import LOW_IDLE
from pd_shadow.perf.models import Trace
from pd_shadow.policy.approach import Approach
from pd_shadow.sim.compare import metrics
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.demand import accuracy
from pd_shadow.sim.figures import own
from pd_shadow.sim.figures.accuracy import GAIN
from pd_shadow.sim.figures.assumptions import ENERGY_HIGH_IDLE, ENERGY_LOW_IDLE
from pd_shadow.sim.figures.base import Figure, Scale, pairs_of, setups
from pd_shadow.sim.figures.catalogue import FIGURES, figure_named
from pd_shadow.sim.kv_pool import EvictionUnit
from pd_shadow.sim.simulation import check
from pd_shadow.sim.workload.traffic import Window

from .rig import outcome, tiny

SMALL = Scale(seeds=1, windows=("peak",))
KNOWN = {metric.name for metric in metrics(LOW_IDLE)}


def test_the_command_names_every_figure_and_hour() -> None:
    assert set(NAMED) == set(FIGURES)
    assert set(WINDOWS) == set(Window)
    assert set(TRACES) == set(Trace)


@pytest.mark.parametrize("name", NAMED)
def test_every_preset_builds_runs_that_can_be_made(name: str) -> None:
    figure = figure_named(name, replace(SMALL, most_pairs=1))
    known = {metric.name for metric in figure.metrics(LOW_IDLE)}
    assert set(figure.shown) <= known
    assert len({setting.name for setting in figure.settings}) == len(figure.settings)
    for setting in figure.settings:
        assert setting.pairs
        assert set(setting.paper) <= known
        for base, other in setting.pairs:
            assert base.approach is Approach.NO_SHADOW
            assert other != base
            same = ("models", "trace", "mode", "seed", "window", "load", "seconds", "instances", "prefill_instances")
            assert all(getattr(base, field) == getattr(other, field) for field in same)
    for config in {(each.models, each.trace, each.router, each.normal): each for each in figure.configs}.values():
        check(config)


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"table1", "table2", "table5"}))
def test_one_trace_is_enough(name: str) -> None:
    figure = figure_named(name, replace(SMALL, most_pairs=1, traces=(Trace.GHCP_CODING,)))
    assert {config.trace for config in figure.configs} == {"GHCP-coding"}


def test_pools_make_room_as_the_scale_says() -> None:
    assert {config.evicts for config in figure_named("8d", SMALL).configs} == {EvictionUnit.ENTRIES}
    blocks = replace(SMALL, evicts=EvictionUnit.BLOCKS)
    assert {config.evicts for config in figure_named("table5", blocks).configs} == {EvictionUnit.BLOCKS}


def test_tables_without_runs() -> None:
    for name in ("table1", "table2"):
        figure = figure_named(name, SMALL)
        assert figure.configs == []
        rows = figure.rows({}, LOW_IDLE)
        assert {row.figure for row in rows} == {figure.name}
        assert all(row.paper is not None and row.ours == pytest.approx(row.paper, rel=0.15) for row in rows)


def test_accuracy_is_told_against_always_expensive() -> None:
    figure = figure_named("7", replace(SMALL, most_pairs=1, traces=(Trace.FUSIONBENCH,)))
    assert {base.router for setting in figure.settings for base, _ in setting.pairs} == {"always-expensive"}
    base, _ = figure.settings[0].pairs[0]
    calls = outcome(approach=Approach.NO_SHADOW).calls
    results = {config: replace(outcome(), config=config, calls=calls) for config in figure.configs}
    rows = {(row.setting, row.metric): row.ours for row in figure.rows(results, LOW_IDLE)}
    # The two models are right on different queries.
    for setting in figure.settings:
        better = rows[setting.name, GAIN]
        assert better == pytest.approx(rows[setting.name, "accuracy"] - accuracy(base))
        assert better > 3 if "router" in setting.name else better < 5


def test_assumptions_are_told_for_both_idle_powers() -> None:
    figure = figure_named("assumptions", SMALL)
    results = {config: outcome(approach=config.approach) for config in figure.configs}
    rows = {row.metric: row.ours for row in figure.rows(results, LOW_IDLE)}
    assert rows[ENERGY_LOW_IDLE] != rows[ENERGY_HIGH_IDLE]


def test_an_unknown_figure_is_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown figure '8x'; did you mean '8d'"):
        figure_named("8x", SMALL)


def test_the_papers_pairs() -> None:
    assert len(pairs_of(Scale())) == 22
    assert len(pairs_of(Scale(most_pairs=1))) == len({pair.trace for pair in pairs_of(Scale())}) == 4
    assert [pair.trace for pair in setups(SMALL)] == [pair.trace for pair in pairs_of(Scale(most_pairs=1))]
    figure = figure_named("8d", SMALL)
    assert {len(setting.pairs) for setting in figure.settings} == {22}
    for base, _ in figure.settings[0].pairs:
        check(base)


def test_seeds_windows_and_time_are_those_of_the_scale() -> None:
    figure = figure_named("8d", Scale(seeds=2, windows=("peak", "trough"), seconds=50, most_pairs=1))
    (first, *_) = figure.settings
    ran = Counter((other.seed, other.window) for _, other in first.pairs)
    assert ran == {(seed, window): 4 for seed in (0, 1) for window in ("peak", "trough")}
    assert {config.seconds for config in figure.configs} == {50}


def test_the_coding_trace_runs_for_longer() -> None:
    seconds = {config.trace: config.seconds for config in figure_named("8d", SMALL).configs}
    assert seconds.pop("GHCP-coding") > max(seconds.values())


def test_settings_share_their_runs() -> None:
    figure = figure_named("8d", replace(SMALL, most_pairs=1))
    # Per pair and kind of cluster No Shadow, Harvest-SLO and the oracle.
    assert len(figure.configs) == 4 * 2 * 3
    groups = figure_named("4", replace(SMALL, most_pairs=1))
    assert len(groups.configs) == 4 * len(Approach)


@pytest.mark.parametrize("name", ["9f", "9g", "15d", "15e", "15f", "15g", "15h"])
def test_one_baseline_does_for_what_it_does_not_use(name: str) -> None:
    figure = figure_named(name, SMALL)
    bases = [config for config in figure.configs if config.approach is Approach.NO_SHADOW]
    assert len(bases) == len(setups(SMALL))


@pytest.mark.parametrize(("name", "points"), [("9d", 4), ("9e", 4), ("16a", 4), ("16b", 2), ("16c", 3), ("16g", 5)])
def test_and_not_for_what_it_does(name: str, points: int) -> None:
    figure = figure_named(name, SMALL)
    bases = [config for config in figure.configs if config.approach is Approach.NO_SHADOW]
    assert len(bases) == points * len(setups(SMALL))


def test_rows_are_means_over_pairs_and_errors_over_repetitions() -> None:
    figure = own.comparison(tiny(), Scale(seeds=2))
    results = {config: outcome(approach=config.approach, seed=config.seed) for config in figure.configs}
    rows = figure.rows(results, LOW_IDLE)
    assert [row.metric for row in rows] == list(figure.shown)
    assert {row.runs for row in rows} == {2}
    alone = own.comparison(tiny(), Scale(seeds=1)).rows(results, LOW_IDLE)
    assert [row.se == row.se for row in alone] == [False] * len(alone)
    other = own.comparison(tiny(seed=1), Scale(seeds=1)).rows(results, LOW_IDLE)
    for row, one, two in zip(rows, alone, other, strict=True):
        assert row.ours == pytest.approx((one.ours + two.ours) / 2)
        assert row.se == pytest.approx(abs(one.ours - two.ours) / 2)


def test_a_setting_whose_runs_are_not_there_has_no_rows() -> None:
    figure = own.comparison(tiny(), Scale(seeds=1))
    assert figure.rows({}, LOW_IDLE) == []
    assert figure.rows({tiny(): outcome()}, LOW_IDLE) == []


def test_a_figure_without_a_choice_of_metrics_has_all() -> None:
    chosen = own.comparison(tiny(), Scale(seeds=1))
    figure = Figure("all", "All", chosen.settings)
    results = {config: outcome(approach=config.approach) for config in figure.configs}
    assert {row.metric for row in figure.rows(results, LOW_IDLE)} == KNOWN


def test_no_shadow_is_compared_with_nothing() -> None:
    with pytest.raises(ValueError, match=r"^approach: no-shadow is what the others are compared with"):
        own.comparison(tiny(approach="no-shadow"), SMALL)


def test_what_if_is_every_approach_on_both_kinds_of_cluster() -> None:
    figure = own.what_if(tiny(prefill_instances=1, approach="eager"), SMALL)
    ran = Counter((config.mode, config.approach) for config in figure.configs)
    every = {(mode, approach): 1 for mode in Mode for approach in Approach}
    del every[Mode.DISAGGREGATED, Approach.DEDICATED]
    assert ran == every
    assert {config.prefill_instances for config in figure.configs if config.mode is Mode.DISAGGREGATED} == {1}


def test_what_if_needs_instances_for_both_kinds() -> None:
    with pytest.raises(ValueError, match=r"^instances: 2 at least for --what-if"):
        own.what_if(RunConfig(models=("L8", "L70"), mode=Mode.COLOCATED, instances=1), SMALL)
