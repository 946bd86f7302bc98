"""Shadow legs inside the engine, in the order they are worked on."""

import enum
from collections.abc import Iterator
from typing import Any

from pd_shadow.engine.vllm.tags import LegKind, ShadowTag


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
        self.progressed = now
        # A fetch whose KV is on its way; its blocks cannot be taken back.
        self.loading = False

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)


class JobQueue:
    """Jobs by request id, likeliest switch first, then first come first served."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._jobs

    def add(self, job: Job) -> None:
        self._jobs[job.request_id] = job

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def remove(self, job: Job) -> None:
        self._jobs.pop(job.request_id, None)

    def of(self, kind: LegKind) -> list[Job]:
        """Jobs of one kind in working order."""
        # Python's sort is stable, and the dictionary keeps the order of arrival.
        return sorted((job for job in self._jobs.values() if job.kind is kind), key=lambda job: -job.probability)
