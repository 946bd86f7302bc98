"""Answers of AdminService as tables for people and as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf import json_format
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from rich.table import Table
from rich.text import Text

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.common.reasons import label

STATE_STYLES = {
    common.INSTANCE_STATE_READY: "green",
    common.INSTANCE_STATE_DRAINING: "yellow",
    common.INSTANCE_STATE_SUSPECT: "yellow",
    common.INSTANCE_STATE_GONE: "red",
}


class Column(NamedTuple):
    title: str
    show: Callable[[Any], object]
    right: bool = False


class Listing(NamedTuple):
    """A list that AdminService gives, and how it is shown."""

    rpc: str
    request: type[Any]
    # Field of the answer, and of Watch's request and answer.
    field: str
    watched: str
    columns: tuple[Column, ...]


def as_label(descriptor: EnumDescriptor, value: int) -> str:
    """An enum value's label; a dash for unspecified."""
    return label(descriptor, value) if value else "-"


def session_name(key: common.SessionKey) -> str:
    """tenant/session, or the session alone in the default tenant."""
    return f"{key.tenant}/{key.session_id}" if key.tenant else key.session_id


def to_json(message: Message) -> dict[str, Any]:
    """Every field by its name in the API, unset ones with their defaults."""
    found: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def dump(value: Any, *, indent: int | None = 2) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False)


def table(columns: Sequence[Column], rows: Sequence[Any], title: str | None = None) -> Table:
    """A plain table that a narrow terminal or a pipe shows well."""
    made = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for column in columns:
        made.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        # Text, not markup: a session may be called [red].
        cells = (column.show(row) for column in columns)
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
    return made


def _state(instance: pb.Instance) -> Text:
    text = Text(as_label(common.InstanceState.DESCRIPTOR, instance.state), STATE_STYLES.get(instance.state, ""))
    if instance.draining and instance.state != common.INSTANCE_STATE_DRAINING:
        text.append(", draining")
    if instance.shadow_paused:
        text.append(", shadow paused")
    return text


def _sides(session: pb.Session) -> str:
    sides = (
        f"{b.model}: {b.prefill.name or '-'} {b.prefill_tokens:,}"
        + (f" / {b.decode.name} {b.decode_tokens:,}" if b.decode.name else "")
        for b in session.bindings
        if b.prefill.name or b.decode.name
    )
    return "; ".join(sides) or "-"


def _failing(link: pb.Link) -> str:
    """P instances whose transfers to this D fail, and what is done about each."""
    return ", ".join(f"{p.prefill.name} ({as_label(common.LinkState.DESCRIPTOR, p.state)})" for p in link.failing)


def _clock(event: pb.Event) -> str:
    return event.time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S") + "Z"


