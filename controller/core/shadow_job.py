"""The shadow job: the wish that (session, model) be warm up to a target prefix.

Rules:

- Every change of state goes through TRANSITIONS; anything else is a bug and raises.
- A job has one leg in flight at most. Compute comes first, since a missing prefill costs more at the switch than a
  missing transfer; an export is always followed by its fetch, so that P's blocks are pinned only briefly.
- Targets only grow, except that a rewritten history cuts the job back to the longest common token prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from controller.core.instance import Instance
from controller.core.session import Binding, SessionKey
from pd_shadow.api.v1 import common_pb2 as pb
from transfer.chunks import Chunk, next_chunk


class JobState(Enum):
    """Where a job is."""

    # No target: its model serves the session, or the target engine has not rendered the context yet.
    IDLE = "idle"
    # Has a target and no leg in flight; warm when nothing is missing.
    WAITING = "waiting"
    PREFILLING = "prefilling"
    EXPORTING = "exporting"
    # P handed out its blocks; the fetch follows at once.
    EXPORTED = "exported"
    FETCHING = "fetching"
    # The last leg failed.
    BACKOFF = "backoff"
    DROPPED = "dropped"


class JobInput(Enum):
    """What can happen to a job."""

    TARGET = "target"
    SUSPEND = "suspend"
    START_PREFILL = "start_prefill"
    START_EXPORT = "start_export"
    START_FETCH = "start_fetch"
    LEG_DONE = "leg_done"
    LEG_CANCELLED = "leg_cancelled"
    LEG_FAILED = "leg_failed"
    RETRY_DUE = "retry_due"
    DROP = "drop"


_S, _I = JobState, JobInput
_LEG_ENDS = {_I.LEG_CANCELLED: _S.WAITING, _I.LEG_FAILED: _S.BACKOFF, _I.DROP: _S.DROPPED}

TRANSITIONS: dict[JobState, dict[JobInput, JobState]] = {
    _S.IDLE: {_I.TARGET: _S.WAITING, _I.SUSPEND: _S.IDLE, _I.DROP: _S.DROPPED},
    _S.WAITING: {
        _I.TARGET: _S.WAITING,
        _I.SUSPEND: _S.IDLE,
        _I.START_PREFILL: _S.PREFILLING,
        _I.START_EXPORT: _S.EXPORTING,
        _I.DROP: _S.DROPPED,
    },
    # A new target or a suspension leaves a running leg alone; what to do with the leg is the caller's decision.
    _S.PREFILLING: {_I.TARGET: _S.PREFILLING, _I.SUSPEND: _S.PREFILLING, _I.LEG_DONE: _S.WAITING, **_LEG_ENDS},
    _S.EXPORTING: {_I.TARGET: _S.EXPORTING, _I.SUSPEND: _S.EXPORTING, _I.LEG_DONE: _S.EXPORTED, **_LEG_ENDS},
    _S.EXPORTED: {_I.START_FETCH: _S.FETCHING, _I.LEG_CANCELLED: _S.WAITING, _I.DROP: _S.DROPPED},
    _S.FETCHING: {_I.TARGET: _S.FETCHING, _I.SUSPEND: _S.FETCHING, _I.LEG_DONE: _S.WAITING, **_LEG_ENDS},
    _S.BACKOFF: {_I.TARGET: _S.BACKOFF, _I.SUSPEND: _S.IDLE, _I.RETRY_DUE: _S.WAITING, _I.DROP: _S.DROPPED},
    _S.DROPPED: {},
}


@dataclass(eq=False, slots=True)
class Leg:
    """One leg in flight."""

    leg_id: str
    kind: pb.LegKind.ValueType
    instance: Instance
    gateway_id: str
    revision: int
    chunk: Chunk
    deadline: float
    cancelled: bool = False
    # How far the instance has come by its own reports, and how much of that is in the coverage already.
    covered: int = field(init=False)
    booked: int = field(init=False)

    def __post_init__(self) -> None:
        self.covered = self.booked = self.chunk.start

    def cut_back(self, kept: int) -> None:
        """The history was rewritten after `kept` tokens, in whole blocks: the leg is about nothing beyond."""
        self.chunk = Chunk(min(self.chunk.start, kept), min(self.chunk.end, kept))
        self.covered, self.booked = min(self.covered, kept), min(self.booked, kept)


@dataclass(eq=False, slots=True)
class ShadowJob:
    """One (session, model) to keep warm."""

    session: SessionKey
    model: str
    binding: Binding
    prefill: Instance
    decode: Instance | None
    created: float
    state: JobState = JobState.IDLE
    probability: float = 0.0
    revision: int = 0
    target_tokens: int = 0
    leg: Leg | None = None
    # The session's call is on this model, or its context was not rendered yet: no new legs.
    suspended: pb.ShadowReason.ValueType = pb.SHADOW_REASON_RENDERING
    # What the scheduler or the last leg said; what operators see.
    reason: pb.ShadowReason.ValueType = pb.SHADOW_REASON_RENDERING
    failures: int = 0
    retry_at: float = 0.0
    # A cancelled prefill leaves computed blocks behind that its successor finds cached.
    cancelled_prefill: bool = False

    def apply(self, what: JobInput) -> None:
        """Move along TRANSITIONS; raises ValueError for an input the state does not take."""
        following = TRANSITIONS[self.state].get(what)
        if following is None:
            raise ValueError(f"a {self.state.value} job takes no {what.value}")
        self.state = following

    def next_prefill(self, chunk_tokens: int) -> Chunk | None:
        """What P lacks next."""
        return next_chunk(self.binding.prefill_tokens, self.target_tokens, self.prefill.facts.block_size, chunk_tokens)

    def next_push(self, chunk_tokens: int) -> Chunk | None:
        """What D lacks next of what P holds."""
        if self.decode is None:
            return None
        held = min(self.binding.prefill_tokens, self.target_tokens)
        return next_chunk(self.binding.decode_tokens, held, self.prefill.facts.block_size, chunk_tokens)
