"""One instance: against a plain loop over iterations, and what shadow work may do to it."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_shadow.perf.online import StepWork
from pd_shadow.policy.base import IterationController
from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.policy.slack import SlackController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.engine import Engine, EngineLimits
from pd_shadow.sim.request import Request
from pd_shadow.sim.shadow_queue import ShadowJob

from .rig import LATENCY, SLO, Given, instance, serve

CHUNK = 2048
arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 6000), st.integers(1, 150)).map(lambda each: Given(*each)),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.arrived,
)


def iteration_by_iteration(given: Sequence[Given]) -> list[tuple[float, float]]:
    """First and last token of every request, with one step of this loop per iteration of the engine."""
    now = 0.0
    order = sorted(range(len(given)), key=lambda index: given[index].arrived)
    computed = [0] * len(given)
    generated = [0] * len(given)
    first = [0.0] * len(given)
    last = [0.0] * len(given)
    admitted: list[int] = []
    while any(generated[index] < given[index].output for index in order):
        admitted += [index for index in order if index not in admitted and given[index].arrived <= now]
        decodes = [index for index in admitted if 0 < generated[index] < given[index].output]
        left, parts = CHUNK - len(decodes), []
        for index in admitted:
            chunk = min(left, given[index].prompt - computed[index])
            if chunk > 0:
                parts.append((index, chunk))
                left -= chunk
        if not decodes and not parts:
            now = min(given[index].arrived for index in order if index not in admitted)
            continue
        tokens = sum(chunk for _, chunk in parts)
        pairs = sum(chunk * (computed[index] + chunk / 2) for index, chunk in parts)
        kv = sum(given[index].prompt + generated[index] for index in decodes)
        now += LATENCY.seconds(StepWork(tokens, pairs, len(decodes), kv))
        for index in decodes:
            generated[index] += 1
            last[index] = now
        for index, chunk in parts:
            computed[index] += chunk
            if computed[index] == given[index].prompt:
                generated[index] = 1
                first[index] = last[index] = now
    return list(zip(first, last, strict=True))


@given(arrivals)
@settings(max_examples=100, deadline=None)
def test_runs_of_iterations_take_the_time_of_each_iteration(given: list[Given]) -> None:
    clock = Clock()
    seen = serve(instance(clock), clock, given)
    for request, (first, last) in zip(seen, iteration_by_iteration(given), strict=True):
        assert request.first_token_at == pytest.approx(first, rel=1e-9)
        assert request.finished_at == pytest.approx(last, rel=1e-9)


def test_kv_is_reserved_at_admission() -> None:
    clock = Clock()
    engine = instance(clock, tokens=4096)
    one, two = serve(engine, clock, [Given(0.0, 2000, 500), Given(0.1, 2000, 500)])
    assert one.finished_at is not None
    assert two.first_token_at is not None
    assert two.first_token_at > one.finished_at
    assert engine.pool.free_blocks == engine.pool.blocks


def test_a_session_finds_its_prefix() -> None:
    clock = Clock()
    engine = instance(clock)
    first = Request(0.0, 4000, 10, SLO, context=-1)
    second = Request(5.0, 5000, 10, SLO, context=-1, reusable=4010)
    for request in (first, second):
        clock.at(request.arrived, lambda now, request=request: engine.submit(request, now))  # type: ignore[misc]
    clock.run(lambda: second.finished_at is not None)
    assert (first.cached, second.cached) == (0, 4010)
    assert second.ttft < first.ttft


class Watched(SlackController):
    """Notes every budget it gave beside what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[bool, float]] = []

    def budget(self, batch):  # type: ignore[no-untyped-def]
        given = super().budget(batch)
        self.asked.append((batch.waiting, given.iteration_seconds))
        return given


def shadowed(controller: IterationController, given: Sequence[Given], target: int) -> tuple[Engine, list[Request]]:
    """What an instance with one shadow job becomes and answers."""
    clock = Clock()
    engine = instance(clock, controller=controller)

    def progressed(job: ShadowJob, now: float) -> None:
        if not job.left:
            engine.shadow.discard(job)

    job = ShadowJob(-1, progressed)
    job.aim(target, 0)
    clock.at(0.0, lambda now: engine.offer(job, now))
    return engine, serve(engine, clock, given)


def test_an_idle_instance_covers_a_shadow_while_nothing_else_is_there() -> None:
    engine, _ = shadowed(SlackController(), [Given(3.0, 100, 2)], 5000)
    assert engine.pool.tokens(-1) == 5000
    assert engine.usage.shadow_tokens == 5000


def test_an_arrival_waits_for_one_capped_iteration_at_most() -> None:
    alone = serve(instance(clock := Clock()), clock, [Given(0.2, 1000, 1)])[0].ttft
    _, (request,) = shadowed(PrefillWindowController(), [Given(0.2, 1000, 1, routed=True)], 300_000)
    assert alone < request.ttft <= alone + 0.1


def test_decodes_keep_their_slo_beside_shadow_work() -> None:
    given = [Given(0.05 * number, 500, 120) for number in range(20)]
    engine, requests = shadowed(SlackController(), given, 60_000)
    assert engine.usage.shadow_tokens > 1000
    assert all(request.meets_slo for request in requests)


def test_nothing_is_granted_while_something_waits() -> None:
    controller = Watched()
    clock = Clock()
    engine = instance(clock, controller=controller, limits=EngineLimits(sequences=1))
    job = ShadowJob(-1, lambda job, now: None)
    job.aim(50_000, 0)
    clock.at(0.0, lambda now: engine.offer(job, now))
    serve(engine, clock, [Given(0.1, 500, 100), Given(0.1, 500, 100)])
    waiting = [seconds for waiting, seconds in controller.asked if waiting]
    assert waiting
    assert not any(waiting)


def test_usage_adds_up() -> None:
    clock = Clock()
    engine = instance(clock)
    requests = serve(engine, clock, [Given(0.0, 3000, 50), Given(0.1, 700, 20)])
    assert engine.usage.prefill_tokens == 3700
    assert engine.usage.decode_tokens == 49 + 19
    ends = [request.finished_at for request in requests if request.finished_at is not None]
    assert engine.usage.busy_seconds == pytest.approx(max(ends))
