"""The shadow jobs of one instance, in order of their switch probability (paper section 3.1)."""

from collections.abc import Callable
from typing import NamedTuple


class ShadowJob:
    """The wish that an instance hold a session's context up to `target` tokens.

    What it lacks when it is aimed is computed once: where memory is so short that it is lost again before it is used,
    computing it anew until the next call would only push out others. A job that `repeats` does so nevertheless.
    """

    __slots__ = ("_progress", "left", "probability", "repeats", "session", "target")

    def __init__(self, session: int, progress: Callable[["ShadowJob", float], None]) -> None:
        self.session = session
        self.target = 0
        # Tokens still to be computed, or at any one time.
        self.left = 0
        self.repeats = False
        self.probability = 0.0
        self._progress = progress

    def aim(self, target: int, held: int, probability: float = 0.0, *, repeats: bool = False) -> None:
        """Warm up to `target` tokens, of which `held` are there."""
        self.target = target
        self.repeats = repeats
        self.left = target if repeats else max(0, target - held)
        self.probability = probability

    def ran(self, tokens: int, now: float) -> None:
        """So many more tokens were computed."""
        if not self.repeats:
            self.left = max(0, self.left - tokens)
        self._progress(self, now)


class _Entry(NamedTuple):
    probability: float
    order: int
    job: ShadowJob


class ShadowQueue:
    """At most a few jobs per session that runs, so a sorted list does."""

    def __init__(self) -> None:
        self._jobs: dict[ShadowJob, _Entry] = {}
        self._sorted: list[ShadowJob] | None = []
        self._order = 0

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: ShadowJob) -> bool:
        return job in self._jobs

    def add(self, job: ShadowJob) -> None:
        """Queue a job, or take note of its new probability."""
        before = self._jobs.get(job)
        self._order += before is None
        order = self._order if before is None else before.order
        self._jobs[job] = _Entry(-job.probability, order, job)
        self._sorted = None

    def discard(self, job: ShadowJob) -> None:
        if self._jobs.pop(job, None) is not None:
            self._sorted = None

    def first(self, count: int) -> list[ShadowJob]:
        """The jobs to run next."""
        if self._sorted is None:
            self._sorted = [entry.job for entry in sorted(self._jobs.values(), key=lambda entry: entry[:2])]
        return self._sorted[:count]
