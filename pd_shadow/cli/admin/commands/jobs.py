"""Shadow jobs, and what holds them."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import model_names
from pd_shadow.cli.admin.invocation import (
    SETTINGS,
    as_json,
    client_of,
    complete,
    enum_number,
    guarded,
    limited,
    of_model,
    of_tenant,
    session_key,
    watching,
)
from pd_shadow.cli.admin.output import show_list, show_one
from pd_shadow.common.reasons import labels


@click.group(context_settings=SETTINGS)
def jobs() -> None:
    """Shadow jobs, and what holds them."""


@jobs.command("list")
@of_model
@click.option("--reason", type=click.Choice(labels(common.ShadowReason.DESCRIPTOR)), help="Only with this reason.")
@as_json
@watching
@limited
@click.pass_context
@guarded
def list_jobs(ctx: click.Context, model: str, reason: str | None, as_json: bool, watch: bool, limit: int) -> None:
    """List shadow jobs.

    \b
    Example:
      pd-shadow admin jobs list --reason backoff
    """
    number = common.ShadowReason.ValueType(enum_number(common.ShadowReason.DESCRIPTOR, reason))
    show_list(ctx, tables.JOBS, pb.ListShadowJobsRequest(model=model, reason=number), as_json, watch, limit)


@jobs.command("get")
@click.argument("session")
@click.argument("model", shell_complete=complete(model_names))
@of_tenant
@as_json
@click.pass_context
@guarded
def get_job(ctx: click.Context, session: str, model: str, tenant: str, as_json: bool) -> None:
    """Show the shadow job of a session on a model.

    \b
    Example:
      pd-shadow admin jobs get agent-17 m7b
    """
    with client_of(ctx) as client:
        request = pb.GetShadowJobRequest(session=session_key(session, tenant), model=model)
        show_one(client.call("GetShadowJob", request).job, as_json, tables.JOBS)
