"""The control plane's benchmark at tiny sizes: that everything it measures is there, and the ledger returns to zero."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.core.cluster import Cluster
from pd_shadow.bench import control_plane as bench
from pd_shadow.bench import control_plane_report as report
from pd_shadow.cli.main import main

PLAN = bench.Plan(sessions=6, instances=8, memory_sessions=6, calls=10, rate=500.0, repeats=2)


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster(bench.config(PLAN.sessions), epoch="t")
    bench.populate(cluster, PLAN.instances, PLAN.sessions)
    return cluster


def test_sessions_are_bound_on_both_models_and_have_jobs(cluster: Cluster) -> None:
    assert len(cluster.sessions) == PLAN.sessions
    for session in cluster.sessions:
        assert set(session.bindings) == set(bench.MODELS)
        assert all(binding.prefill and binding.decode for binding in session.bindings.values())
    assert len(list(cluster.jobs)) == 2 * PLAN.sessions


def test_whole_cycles_leave_no_call_behind(cluster: Cluster) -> None:
    bench.cycle(cluster, bench.key(0), "model-a", bench.LONG_PROMPT)
    assert not cluster.calls
    assert not any(instance.calls for instance in cluster.registry)


def test_new_sessions_beyond_the_cap_push_out_old_ones(cluster: Cluster) -> None:
    for number in range(PLAN.sessions, 3 * PLAN.sessions):
        bench.cycle(cluster, bench.key(number), "model-a", bench.SHORT_PROMPT)
        assert len(cluster.sessions) == PLAN.sessions
    assert len(list(cluster.jobs)) <= 2 * PLAN.sessions


def test_a_session_with_a_call_in_flight_stays(cluster: Cluster) -> None:
    cluster.begin_call(0.0, bench.GATEWAY, bench.key(0), "model-a")
    for number in range(PLAN.sessions, 3 * PLAN.sessions):
        bench.cycle(cluster, bench.key(number), "model-a", bench.SHORT_PROMPT)
    assert cluster.sessions.get(bench.key(0)) is not None


def test_a_controller_of_its_own_answers_every_call() -> None:
    served = bench.measure_served(PLAN)
    assert [len(one.inside_s) for one in served] == [PLAN.calls] * PLAN.repeats
    assert [len(one.client_s) for one in served] == [PLAN.calls] * PLAN.repeats
    assert not any(one.calls_left for one in served)


def test_figures_are_medians_with_their_spread() -> None:
    core = bench.Core([60_000.0, 40_000.0, 50_000.0], [1.0, 1.0, 2.0], [1.0, 1.2, 2.0])
    served = [bench.Served([0.001, 0.001], [0.002], 900.0, 0), bench.Served([0.003, 0.003], [0.002], 900.0, 1)]
    figures = report.build(PLAN, core, served, 3_000.0)
    assert figures["decisions_per_s"] == 50_000.0
    assert figures["spread"]["decisions_per_s"] == {"lowest": 40_000.0, "median": 50_000.0, "highest": 60_000.0}
    assert figures["begin_call_ms"] == pytest.approx({"p50": 2.0, "p99": 2.0})
    assert figures["verdicts"] == {
        "decisions_per_s": True,
        "begin_call_p50": False,
        "begin_call_p99": True,
        "independent_of_length": True,
        "bytes_per_session": False,
        "no_call_left": False,
    }


def test_the_command_writes_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    sizes = [
        "--sessions",
        "6",
        "--instances",
        "8",
        "--memory-sessions",
        "6",
        "--calls",
        "10",
        "--rate",
        "500",
        "--repeats",
        "2",
    ]
    result = CliRunner().invoke(main, ["bench", "control-plane", *sizes, "--seed", "7", "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    assert figures["seed"] == 7
    assert figures["config"]["calls"] == 10
    assert {"decisions_per_s", "begin_call_ms", "bytes_per_session", "spread"} <= figures.keys()


def test_instances_that_do_not_divide_name_the_option() -> None:
    result = CliRunner().invoke(main, ["bench", "control-plane", "--instances", "10"])
    assert result.exit_code == 2
    assert "--instances: 10 is no multiple of 4" in result.output
