"""What ties an engine to the outside: the controller, its own metrics page, and neighbours on the same hardware.

The engine's thread calls in; nothing here makes it wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pd_shadow.engine import metrics
from pd_shadow.engine.directives import Directive
from pd_shadow.engine.neighbours import Neighbours
from pd_shadow.engine.reporter import Reporter
from pd_shadow.engine.residency import Residency
from pd_shadow.engine.settings import PluginSettings
from pd_shadow.engine.snapshot import EngineFacts, EngineSnapshot
from pd_shadow.engine.steps import StepLog

PUBLISH_SECONDS = 0.1
"""Shortest time between two snapshots of a busy engine: making one costs more than a step can spare every time."""


class Attachment:
    """Opened and closed with the engine. `life` is its incarnation, by default that of the process.

    Raises OSError, CredentialError or NeighboursFullError when a part cannot be opened.
    """

    def __init__(self, settings: PluginSettings, facts: EngineFacts, log: StepLog, life: str | None = None) -> None:
        self._reporter = Reporter(settings.reporter, facts, life=life) if settings.reporter else None
        hardware = settings.reporter.hardware if settings.reporter else ""
        self._neighbours = Neighbours(hardware) if hardware else None
        self._residency = Residency(facts.block_size)
        self._snapshot = EngineSnapshot()
        self._published = 0.0
        self._close_metrics = (
            metrics.serve(settings.metrics_listen, log, lambda: self._snapshot) if settings.metrics_listen else None
        )
        if self._reporter is not None:
            self._reporter.start()

    def directives(self) -> Sequence[Directive]:
        """What the controller wants, each directive once."""
        return self._reporter.take_directives() if self._reporter is not None else ()

    def mark(self, now: float, *, busy: bool) -> None:
        """Tell neighbours whether this engine has normal work."""
        if self._neighbours is not None:
            self._neighbours.mark(now, busy=busy)

    def neighbours_busy(self, now: float) -> bool:
        """Whether another engine on this hardware has normal work."""
        return self._neighbours is not None and self._neighbours.busy(now)

    def hold(self, session: str, blocks: Sequence[int]) -> None:
        """A session's context, from its beginning, is cached in these blocks."""
        if self._reporter is not None and session:
            self._residency.hold(session, blocks)

    def held(self, session: str) -> Sequence[int]:
        """The blocks of a session's context, from its beginning."""
        return self._residency.blocks(session)

    def progress(self, session: str, covered_tokens: int) -> None:
        """A session's shadow leg covers so many tokens now."""
        if self._reporter is not None and session:
            self._reporter.progress(session, covered_tokens)

    def evicted(self, blocks: Iterable[int]) -> None:
        """The content of these blocks was given up."""
        touched = self._residency.evicted(blocks)
        if self._reporter is not None:
            for session, tokens in touched.items():
                self._reporter.evicted(session, tokens)

    def cache_reset(self) -> None:
        """The whole prefix cache was cleared."""
        self._residency.clear()
        if self._reporter is not None:
            self._reporter.cache_reset()

    def publish(self, now: float, snapshot: Callable[[], EngineSnapshot], *, last: bool) -> None:
        """Show the engine's state; `last` when no step will follow for now."""
        if last or now - self._published >= PUBLISH_SECONDS:
            self._published = now
            self._snapshot = snapshot()
            if self._reporter is not None:
                self._reporter.publish(self._snapshot)

    def close(self) -> None:
        """End threads and give shared places back."""
        if self._reporter is not None:
            self._reporter.close()
        if self._close_metrics is not None:
            self._close_metrics()
        if self._neighbours is not None:
            self._neighbours.close()
