"""Inbound links of decode instances."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import instance_names
from pd_shadow.cli.admin.invocation import SETTINGS, as_json, client_of, complete, guarded, limited, of_model, watching
from pd_shadow.cli.admin.output import show_list, show_one


@click.group(context_settings=SETTINGS)
def links() -> None:
    """Inbound links of decode instances."""


@links.command("list")
@of_model
@as_json
@watching
@limited
@click.pass_context
@guarded
def list_links(ctx: click.Context, model: str, as_json: bool, watch: bool, limit: int) -> None:
    """List links.

    \b
    Example:
      pd-shadow admin links list --watch
    """
    show_list(ctx, tables.LINKS, pb.ListLinksRequest(model=model), as_json, watch, limit)


@links.command("get")
@click.argument("decode", shell_complete=complete(instance_names))
@as_json
@click.pass_context
@guarded
def get_link(ctx: click.Context, decode: str, as_json: bool) -> None:
    """Show the inbound link of a decode instance.

    \b
    Example:
      pd-shadow admin links get m7b-d0
    """
    with client_of(ctx) as client:
        show_one(client.call("GetLink", pb.GetLinkRequest(decode=decode)).link, as_json, tables.LINKS)
