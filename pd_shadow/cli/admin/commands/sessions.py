"""Agent sessions: list, get, rebind, forget."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import instance_names, model_names
from pd_shadow.cli.admin.invocation import (
    SETTINGS,
    as_json,
    client_of,
    complete,
    guarded,
    limited,
    of_model,
    of_tenant,
    session_key,
    watching,
)
from pd_shadow.cli.admin.output import show_list, show_one


@click.group(context_settings=SETTINGS)
def sessions() -> None:
    """Agent sessions: list, get, rebind, forget."""


@sessions.command("list")
@click.option("--tenant", help="Only this tenant.  [default: all]")
@of_model
@click.option("--instance", default="", shell_complete=complete(instance_names), help="Only those bound to it.")
@as_json
@watching
@limited
@click.pass_context
@guarded
def list_sessions(
    ctx: click.Context, tenant: str | None, model: str, instance: str, as_json: bool, watch: bool, limit: int
) -> None:
    """List sessions; --model: whose last call went to that model.

    \b
    Example:
      pd-shadow admin sessions list --instance m7b-d1
    """
    request = pb.ListSessionsRequest(tenant=tenant, model=model, instance=instance)
    show_list(ctx, tables.SESSIONS, request, as_json, watch, limit)


@sessions.command("get")
@click.argument("session")
@of_tenant
@as_json
@click.pass_context
@guarded
def get_session(ctx: click.Context, session: str, tenant: str, as_json: bool) -> None:
    """Show one session.

    \b
    Example:
      pd-shadow admin sessions get agent-17 --tenant acme
    """
    with client_of(ctx) as client:
        answer = client.call("GetSession", pb.GetSessionRequest(session=session_key(session, tenant)))
        show_one(answer.session, as_json, tables.SESSIONS)


@sessions.command()
@click.argument("session")
@of_tenant
@click.option("--model", required=True, shell_complete=complete(model_names), help="The model to bind for.")
@click.option("--prefill", shell_complete=complete(instance_names), help="P or colocated instance; '' unbinds.")
@click.option("--decode", shell_complete=complete(instance_names), help="D instance; '' unbinds.")
@as_json
@click.pass_context
@guarded
def rebind(
    ctx: click.Context,
    session: str,
    tenant: str,
    model: str,
    prefill: str | None,
    decode: str | None,
    as_json: bool,
) -> None:
    """Bind a session's next call on a model to other instances.

    \b
    Examples:
      pd-shadow admin sessions rebind agent-17 --model m7b --prefill m7b-p1 --decode m7b-d0
      pd-shadow admin sessions rebind agent-17 --model m7b --prefill ''
    """
    if prefill is None and decode is None:
        raise click.UsageError("give --prefill, --decode or both")
    request = pb.RebindSessionRequest(session=session_key(session, tenant), model=model, prefill=prefill, decode=decode)
    with client_of(ctx) as client:
        show_one(client.call("RebindSession", request).session, as_json, tables.SESSIONS)


@sessions.command()
@click.argument("session")
@of_tenant
@click.pass_context
@guarded
def forget(ctx: click.Context, session: str, tenant: str) -> None:
    """Forget a session, with its bindings and shadow work.

    \b
    Example:
      pd-shadow admin sessions forget agent-17
    """
    with client_of(ctx) as client:
        client.call("ForgetSession", pb.ForgetSessionRequest(session=session_key(session, tenant)))
        click.echo(f"{tables.session_name(session_key(session, tenant))} is forgotten.")
