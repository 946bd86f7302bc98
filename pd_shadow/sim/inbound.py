"""Shadow KV that moves to an instance: chunks, while nothing normal moves, into memory that is reclaimed first."""

from collections.abc import Callable

from pd_shadow.sim.clock import Clock
from pd_shadow.sim.engine import Engine
from pd_shadow.sim.link import Link
from pd_shadow.sim.shadow_queue import ShadowJob, ShadowQueue
from transfer.chunks import CHUNK_TOKENS, next_chunk

# The smallest piece of KV that moves, vLLM's block.
BLOCK_TOKENS = 16


class Inbound:
    """The inbound side of one instance. `held` says how many tokens of a session's context the sender has."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        bytes_per_second: float,
        bytes_per_token: float,
        held: Callable[[int], int],
    ) -> None:
        self.engine = engine
        self.link = Link(clock, bytes_per_second, self._push)
        # Jobs whose sender may hold more than this instance.
        self._lacking = ShadowQueue()
        self._bytes = bytes_per_token
        self._held = held

    def offer(self, job: ShadowJob, now: float) -> None:
        """The job's sender may hold more than this instance."""
        self._lacking.add(job)
        if self.link.open:
            self._push(now)

    def withdraw(self, job: ShadowJob) -> None:
        """Nothing more of this job is to move; a chunk in flight is dropped when it arrives."""
        self._lacking.discard(job)

    def _push(self, now: float) -> None:
        """The next chunk of the job that comes first and has one."""
        for job in self._lacking.first(len(self._lacking)):
            covered = self.engine.pool.tokens(job.session)
            held = min(self._held(job.session), job.target)
            # Whole chunks while the sender is at work, what is left when it is done.
            end = held if held >= job.target else held - held % CHUNK_TOKENS
            chunk = next_chunk(covered, end, BLOCK_TOKENS)
            if chunk is None:
                self._lacking.discard(job)
                continue
            # From where this instance stands, which need not be a block's end here.
            size = chunk.end - covered
            if self.engine.pool.shadow_room(job.session, now, size) == size:
                self._send(job, covered, size, now)
                return

    def _send(self, job: ShadowJob, start: int, size: int, now: float) -> None:
        def arrived(at: float) -> None:
            if job in self._lacking:
                self.engine.pool.grow_shadow(job.session, start, size, at)

        self.link.shadow(size * self._bytes, now, arrived)
