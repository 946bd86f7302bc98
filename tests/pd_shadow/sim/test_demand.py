"""What a run is asked, from the names in its configuration."""

from pathlib import Path

import pytest

from pd_shadow.sim import demand
from pd_shadow.sim.demand import NormalTraffic
from pd_shadow.sim.simulation import check
from pd_shadow.sim.workload.matrix_routers import CalibratedRouter, MatrixRouter
from pd_shadow.sim.workload.routers import AlwaysRouter, MarkovRouter, RandomRouter

from .rig import tiny

WINDOW = 131_072


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("default", CalibratedRouter),
        ("accuracy-per-cost", MatrixRouter),
        ("max-accuracy", MatrixRouter),
        ("random", RandomRouter),
        ("markov", MarkovRouter),
        ("always-cheap", AlwaysRouter),
    ],
)
def test_routers_by_name(name: str, made: type) -> None:
    assert isinstance(demand.router(tiny(router=name, switch_probability=0.1)), made)


def test_all_calls_go_to_the_model_with_the_lowest_or_highest_price() -> None:
    models = ("Llama-3.1-70B-Instruct", "Llama-3.1-8B-Instruct", "Mixtral-8x22B-Instruct-v0.1")
    for name, index in (("always-cheap", 1), ("always-expensive", 2)):
        assert demand.router(tiny(router=name, models=models)) == AlwaysRouter(index)


def test_routing_by_scores_beats_each_model_and_guessing_has_no_accuracy() -> None:
    per_cost, most, cheap, expensive = (
        demand.accuracy(tiny(router=name))
        for name in ("accuracy-per-cost", "max-accuracy", "always-cheap", "always-expensive")
    )
    assert 0 < max(cheap, expensive) < per_cost <= most < 100
    assert demand.accuracy(tiny()) == per_cost
    with pytest.raises(ValueError, match=r"^router: random chooses without looking"):
        demand.accuracy(tiny(router="random"))


def test_a_markov_router_needs_its_probability() -> None:
    with pytest.raises(ValueError, match=r"^switch_probability: needed with router: markov"):
        demand.router(tiny(router="markov"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"router": "markof"}, "^router: unknown 'markof'; did you mean 'markov'"),
        ({"models": ("L8", "Llama-9B")}, "^router: default cannot route.*unknown model 'Llama-9B'"),
        ({"models": ("L8", "L8")}, "^router: default cannot route.*its stand-ins are taken"),
    ],
)
def test_a_router_that_cannot_be(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        demand.router(tiny(**fields))


def test_outputs_are_scaled_and_nothing_else() -> None:
    plain, short = (demand.sessions(tiny(output_scale=scale), 100, WINDOW) for scale in (1, 0.25))
    outputs = [sum(call.output_tokens for session in drawn for call in session.calls) for drawn in (plain, short)]
    assert outputs[1] == pytest.approx(outputs[0] / 4, rel=0.05)
    assert [session.arrival for session in short] == [session.arrival for session in plain]


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^trace: unknown 'xRoutBench'; did you mean 'xRouteBench'"):
        demand.profile(tiny(trace="xRoutBench"))
    with pytest.raises(ValueError, match=r"^window: unknown 'peek'; did you mean 'peak'.* Valid: peak, median, trough"):
        demand.window_load(tiny(window="peek"))
    with pytest.raises(ValueError, match=r"^normal: unknown 'burst'; did you mean 'burstgpt'"):
        NormalTraffic(tiny(normal="burst"), 1.0, 0)


def test_hours_differ_in_load() -> None:
    loads = [demand.window_load(tiny(window=window)) for window in ("peak", "median", "trough")]
    assert loads[0] == 1.0
    assert loads == sorted(loads, reverse=True)


def test_sessions_arrive_in_proportion_to_instances_unless_told() -> None:
    four, eight = (demand.session_rate(tiny(instances=count, sessions_per_second=None)) for count in (4, 8))
    assert eight == 2 * four
    assert demand.session_rate(tiny(instances=8, sessions_per_second=0.01)) == 0.01
    long = demand.session_rate(tiny(instances=4, sessions_per_second=None, trace="GHCP-coding"))
    assert long < four


def test_sessions_depend_on_the_seed_and_not_on_the_cluster() -> None:
    here = demand.sessions(tiny(), 60, WINDOW)
    assert here
    assert demand.sessions(tiny(mode="colocated", approach="eager", load=0.1), 60, WINDOW) == here
    assert demand.sessions(tiny(seed=1), 60, WINDOW) != here


def test_histories_are_compacted_at_the_window_or_before_they_outgrow_a_pool() -> None:
    def longest(most_tokens: int, **fields: object) -> int:
        config = tiny(trace="GHCP-coding", sessions_per_second=0.5, **fields)
        found = demand.sessions(config, 60, most_tokens)
        return max(call.prompt_tokens + call.output_tokens for session in found for call in session.calls)

    assert 40_000 < longest(10**9) <= WINDOW
    assert longest(10**9, context_window=40_000) <= 40_000
    assert longest(50_000) <= 50_000


def test_each_model_has_traffic_of_its_own_and_equal_seeds_have_equal_traffic() -> None:
    def drawn(model: int, **fields: object) -> list[object]:
        traffic = NormalTraffic(tiny(**fields), 2.0, model)
        return [*traffic.draw(30.0), *traffic.draw(30.0)]

    assert drawn(0) == drawn(0, approach="eager", mode="colocated")
    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, seed=1)


def test_recorded_traffic_is_brought_to_the_rate_and_repeated(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{second:02d}.0000000,{100 + second},7" for second in range(0, 40, 2)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    drawn = NormalTraffic(tiny(normal_trace=str(file)), 5.0, 0).draw(100.0)
    assert len(drawn) == pytest.approx(500, rel=0.1)
    assert {request.prompt_tokens for request in drawn} == {100 + second for second in range(0, 40, 2)}
    assert all(0 <= request.arrival < 100 for request in drawn)


def test_a_recording_that_cannot_be_used_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,-3,7\n")
    with pytest.raises(ValueError, match=r"trace\.csv, line 2: .*ContextTokens"):
        check(tiny(normal_trace=str(file)))
    with pytest.raises(ValueError, match=r"nope\.csv"):
        check(tiny(normal_trace=str(tmp_path / "nope.csv")))
