import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.policy.placement import Candidate, choose, completion_seconds


def candidate(name: str, pending: int = 0, warm: int = 0, sessions: int = 0, speed: float = 1000.0) -> Candidate:
    return Candidate(name, pending, speed, warm, sessions)


def test_counts_uncached_tokens_only() -> None:
    assert completion_seconds(candidate("p", pending=500, warm=3000), 4000) == 1.5
    assert completion_seconds(candidate("p", warm=9000), 4000) == 0.0


def test_a_warm_instance_wins_until_a_cold_prefill_elsewhere_ends_first() -> None:
    cold = candidate("cold")
    assert choose([candidate("warm", pending=3000, warm=3500), cold], 4000, "warm").name == "warm"
    assert choose([candidate("warm", pending=4000, warm=3500), cold], 4000, "warm").name == "cold"


def test_ties_go_to_the_sticky_one_then_to_the_fewest_sessions() -> None:
    crowded, empty = candidate("a", sessions=9), candidate("b")
    assert choose([crowded, empty], 100, "a").name == "a"
    assert choose([crowded, empty], 100).name == "b"


def test_without_candidates_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        choose([], 100)


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), min_size=1, max_size=6), st.integers(0, 10_000)
)
def test_no_candidate_would_end_earlier(loads: list[tuple[int, int]], prompt: int) -> None:
    candidates = [candidate(str(i), pending, warm) for i, (pending, warm) in enumerate(loads)]
    choice = choose(candidates, prompt)
    assert choice.completion_seconds == min(completion_seconds(c, prompt) for c in candidates)
    assert 0 <= choice.uncached_tokens <= prompt