MODELS = Listing(
    "ListModels",
    pb.ListModelsRequest,
    "models",
    "models",
    (
        Column("MODEL", lambda m: m.name),
        Column("P READY", lambda m: m.prefill_ready, right=True),
        Column("D READY", lambda m: m.decode_ready, right=True),
        Column("COLOCATED READY", lambda m: m.colocated_ready, right=True),
        Column("CONTEXT", lambda m: f"{m.max_context_tokens:,}" if m.max_context_tokens else "-", right=True),
        Column("SHADOW", lambda m: "paused" if m.shadow_paused else "on"),
    ),
)
INSTANCES = Listing(
    "ListInstances",
    pb.ListInstancesRequest,
    "instances",
    "instances",
    (
        Column("INSTANCE", lambda i: i.endpoint.ref.name),
        Column("MODEL", lambda i: i.model),
        Column("ROLE", lambda i: as_label(common.Role.DESCRIPTOR, i.role)),
        Column("STATE", _state),
        Column("CALLS", lambda i: i.calls_in_flight, right=True),
        Column("PENDING TOKENS", lambda i: f"{i.pending_prefill_tokens:,}", right=True),
        Column("LEGS", lambda i: i.shadow_legs, right=True),
        Column("SESSIONS", lambda i: i.sessions, right=True),
        Column("KV", lambda i: f"{i.kv_usage:.0%}", right=True),
        Column("ENGINE", lambda i: "stock" if i.request_level else f"plugin {i.plugin.version}"),
    ),
)
SESSIONS = Listing(
    "ListSessions",
    pb.ListSessionsRequest,
    "sessions",
    "sessions",
    (
        Column("SESSION", lambda s: session_name(s.key)),
        Column("MODEL", lambda s: s.current_model or "-"),
        Column("TASK", lambda s: s.task or "-"),
        Column("CALLS", lambda s: s.calls, right=True),
        Column("SWITCHES", lambda s: s.switches, right=True),
        Column("IN FLIGHT", lambda s: s.calls_in_flight, right=True),
        Column("BOUND TO (TOKENS)", _sides),
    ),
)
JOBS = Listing(
    "ListShadowJobs",
    pb.ListShadowJobsRequest,
    "jobs",
    "shadow_jobs",
    (
        Column("SESSION", lambda j: session_name(j.session)),
        Column("MODEL", lambda j: j.model),
        Column("REASON", lambda j: as_label(common.ShadowReason.DESCRIPTOR, j.reason)),
        Column("LEG", lambda j: as_label(common.LegKind.DESCRIPTOR, j.leg)),
        Column("ON P", lambda j: f"{j.prefill_tokens:,}", right=True),
        Column("ON D", lambda j: f"{j.decode_tokens:,}", right=True),
        Column("TARGET", lambda j: f"{j.target_tokens:,}", right=True),
        Column("SWITCH", lambda j: f"{j.switch_probability:.0%}", right=True),
    ),
)
LINKS = Listing(
    "ListLinks",
    pb.ListLinksRequest,
    "links",
    "links",
    (
        Column("LINK TO", lambda k: k.decode.name),
        Column("MODEL", lambda k: k.model),
        Column("GATE", lambda k: as_label(common.GateReason.DESCRIPTOR, k.gate)),
        Column("TRANSFERS", lambda k: k.normal_transfers, right=True),
        Column("CHUNKS", lambda k: k.shadow_chunks, right=True),
        Column("NORMAL S", lambda k: f"{k.normal_seconds:,.1f}", right=True),
        Column("SHADOW S", lambda k: f"{k.shadow_seconds:,.1f}", right=True),
        Column("IDLE S", lambda k: f"{k.idle_seconds:,.1f}", right=True),
        Column("FAILING FROM", _failing),
    ),
)
EVENTS = (
    Column("TIME", _clock),
    Column("KIND", lambda e: as_label(pb.EventKind.DESCRIPTOR, e.kind)),
    Column("SUBJECT", lambda e: e.subject),
    Column("REASON", lambda e: e.reason),
    Column("MESSAGE", lambda e: e.message),
)
_PAIR = (Column("", lambda pair: pair[0]), Column("", lambda pair: f"{pair[1]:,}", right=True))


def event_line(event: pb.Event) -> str:
    """One event as one line, for logs that grow."""
    return "  ".join(str(column.show(event)) for column in EVENTS)


def ledger(answer: pb.GetLedgerResponse) -> Table:
    """The three ledgers, one number a line."""
    rows = []
    for name in ("shadow", "calls", "in_flight"):
        message = getattr(answer, name)
        rows += [(f"{name}.{field.name}", getattr(message, field.name)) for field in message.DESCRIPTOR.fields]
    return table(_PAIR, rows)


def statistics(answer: pb.GetStatisticsResponse) -> Table:
    """Every count with what it is about."""
    rows: list[tuple[str, int]] = [("sessions", answer.sessions)]
    for field in answer.DESCRIPTOR.fields:
        if not field.is_repeated:
            continue
        for count in getattr(answer, field.name):
            parts = [field.name]
            for part in count.DESCRIPTOR.fields:
                if part.name != "count":
                    value = getattr(count, part.name)
                    parts.append(as_label(part.enum_type, value) if part.enum_type else value)
            rows.append((" ".join(parts), count.count))
    return table(_PAIR, rows)


def fields(message: Message) -> Table:
    """A message's fields, one a line."""
    columns = (Column("", lambda pair: pair[0]), Column("", lambda pair: pair[1]))
    return table(columns, list(to_json(message).items()))
