"""Structured logs on standard error: JSON lines for machines, readable lines on a terminal."""

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

LogFormat = Literal["auto", "json", "console"]
LOG_LEVELS = ("debug", "info", "warning", "error")


def configure(level: str = "info", log_format: LogFormat = "auto") -> None:
    """Set up structlog; `auto` is console on a terminal and JSON elsewhere.

    Libraries' own warnings come out in the same form: what they say about a broken request can hold a piece of it.
    """
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor
    renderer = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    common: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _format_exception,
    ]
    foreign = logging.StreamHandler(sys.stderr)
    foreign.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[foreign], level=logging.WARNING)
    structlog.configure(
        processors=[*common, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _format_exception(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Where exceptions were raised, and their types. What they say could quote a prompt or a token, so it stays out."""
    given = event.pop("exc_info", None)
    if given and not isinstance(given, BaseException):
        given = given[1] if isinstance(given, tuple) else sys.exc_info()[1]
    error = given if isinstance(given, BaseException) else None
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"{frames}{type(error).__module__}.{type(error).__qualname__}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if parts:
        # The first cause comes first, as Python prints it.
        event["exception"] = "\nwhich led to:\n".join(reversed(parts))
    return event


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose every line carries the component's name."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger
