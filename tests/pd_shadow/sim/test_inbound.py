"""Shadow KV on its way to an instance: whole chunks while the sender computes, the likeliest first, given room."""

import pytest

from pd_shadow.sim.clock import Clock
from pd_shadow.sim.inbound import BLOCK_TOKENS, Inbound
from pd_shadow.sim.shadow_queue import ShadowJob
from transfer.chunks import CHUNK_TOKENS

from .rig import instance

# One token takes a thousandth of a second.
RATE, TOKEN_BYTES = 1000.0, 1.0


class Receiver:
    """An instance, and what its sender holds of each session."""

    def __init__(self, tokens: int = 400_000) -> None:
        self.clock = Clock()
        self.engine = instance(self.clock, tokens=tokens)
        self.held: dict[int, int] = {}
        self.inbound = Inbound(
            self.engine, self.clock, bytes_per_second=RATE, bytes_per_token=TOKEN_BYTES,
            held=lambda session: self.held.get(session, 0),
        )  # fmt: skip

    def job(self, session: int, target: int, probability: float = 0.5) -> ShadowJob:
        made = ShadowJob(session, lambda job, now: None)
        made.aim(target, 0, probability)
        return made

    def offer(self, job: ShadowJob, held: int) -> None:
        self.held[job.session] = held
        self.inbound.offer(job, self.clock.now)

    def run(self) -> None:
        self.clock.run(lambda: False)

    def tokens(self, session: int) -> int:
        return self.engine.pool.tokens(session)


def test_whole_chunks_move_while_the_sender_is_at_work_and_the_rest_when_it_is_done() -> None:
    rig = Receiver()
    job = rig.job(-1, 10_000)
    rig.offer(job, CHUNK_TOKENS + 500)
    rig.run()
    assert rig.tokens(-1) == CHUNK_TOKENS
    rig.offer(job, 10_000)
    rig.run()
    assert rig.tokens(-1) == 10_000
    assert rig.inbound.link.shadow_bytes == 10_000 * TOKEN_BYTES


def test_only_what_is_missing_moves() -> None:
    rig = Receiver()
    lease = rig.engine.pool.reserve(-1, 0, 5000, 0.0)
    assert lease is not None
    rig.engine.pool.release(lease, -1, 5000, 0.0)
    rig.offer(rig.job(-1, 8000), 8000)
    rig.run()
    assert rig.tokens(-1) == 8000
    assert rig.inbound.link.shadow_bytes == 3000 * TOKEN_BYTES


def test_what_the_sender_holds_beyond_the_target_stays_there_and_so_does_a_part_of_a_block() -> None:
    rig = Receiver()
    rig.offer(rig.job(-1, 1000), 3000)
    rig.run()
    assert rig.tokens(-1) == 1000 - 1000 % BLOCK_TOKENS


def test_the_likelier_job_goes_first() -> None:
    rig = Receiver()
    rig.inbound.link.normal(100, 0.0, lambda now: None)
    rig.offer(rig.job(-1, CHUNK_TOKENS, 0.2), CHUNK_TOKENS)
    rig.offer(rig.job(-2, CHUNK_TOKENS, 0.8), CHUNK_TOKENS)
    rig.clock.run(lambda: bool(rig.tokens(-1) or rig.tokens(-2)))
    assert (rig.tokens(-1), rig.tokens(-2)) == (0, CHUNK_TOKENS)
    rig.run()
    assert rig.tokens(-1) == CHUNK_TOKENS


def test_chunks_wait_for_normal_transfers() -> None:
    rig = Receiver()
    arrived: list[float] = []
    rig.offer(rig.job(-1, 2 * CHUNK_TOKENS), 2 * CHUNK_TOKENS)
    rig.clock.at(1.0, lambda now: rig.inbound.link.normal(1000, now, arrived.append))
    rig.clock.run(lambda: bool(arrived))
    # The chunk in flight ended first; the second had to wait.
    assert arrived == [pytest.approx(CHUNK_TOKENS / RATE + 1.0)]
    assert rig.tokens(-1) == CHUNK_TOKENS
    rig.run()
    assert rig.tokens(-1) == 2 * CHUNK_TOKENS


def test_a_chunk_of_a_withdrawn_job_is_dropped() -> None:
    rig = Receiver()
    job = rig.job(-1, 2 * CHUNK_TOKENS)
    rig.offer(job, 2 * CHUNK_TOKENS)
    rig.clock.at(1.0, lambda now: rig.inbound.withdraw(job))
    rig.run()
    assert rig.tokens(-1) == 0
    assert rig.inbound.link.shadow_bytes == CHUNK_TOKENS * TOKEN_BYTES


def test_a_chunk_without_room_does_not_move_and_a_smaller_one_does() -> None:
    # The class may have a quarter of the pool, 2,048 tokens.
    rig = Receiver(8192)
    rig.offer(rig.job(-1, CHUNK_TOKENS, 0.9), CHUNK_TOKENS)
    rig.offer(rig.job(-2, 2000, 0.1), 2000)
    rig.run()
    assert (rig.tokens(-1), rig.tokens(-2)) == (0, 2000)
    assert rig.inbound.link.shadow_bytes == 2000 * TOKEN_BYTES
