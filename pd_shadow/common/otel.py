"""Traces over OpenTelemetry; imported only when tracing is configured (the extra `otel`)."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pd_shadow.common.tracing import Span, Tracing, TracingConfig, Value

PREFIX = "pd_shadow."
EXPORT_SECONDS = 3
"""Longest try to send spans; also what a process that stops waits for a collector that is away."""

_PROPAGATOR = TraceContextTextMapPropagator()


class _Recorded(Span):
    """One span of OpenTelemetry."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())
        self._ended = False

    @property
    def link(self) -> trace.Link:
        """For spans of other traces that this one gave rise to."""
        return trace.Link(self._span.get_span_context())

    def set(self, **attributes: Value | None) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(PREFIX + name, value)

    def fail(self, why: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, why)

    def child(self, name: str) -> Span:
        started = self._tracer.start_span(name, self._context, trace.SpanKind.CLIENT)
        return _Recorded(self._tracer, started)

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return carrier

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._span.end()


class OtelTracing(Tracing):
    """Spans of one provider, which knows where they go."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pd_shadow")

    def serve(self, name: str, headers: Mapping[str, str]) -> Span:
        # An empty context: whatever is current in this process is nobody's parent.
        parent = _PROPAGATOR.extract({key.lower(): value for key, value in headers.items()}, Context())
        return _Recorded(self._tracer, self._tracer.start_span(name, parent, trace.SpanKind.SERVER))

    def apart(self, name: str, cause: Span | None) -> Span:
        links = [cause.link] if isinstance(cause, _Recorded) else []
        return _Recorded(self._tracer, self._tracer.start_span(name, Context(), trace.SpanKind.CLIENT, links=links))

    def close(self) -> None:
        self._provider.shutdown()


def exporting(config: TracingConfig, service: str) -> OtelTracing:
    """Spans go to the collector in batches, from a thread of their own; while it is away they are lost."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=Resource.create({"service.name": service}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(config.endpoint, insecure=config.endpoint.startswith("http:"), timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracing(provider)
