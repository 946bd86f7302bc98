"""Prefill and decode instances: what moves between them, and when."""

import pytest

from pd_shadow.policy.approach import Approach
from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.disaggregated import Disaggregated
from pd_shadow.sim.inbound import BLOCK_TOKENS
from pd_shadow.sim.request import Request
from pd_shadow.sim.simulation import hardware

from .rig import MODEL, MODELS, tiny

KV = MODEL.kv_bytes_per_token
SESSION = -1


class Served:
    """A model on one prefill and one decode instance."""

    def __init__(self, approach: Approach = Approach.HARVEST_SLO, **fields: object) -> None:
        self.clock = Clock()
        made = hardware(tiny(approach=approach, **fields), MODELS[0])
        self.model = Disaggregated(made, self.clock, 1, 1, PrefillWindowController)
        self.prefill, self.decode = self.model.engines
        (self.link,) = self.model.links

    def begin(self, prompt: int, reusable: int = 0, output: int = 10, session: int | None = SESSION) -> Request:
        request = Request(
            self.clock.now, prompt, output, self.model.slos.of(prompt), context=session, reusable=reusable
        )  # fmt: skip
        self.model.submit(request, self.clock.now)
        return request

    def call(self, prompt: int, reusable: int = 0, output: int = 10, session: int | None = SESSION) -> Request:
        request = self.begin(prompt, reusable, output, session)
        self.clock.run(lambda: request.finished_at is not None)
        return request

    def rest(self, seconds: float = 60.0) -> None:
        until = self.clock.now + seconds
        self.clock.at(until, lambda now: None)
        self.clock.run(lambda: self.clock.now >= until)


def test_the_first_call_moves_all_of_its_prompt_and_later_ones_what_is_new() -> None:
    served = Served()
    served.call(4000)
    assert served.link.normal_bytes == 4000 * KV
    later = served.call(6000, reusable=4010)
    assert served.link.normal_bytes == (4000 + 6000 - 4010) * KV
    # The prefill instance never saw the output.
    assert later.cached == 4000
    assert served.decode.pool.tokens(SESSION) == 6010


def test_prompts_are_computed_on_one_side_and_generated_on_the_other() -> None:
    served = Served()
    served.call(4000, output=20)
    assert (served.prefill.usage.prefill_tokens, served.prefill.usage.decode_tokens) == (4000, 0)
    assert (served.decode.usage.prefill_tokens, served.decode.usage.decode_tokens) == (0, 19)


def test_the_transfer_counts_toward_tpot_and_not_toward_ttft() -> None:
    slow = Served(hardware={"link_gb_per_second_per_gpu": 1.0}).call(4000)
    fast = Served(hardware={"link_gb_per_second_per_gpu": 100.0}).call(4000)
    assert slow.ttft == fast.ttft
    assert 9 * (slow.tpot - fast.tpot) == pytest.approx(4000 * KV * (1 / 1e9 - 1 / 100e9))


def test_kv_stays_on_the_prefill_instance_until_it_has_moved() -> None:
    served = Served(hardware={"link_gb_per_second_per_gpu": 0.1})
    request = served.begin(4000)
    served.clock.run(lambda: request.first_token_at is not None)
    assert served.prefill.pool.free_blocks < served.prefill.pool.blocks
    served.clock.run(lambda: request.finished_at is not None)
    assert served.prefill.pool.free_blocks == served.prefill.pool.blocks


def test_a_shadow_reaches_both_sides_and_leaves_the_call_its_tail() -> None:
    served = Served()
    served.model.shadow(SESSION, 9000, 0.5, 0.0)
    served.rest()
    moved = 9000 - 9000 % BLOCK_TOKENS
    assert (served.prefill.pool.tokens(SESSION), served.decode.pool.tokens(SESSION)) == (9000, moved)
    assert served.link.shadow_bytes == moved * KV
    served.model.suspend(SESSION)
    call = served.call(10_000, reusable=9000)
    assert call.cached == 9000
    assert served.link.normal_bytes == (10_000 - moved) * KV


def test_a_prompt_sent_ahead_moves_in_the_gaps_and_generates_nothing() -> None:
    served = Served(Approach.EAGER)
    served.model.send_ahead(SESSION, 5000, 0.0)
    served.rest()
    moved = 5000 - 5000 % BLOCK_TOKENS
    assert served.decode.pool.tokens(SESSION) == moved
    assert (served.link.normal_bytes, served.link.shadow_bytes) == (0, moved * KV)
    assert served.decode.usage.decode_tokens == 0


def test_requests_wait_for_memory_of_the_decode_instance_in_their_order() -> None:
    served = Served()
    room = served.decode.pool.capacity_tokens
    blocker = served.decode.pool.reserve(None, 0, room - 2048, 0.0)
    assert blocker is not None
    first, second = served.begin(4000, session=None), served.begin(1000, session=None)
    served.rest()
    assert first.first_token_at is not None
    assert second.first_token_at is not None
    # There would be room for the second.
    assert (first.finished_at, second.finished_at) == (None, None)
    served.decode.pool.release(blocker, None, room - 2048, served.clock.now)
    # Looked at again with the next prompt that is there.
    served.call(500, session=None)
    assert first.finished_at is not None
    assert second.finished_at is not None


def test_what_a_decode_instance_takes_from_its_host_memory_takes_time() -> None:
    loads = {}
    for rate in (5.0, 50.0):
        served = Served(Approach.HARVEST_SLO_HOST, hardware={"host_gb_per_second": rate})
        served.call(40_000)
        for engine in (served.prefill, served.decode):
            pool = engine.pool
            taken = pool.reserve(None, 0, pool.capacity_tokens, served.clock.now)
            assert taken is not None
            pool.release(taken, None, pool.capacity_tokens, served.clock.now)
            assert (pool.tokens(SESSION), pool.reach(SESSION)) == (0, 40_010 if engine is served.decode else 40_000)
        moved = served.link.normal_bytes
        call = served.call(41_000, reusable=40_010)
        assert served.link.normal_bytes - moved == 990 * KV
        loads[rate] = 9 * call.tpot
    # The transfer of the tail runs meanwhile.
    assert loads[5.0] - loads[50.0] == pytest.approx(40_010 * KV * (1 / 5e9 - 1 / 50e9))
