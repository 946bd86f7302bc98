"""Finished spans, kept in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from pd_shadow.common.otel import PREFIX, OtelTracing


class Kept:
    """Tracing whose spans a test can read once they have ended."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = OtelTracing(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """In order of their end."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (span,) = (span for span in self.spans if span.name == name)
        return span


def about(span: ReadableSpan) -> Mapping[str, object]:
    """What a span says, names without their prefix."""
    return {key.removeprefix(PREFIX): value for key, value in (span.attributes or {}).items()}


def ids(span: ReadableSpan) -> tuple[str, str]:
    """(trace id, span id) as in a traceparent."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"
