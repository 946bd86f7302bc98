"""Shadow legs inside the engine, in the order they are worked on."""

import bisect
import enum
from collections.abc import Iterator
from typing import Any

from pd_shadow.engine.tags import LegKind, ShadowTag


class LegEnd(enum.Enum):
    """Why a shadow leg ended; the names are those of the API's LegEnd."""

    DONE = "done"
    # Ended early, with what it had: the class or the pinned exports are full; not even an idle iteration holds the
    # smallest chunk; shadow work is switched off; no progress for too long.
    NO_ROOM = "no_room"
    BELOW_MINIMUM = "below_minimum"
    PAUSED = "paused"
    STALLED = "stalled"
    # An export whose prefix is not in the cache; a fetch without transfer parameters, or whose transfer failed.
    NOT_CACHED = "not_cached"
    NOT_TRANSFERABLE = "not_transferable"
    TRANSFER_FAILED = "transfer_failed"


class Job:
    """One leg: the request that carries it and how far it is to go, in whole blocks of tokens."""

    def __init__(self, request: Any, tag: ShadowTag, target_tokens: int, now: float) -> None:
        self.request = request
        self.kind = tag.kind
        self.probability = tag.probability
        self.session = tag.session
        self.target_tokens = target_tokens
        self.computed_tokens = 0
        # When it came, or when its load began.
        self.since = now
        # KV for it is on its way; its blocks cannot be taken back before it is there, or has failed to come.
        self.loading = False
        self.failed = False
        # Why it cannot be admitted at all.
        self.refused: LegEnd | None = None

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)


class JobQueue:
    """Jobs by request id, and by kind: likeliest switch first, then first come first served."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._order: dict[LegKind, list[Job]] = {kind: [] for kind in LegKind}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._jobs

    def add(self, job: Job) -> None:
        self._jobs[job.request_id] = job
        bisect.insort(self._order[job.kind], job, key=lambda job: -job.probability)

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def remove(self, request_id: str) -> None:
        """Forget a job; one that is not there is no error."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._order[job.kind].remove(job)

    def of(self, kind: LegKind) -> list[Job]:
        """Jobs of one kind in working order."""
        return list(self._order[kind])
