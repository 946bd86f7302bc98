"""The event log."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.invocation import as_json, client_of, enum_number, guarded, watching
from pd_shadow.cli.admin.output import show
from pd_shadow.common.reasons import labels


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(labels(pb.EventKind.DESCRIPTOR)), help="Only these.")
@click.option("--subject", default="", help="Only about this instance, session, gateway, model or approach.")
@click.option("--after", type=click.IntRange(0), help="Only events after this sequence number.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most events shown.")
@watching
@as_json
@click.pass_context
@guarded
def events(
    ctx: click.Context,
    kinds: tuple[str, ...],
    subject: str,
    after: int | None,
    limit: int,
    watch: bool,
    as_json: bool,
) -> None:
    """Show events, oldest first; --watch waits for new ones.

    \b
    Examples:
      pd-shadow admin events --kind session_rebound
      pd-shadow admin events --watch --json
    """
    numbers = [pb.EventKind.ValueType(enum_number(pb.EventKind.DESCRIPTOR, kind)) for kind in kinds]
    with client_of(ctx) as client:
        if watch:
            for answer in client.stream(
                "WatchEvents", pb.WatchEventsRequest(after_sequence=after, kinds=numbers, subject=subject)
            ):
                event = answer.event
                click.echo(tables.dump(tables.to_json(event), indent=None) if as_json else tables.event_line(event))
            return
        request = pb.ListEventsRequest(after_sequence=after or 0, kinds=numbers, subject=subject, page_size=limit)
        found = client.call("ListEvents", request)
        show(found, as_json, lambda: tables.table(tables.EVENTS, found.events))
