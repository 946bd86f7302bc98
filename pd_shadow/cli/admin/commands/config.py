"""What is in force."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.invocation import client_of, guarded


@click.command("config")
@click.pass_context
@guarded
def effective_config(ctx: click.Context) -> None:
    """Show the configuration, policy, pauses and drains in force, as JSON.

    \b
    Example:
      pd-shadow admin config
    """
    with client_of(ctx) as client:
        answer = client.call("GetEffectiveConfig", pb.GetEffectiveConfigRequest())
        click.echo(tables.dump(tables.to_json(answer)))
