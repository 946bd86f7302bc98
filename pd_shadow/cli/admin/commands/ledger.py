"""The ledgers, and counts by reason."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.invocation import as_json, client_of, guarded
from pd_shadow.cli.admin.output import show


@click.command()
@as_json
@click.pass_context
@guarded
def ledger(ctx: click.Context, as_json: bool) -> None:
    """Show the shadow ledger, the call ledger, and what is in flight.

    \b
    Example:
      pd-shadow admin ledger --json
    """
    with client_of(ctx) as client:
        answer = client.call("GetLedger", pb.GetLedgerRequest())
        show(answer, as_json, lambda: tables.ledger(answer))


@click.command()
@as_json
@click.pass_context
@guarded
def stats(ctx: click.Context, as_json: bool) -> None:
    """Show counts by reason since the controller started.

    \b
    Example:
      pd-shadow admin stats
    """
    with client_of(ctx) as client:
        answer = client.call("GetStatistics", pb.GetStatisticsRequest())
        show(answer, as_json, lambda: tables.statistics(answer))
