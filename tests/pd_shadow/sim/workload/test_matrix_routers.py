import itertools
from collections import Counter

import numpy as np
import pytest

from pd_shadow.sim.workload.matrix_routers import CalibratedRouter, MatrixRouter, Policy
from pd_shadow.sim.workload.profiles import FUSION_BENCH, GHCP_CODING, PROFILES, ROUTER_R1
from pd_shadow.sim.workload.scores import best, scores, stand_ins
from pd_shadow.sim.workload.sessions import generate_sessions

PAIR = stand_ins(["Qwen2.5-7B-Instruct", "Llama-3.1-70B-Instruct"])
FIVE = stand_ins(
    [
        "Qwen2.5-7B-Instruct",
        "Llama-3.1-8B-Instruct",
        "Mistral-7B-Instruct-v0.3",
        "Llama-3.1-70B-Instruct",
        "Mixtral-8x22B-Instruct-v0.1",
    ]
)


def test_the_matrix_is_complete() -> None:
    assert len(scores()) == 14
    assert sum(len(rows) for rows in scores().values()) == 6_108
    assert all(rows.shape[1] == 9 and rows.min() >= 0 and rows.max() <= 1 for rows in scores().values())
    assert all(task in scores() for profile in PROFILES.values() for task in profile.tasks)


def test_a_matrix_route_is_a_run_of_the_task_s_queries() -> None:
    decisions = list(best("mbpp", PAIR, per_cost=True)) * 2
    route = list(MatrixRouter(PAIR).route("mbpp", 40, 2, np.random.default_rng(1)))
    assert any(decisions[i : i + 40] == route for i in range(len(decisions) - 40))


def test_only_a_better_answer_justifies_the_large_model() -> None:
    for task, rows in scores().items():
        small, large = rows[:, 8], rows[:, 3]
        chosen = best(task, ("qwen2.5-7b-instruct", "llama-3.1-nemotron-51b-instruct"), per_cost=False)
        assert np.array_equal(chosen == 1, large > small)


def test_price_keeps_calls_from_the_large_model() -> None:
    large_share = {
        policy: np.mean(MatrixRouter(PAIR, policy).route("commongen", 500, 2, np.random.default_rng(0)))
        for policy in Policy
    }
    assert large_share[Policy.ACCURACY_PER_COST] < large_share[Policy.MAX_ACCURACY]


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("columns", [PAIR, ("gemma-2-9b-it", "llama-3.3-nemotron-super-49b-v1")])
def test_the_calibrated_router_switches_as_often_as_the_paper_s(name: str, columns: tuple[str, ...]) -> None:
    profile = PROFILES[name]
    assert measured(CalibratedRouter(profile, columns)) == pytest.approx(profile.switch_rate, rel=0.10)


def test_more_models_switch_more_as_in_the_paper() -> None:
    router = CalibratedRouter(FUSION_BENCH, FIVE)
    assert router.target / FUSION_BENCH.switch_rate == pytest.approx(5.1 / 3.2)
    assert measured(router) == pytest.approx(router.target, rel=0.10)


def test_a_rate_can_be_given() -> None:
    # The testbed's Q7/L70 pair (paper Table 5).
    assert measured(CalibratedRouter(FUSION_BENCH, PAIR, rate=0.20)) == pytest.approx(0.20, rel=0.10)


def test_tasks_and_models_differ_enough_to_learn_from() -> None:
    router = CalibratedRouter(ROUTER_R1, PAIR)
    leaving: Counter[tuple[str, int]] = Counter()
    calls: Counter[tuple[str, int]] = Counter()
    for task in ROUTER_R1.tasks:
        route = router.route(task, 20_000, 2, np.random.default_rng(2))
        for a, b in itertools.pairwise(route):
            calls[task, a] += 1
            leaving[task, a] += a != b
    rates = [leaving[key] / calls[key] for key in calls]
    assert max(rates) > 0.8
    assert min(rates) < 0.25


def test_what_a_router_cannot_do_is_explained() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="made for 2"):
        MatrixRouter(PAIR).route("mbpp", 3, 3, rng)
    with pytest.raises(ValueError, match="'chess' has no scores"):
        MatrixRouter(PAIR).route("chess", 3, 2, rng)
    with pytest.raises(ValueError, match="'math' is not one of GHCP-coding's"):
        CalibratedRouter(GHCP_CODING, PAIR).route("math", 3, 2, rng)
    with pytest.raises(ValueError, match=r"rate 0\.99"):
        CalibratedRouter(GHCP_CODING, PAIR, rate=0.99)
    with pytest.raises(ValueError, match="at least 2"):
        CalibratedRouter(GHCP_CODING, PAIR[:1])
    with pytest.raises(ValueError, match="different"):
        MatrixRouter((PAIR[0], PAIR[0]))
    with pytest.raises(ValueError, match="'gpt-2' is not in the score matrix"):
        MatrixRouter(("gpt-2",)).route("mbpp", 3, 1, rng)


def test_stand_ins_never_coincide() -> None:
    assert stand_ins(["Llama-3.1-70B-Instruct", "GPT-OSS-120B", "llama-3.1-nemotron-51b-instruct"]) == (
        "llama-3.3-nemotron-super-49b-v1",
        "llama3-chatqa-1.5-70b",
        "llama-3.1-nemotron-51b-instruct",
    )
    with pytest.raises(ValueError, match="taken by the other models"):
        stand_ins(["Qwen2.5-7B-Instruct", "SWE-agent-LM-7B"])
    with pytest.raises(ValueError, match="'gpt-2' has no scores"):
        stand_ins(["gpt-2"])


def measured(router: CalibratedRouter) -> float:
    models = len(router.columns)
    sessions = generate_sessions(router.profile, router, models, 1, 3000, np.random.default_rng(1))
    routes = [[call.model for call in session.calls] for session in sessions]
    switched = sum(a != b for route in routes for a, b in itertools.pairwise(route))
    return switched / sum(map(len, routes))
