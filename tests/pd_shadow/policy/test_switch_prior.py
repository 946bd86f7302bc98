from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.api.v1 import common_pb2
from pd_shadow.policy.switch_prior import SwitchPrior, Verdict

models = st.sampled_from(["a", "b", "c"])


def test_without_history_every_model_is_as_likely() -> None:
    assert SwitchPrior().probability("t", "a", "b", models=4) == 0.25


def test_history_of_the_task_outweighs_the_coarser_one() -> None:
    prior = SwitchPrior()
    for _ in range(50):
        prior.observe("math", "a", "b")
        prior.observe("chat", "a", "a")
    assert prior.probability("math", "a", "b", 2) > 0.9
    assert prior.probability("chat", "a", "b", 2) < 0.1
    assert 0.4 < prior.probability("unseen", "a", "b", 2) < 0.6


@given(
    st.lists(st.tuples(st.sampled_from(["t", ""]), models, models), max_size=60),
    st.sampled_from(["t", "", "x"]),
    models,
)
def test_probabilities_over_all_models_sum_to_one(history: list[tuple[str, str, str]], task: str, current: str) -> None:
    prior = SwitchPrior()
    for step in history:
        prior.observe(*step)
    assert abs(sum(prior.probability(task, current, model, 3) for model in "abc") - 1.0) < 1e-9


def test_tasks_are_capped() -> None:
    prior = SwitchPrior(max_tasks=1)
    prior.observe("first", "a", "b")
    for _ in range(20):
        prior.observe("second", "a", "a")
    assert prior.probability("second", "a", "b", 2) == prior.probability("third", "a", "b", 2)
    assert prior.probability("first", "a", "b", 2) > prior.probability("third", "a", "b", 2)


def test_rank_orders_gates_and_cuts_at_top_k() -> None:
    prior = SwitchPrior()
    for following, times in (("b", 6), ("c", 3), ("d", 1)):
        for _ in range(times * 10):
            prior.observe("", "a", following)
    ranked = prior.rank("", "a", ["a", "b", "c", "d"], gate=0.2, top_k=1)
    assert [(p.model, p.verdict) for p in ranked] == [
        ("b", Verdict.SHADOW),
        ("c", Verdict.NOT_TOP_K),
        ("d", Verdict.BELOW_GATE),
    ]


def test_every_refusal_is_an_api_reason() -> None:
    names = set(common_pb2.ShadowReason.keys())
    assert {f"SHADOW_REASON_{v.name}" for v in Verdict if v is not Verdict.SHADOW} <= names
