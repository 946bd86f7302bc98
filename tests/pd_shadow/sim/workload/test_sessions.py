from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_shadow.sim.workload.profiles import GHCP_CODING, PROFILES, SWE_S7_S32
from pd_shadow.sim.workload.routers import AlwaysRouter, MarkovRouter
from pd_shadow.sim.workload.sessions import SUMMARY_TOKENS, generate_sessions


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(PROFILES)), st.sampled_from([4_096, 8_192, 131_072]), st.integers(0, 2**32))
def test_every_call_fits_the_window_and_extends_the_one_before(name: str, window: int, seed: int) -> None:
    sessions = generate_sessions(
        PROFILES[name], MarkovRouter(0.3), 3, 0.5, 20, np.random.default_rng(seed), window=window
    )
    for session in sessions:
        assert 0 <= session.arrival < 20
        assert session.task in PROFILES[name].tasks
        first = session.calls[0]
        assert (first.shared_tokens, first.gap_seconds) == (0, 0)
        left = 0
        for call in session.calls:
            assert call.output_tokens >= 1
            assert 0 <= call.model < 3
            assert call.prompt_tokens > call.shared_tokens
            assert call.prompt_tokens + call.output_tokens <= window
            # Nothing is left of the history after a compaction, all of it otherwise.
            assert call.shared_tokens in (0, left)
            left = call.prompt_tokens + call.output_tokens


def test_a_full_window_is_compacted_into_a_summary() -> None:
    sessions = generate_sessions(SWE_S7_S32, AlwaysRouter(0), 1, 1, 20, np.random.default_rng(1), window=16_384)
    compacted = [call for session in sessions for call in session.calls[1:] if not call.shared_tokens]
    assert compacted
    assert all(call.prompt_tokens > SUMMARY_TOKENS for call in compacted)
    assert np.median([call.prompt_tokens for call in compacted]) < SUMMARY_TOKENS + 500


def test_the_router_changes_models_only() -> None:
    one, other = (
        generate_sessions(GHCP_CODING, router, 2, 0.1, 300, np.random.default_rng(2))
        for router in (AlwaysRouter(1), MarkovRouter(0.5))
    )
    assert one != other
    assert one == [s._replace(calls=tuple(c._replace(model=1) for c in s.calls)) for s in other]


def test_tool_gaps_have_the_paper_s_median() -> None:
    sessions = generate_sessions(SWE_S7_S32, AlwaysRouter(0), 1, 1, 300, np.random.default_rng(3))
    gaps = [call.gap_seconds for session in sessions for call in session.calls[1:]]
    assert np.median(gaps) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_sessions_have_as_many_calls_as_the_profile_says(name: str) -> None:
    profile = PROFILES[name]
    sessions = generate_sessions(profile, AlwaysRouter(0), 1, 1, 3000, np.random.default_rng(4))
    calls = [len(session.calls) for session in sessions]
    assert np.mean(calls) == pytest.approx(profile.mean_calls, rel=0.05)
    assert max(calls) <= profile.most_calls


@pytest.mark.parametrize(
    ("change", "field"),
    [({"window": 1_000}, "window"), ({"seconds": -1}, "seconds"), ({"arrivals_per_second": float("inf")}, "arrivals")],
)
def test_bad_arguments_are_named(change: dict[str, Any], field: str) -> None:
    arguments: dict[str, Any] = {"arrivals_per_second": 1, "seconds": 1, **change}
    with pytest.raises(ValueError, match=field):
        generate_sessions(GHCP_CODING, AlwaysRouter(0), 1, rng=np.random.default_rng(0), **arguments)
