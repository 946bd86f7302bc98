"""Models and how many instances serve them."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import model_names
from pd_shadow.cli.admin.invocation import SETTINGS, as_json, client_of, complete, guarded, limited, watching
from pd_shadow.cli.admin.output import show_list, show_one


@click.group(context_settings=SETTINGS)
def models() -> None:
    """Models and how many instances serve them."""


@models.command("list")
@as_json
@watching
@limited
@click.pass_context
@guarded
def list_models(ctx: click.Context, as_json: bool, watch: bool, limit: int) -> None:
    """List models.

    \b
    Example:
      pd-shadow admin models list
    """
    show_list(ctx, tables.MODELS, pb.ListModelsRequest(), as_json, watch, limit)


@models.command("get")
@click.argument("model", shell_complete=complete(model_names))
@as_json
@click.pass_context
@guarded
def get_model(ctx: click.Context, model: str, as_json: bool) -> None:
    """Show one model.

    \b
    Example:
      pd-shadow admin models get m7b --json
    """
    with client_of(ctx) as client:
        show_one(client.call("GetModel", pb.GetModelRequest(name=model)).model, as_json, tables.MODELS)
