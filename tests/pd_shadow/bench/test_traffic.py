"""Requests and contexts: the same for one seed, and nothing shared that could be found cached."""

import itertools

import pytest

from pd_shadow.bench.traffic import CONTEXT_TOKENS, LEG_TOKENS, OUTPUT_TOKENS, Traffic
from pd_shadow.demo.models import SMALL


def test_equal_seeds_give_equal_requests_and_others_differ() -> None:
    first, again, other = (Traffic(SMALL, seed).arrivals("round-0", 20, 4.0) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert Traffic(SMALL, 1).arrivals("round-1", 20, 4.0) != first


def test_arrivals_keep_to_the_rate_the_time_and_the_lengths() -> None:
    requests = Traffic(SMALL, 1).arrivals("a", 500.0, 4.0)
    assert len(requests) == pytest.approx(2000, rel=0.1)
    times = [request.at for request in requests]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 500
    lengths = [len(request.prompt) for request in requests]
    assert (min(lengths), max(lengths)) == (128, 512)
    assert {request.output_tokens for request in requests} == {OUTPUT_TOKENS}
    assert min(token for request in requests for token in request.prompt) >= len(SMALL.special_tokens)
    assert max(token for request in requests for token in request.prompt) < SMALL.vocab_size


def test_routed_calls_are_the_same_but_for_the_salt() -> None:
    traffic = Traffic(SMALL, 1)
    without, with_shadow = traffic.routed(5, "without"), traffic.routed(5, "with")
    assert [r.prompt for r in without] == [r.prompt for r in with_shadow]
    assert [r.output_tokens for r in without] == [r.output_tokens for r in with_shadow]
    assert {r.cache_salt for r in without} == {"without"}
    assert all(r.routed for r in without)


def test_no_two_prompts_begin_alike() -> None:
    traffic = Traffic(SMALL, 1)
    contexts = list(itertools.islice(traffic.contexts(), 20))
    prompts = (
        [r.prompt for r in traffic.arrivals("a", 10, 4.0)]
        + [c.prompt for c in contexts]
        + [traffic.request("x", 128, 1).prompt]
    )
    assert len({tuple(prompt[:32]) for prompt in prompts}) == len(prompts)
    assert len({context.session for context in contexts}) == len(contexts)


def test_prefixes_grow_by_a_leg_to_the_whole_context() -> None:
    context = next(Traffic(SMALL, 1).contexts())
    prefixes = list(context.prefixes())
    assert [len(prefix) for prefix in prefixes] == [LEG_TOKENS, CONTEXT_TOKENS]
    assert prefixes[-1] == context.prompt
    assert prefixes[0] == context.prompt[:LEG_TOKENS]
