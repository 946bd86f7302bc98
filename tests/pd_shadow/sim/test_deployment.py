"""Where calls and shadow work of a session go, and when a session stops being worth shadow work."""

import math
from collections.abc import Iterator

import pytest

from pd_shadow.policy.slack import SlackController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.colocated import Colocated
from pd_shadow.sim.deployment import TPOT_FLOOR_SECONDS, TTFT_FLOOR_SECONDS, Slos
from pd_shadow.sim.engine import Engine
from pd_shadow.sim.request import Request
from pd_shadow.sim.simulation import hardware

from .rig import LATENCY, MODELS, tiny

SESSION = -1


class Served:
    """A model on two instances."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        made = hardware(tiny(mode="colocated"), MODELS[0])
        self.model = Colocated(made, clock, 2, SlackController)

    def call(self, prompt: int, reusable: int = 0, session: int = SESSION, output: int = 10) -> Request:
        """One call, to its end."""
        request = Request(
            self.clock.now, prompt, output, self.model.slos.of(prompt), context=session, reusable=reusable
        )  # fmt: skip
        self.model.submit(request, self.clock.now)
        self.clock.run(lambda: request.finished_at is not None)
        return request

    def normal(self, prompt: int) -> Request:
        request = Request(self.clock.now, prompt, 10, self.model.slos.of(prompt))
        self.model.submit(request, self.clock.now)
        return request

    def holder(self, session: int = SESSION) -> Engine:
        """The one instance that holds something of the session."""
        (found,) = [engine for engine in self.model.engines if engine.pool.tokens(session)]
        return found

    def other(self, engine: Engine) -> Engine:
        (found,) = [each for each in self.model.engines if each is not engine]
        return found

    def rest(self, seconds: float = 60.0) -> None:
        """Let what is under way end."""
        until = self.clock.now + seconds
        self.clock.at(until, lambda now: None)
        self.clock.run(lambda: self.clock.now >= until)


@pytest.fixture
def served() -> Iterator[Served]:
    return Served(Clock())


def test_a_session_stays_where_its_context_is(served: Served) -> None:
    served.call(5000)
    first = served.holder()
    # The other instance is as free, and by name either might come first.
    second = served.call(6000, reusable=5010)
    assert served.holder() is first
    assert second.cached == 5010


def test_a_call_goes_elsewhere_cold_when_its_instance_is_too_busy(served: Served) -> None:
    served.call(3000)
    home = served.holder()
    for _ in range(12):
        home.submit(Request(served.clock.now, 8000, 10, served.model.slos.of(8000)), served.clock.now)
    moved = served.call(4000, reusable=3010)
    assert moved.cached == 0
    assert served.other(home).pool.tokens(SESSION) == 4010
    # Bound there from now on, although its old home is free again.
    served.rest()
    again = served.call(5000, reusable=4010)
    assert again.cached == 4010
    assert served.other(home).pool.tokens(SESSION) == 5010


def test_normal_requests_go_where_least_is_pending(served: Served) -> None:
    requests = [served.normal(4000) for _ in range(4)]
    assert [engine.pending_tokens for engine in served.model.engines] == [8000, 8000]
    assert len({id(request) for request in requests}) == 4


def test_a_shadow_is_computed_where_the_call_will_go(served: Served) -> None:
    served.model.shadow(SESSION, 9000, 0.5, served.clock.now)
    served.rest()
    assert served.holder().usage.shadow_tokens == 9000
    assert served.call(10_000, reusable=9000).cached == 9000


def test_a_shadow_computes_only_what_is_missing(served: Served) -> None:
    served.call(5000)
    served.model.shadow(SESSION, 8000, 0.5, served.clock.now)
    served.rest()
    assert served.holder().usage.shadow_tokens == 8000 - 5010


def test_a_suspended_session_gets_no_more_shadow_work(served: Served) -> None:
    served.model.shadow(SESSION, 100_000, 0.5, served.clock.now)
    served.rest(1.0)
    served.model.suspend(SESSION)
    served.rest(0.1)
    covered = served.holder().pool.tokens(SESSION)
    assert 0 < covered < 100_000
    served.rest()
    assert served.holder().pool.tokens(SESSION) == covered
    served.model.shadow(SESSION, covered + 1000, 0.5, served.clock.now)
    served.rest()
    assert served.holder().pool.tokens(SESSION) == covered + 1000


@pytest.mark.parametrize("repeats", [False, True])
def test_a_shadow_that_is_lost_is_computed_again_only_by_jobs_that_repeat(served: Served, repeats: bool) -> None:
    served.model.shadow(SESSION, 9000, 0.5, served.clock.now, repeats=repeats)
    served.rest(5.0)
    assert served.holder().usage.shadow_tokens == 9000
    served.model.rewrite(SESSION, 3000)
    served.rest(5.0)
    assert served.holder().usage.shadow_tokens == (9000 + 6000 if repeats else 9000)
    served.model.suspend(SESSION)
    served.model.rewrite(SESSION, 0)
    served.rest(5.0)
    assert not any(engine.pool.tokens(SESSION) for engine in served.model.engines)


def test_suspending_a_session_without_shadow_work_does_nothing(served: Served) -> None:
    served.model.suspend(SESSION)
    assert served.call(1000).cached == 0


def test_a_rewritten_history_is_found_up_to_where_it_was_rewritten(served: Served) -> None:
    served.call(5000)
    served.model.rewrite(SESSION, 1234)
    assert served.call(3000, reusable=5000).cached == 1234
    served.model.rewrite(SESSION, 0)
    assert served.call(3000, reusable=3000).cached == 0


def test_work_sent_ahead_is_found_like_a_shadow(served: Served) -> None:
    served.model.send_ahead(SESSION, 7000, served.clock.now)
    served.rest()
    holder = served.holder()
    assert (holder.usage.prefill_tokens, holder.usage.shadow_tokens) == (7000, 0)
    assert served.call(8000, reusable=7000).cached == 7000


def test_slos_are_the_larger_of_a_floor_and_five_times_an_idle_instance() -> None:
    slos = Slos(LATENCY)
    assert slos.of(100).ttft == TTFT_FLOOR_SECONDS
    assert slos.of(65_536).ttft == pytest.approx(5 * LATENCY.isolated_prefill_seconds(65_536))
    assert slos.of(100).tpot == pytest.approx(max(TPOT_FLOOR_SECONDS, 5 * LATENCY.decode_seconds(1024)))
    half = Slos(LATENCY, 0.5).of(100)
    assert half == pytest.approx([each / 2 for each in slos.of(100)])
    assert math.isfinite(half.tpot)
