"""Traces: what a process tells about its calls, span by span, if its configuration says where to.

Nothing of OpenTelemetry is imported here. Without configuration every span is `NO_SPAN`, which does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, StringConstraints

from pd_shadow.common.config import Config, ConfigError

Value = str | bool | int | float


class TracingConfig(Config):
    """Where traces go, and how many of them."""

    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+:\d+$")]
    """An OTLP collector's gRPC address; https:// for TLS with the public authorities."""
    sample_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Of traces that begin here; those of clients that send a traceparent are sampled as they say."""
    service_name: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Unset: pd-shadow-gateway or pd-shadow-controller."""


class Span:
    """A span that is recorded nowhere. As a context manager it ends, and fails with the type of what was raised.

    Never give it what a prompt, a token or a message of an unforeseen error says.
    """

    def set(self, **attributes: Value | None) -> None:
        """Attributes, under pd_shadow.NAME; None is left out."""

    def fail(self, why: str) -> None:
        """Mark it as failed: a reason's label, or an error's type."""

    def child(self, name: str) -> Span:
        """A span within this one, begun now."""
        return self

    def headers(self) -> dict[str, str]:
        """What a callee needs to go on with the trace: traceparent, and tracestate if there is one."""
        return {}

    def end(self) -> None:
        """It is over; a second time changes nothing."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.fail(kind.__name__)
        self.end()


class Tracing:
    """Begins spans that have no parent in this process; here, spans that are recorded nowhere."""

    def serve(self, name: str, headers: Mapping[str, str]) -> Span:
        """A request came in; its headers (names in any case) may carry a W3C traceparent."""
        return NO_SPAN

    def apart(self, name: str, cause: Span | None) -> Span:
        """Work of its own, in a trace of its own, with a link to the span that gave rise to it."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is left; blocks for some seconds at most."""


NO_SPAN = Span()
NO_TRACING = Tracing()


def open_tracing(config: TracingConfig | None, service: str) -> Tracing:
    """Tracing as configured; raises ConfigError when the packages for it are missing."""
    if config is None:
        return NO_TRACING
    try:
        from pd_shadow.common.otel import exporting
    except ImportError as error:
        raise ConfigError(f"tracing: needs the extra otel: pip install 'pd-shadow[otel]' ({error})") from error
    return exporting(config, config.service_name or service)
