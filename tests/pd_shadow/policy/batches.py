"""Batches and iterations for the tests of the iteration controllers."""

from hypothesis import strategies as st

from pd_shadow.policy.base import Batch, Iteration, RunningRequest, StepReason

NOW = 100.0


def decoding(
    *, for_seconds: float = 0.0, iterations: int = 0, tpot: float = 0.1, routed: bool = False
) -> RunningRequest:
    """A request that got its first token `for_seconds` ago."""
    first_token_at = NOW - for_seconds
    return RunningRequest(first_token_at - 0.2, first_token_at, iterations, 1.0, tpot, 0.0, routed)


def prefilling(
    *, for_seconds: float = 0.0, remaining: float = 0.0, ttft: float = 1.0, tpot: float = 0.1, routed: bool = False
) -> RunningRequest:
    """A request that arrived `for_seconds` ago and has no token yet."""
    return RunningRequest(NOW - for_seconds, None, 0, ttft, tpot, remaining, routed)


def batch(*requests: RunningRequest, waiting: bool = False, tpot: float = 0.1) -> Batch:
    return Batch(NOW, waiting, tpot, requests)


def memory_bound(seconds: float) -> Iteration:
    return Iteration(seconds, 0.0, memory_bound_decode=True, reason=StepReason.NO_WORK)


seconds = st.floats(0, 10)
requests = st.one_of(
    st.builds(
        decoding,
        for_seconds=seconds,
        iterations=st.integers(0, 200),
        tpot=st.floats(0.001, 1),
        routed=st.booleans(),
    ),
    st.builds(
        prefilling,
        for_seconds=seconds,
        remaining=seconds,
        ttft=st.floats(0.01, 10),
        tpot=st.floats(0.001, 1),
        routed=st.booleans(),
    ),
)
batches = st.builds(
    Batch,
    now=st.just(NOW),
    waiting=st.booleans(),
    tpot_slo=st.floats(0.001, 1),
    requests=st.lists(requests, max_size=5),
)
