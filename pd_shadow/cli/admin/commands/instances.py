"""Engine instances: list, get, drain, undrain."""

from __future__ import annotations

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import instance_names
from pd_shadow.cli.admin.invocation import (
    SETTINGS,
    as_json,
    client_of,
    complete,
    enum_number,
    guarded,
    limited,
    of_model,
    watching,
)
from pd_shadow.cli.admin.output import show_list, show_one
from pd_shadow.common.reasons import labels


@click.group(context_settings=SETTINGS)
def instances() -> None:
    """Engine instances: list, get, drain, undrain."""


@instances.command("list")
@of_model
@click.option("--role", type=click.Choice(labels(common.Role.DESCRIPTOR)), help="Only this role.")
@click.option("--state", type=click.Choice(labels(common.InstanceState.DESCRIPTOR)), help="Only this state.")
@as_json
@watching
@limited
@click.pass_context
@guarded
def list_instances(
    ctx: click.Context, model: str, role: str | None, state: str | None, as_json: bool, watch: bool, limit: int
) -> None:
    """List instances.

    \b
    Examples:
      pd-shadow admin instances list --role decode --watch
      pd-shadow admin instances list --state draining --json
    """
    request = pb.ListInstancesRequest(
        model=model,
        role=common.Role.ValueType(enum_number(common.Role.DESCRIPTOR, role)),
        state=common.InstanceState.ValueType(enum_number(common.InstanceState.DESCRIPTOR, state)),
    )
    show_list(ctx, tables.INSTANCES, request, as_json, watch, limit)


@instances.command("get")
@click.argument("name", shell_complete=complete(instance_names))
@as_json
@click.pass_context
@guarded
def get_instance(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show one instance.

    \b
    Example:
      pd-shadow admin instances get m7b-p0 --json
    """
    with client_of(ctx) as client:
        answer = client.call("GetInstance", pb.GetInstanceRequest(name=name))
        show_one(answer.instance, as_json, tables.INSTANCES)


@instances.command()
@click.argument("name", shell_complete=complete(instance_names))
@as_json
@click.pass_context
@guarded
def drain(ctx: click.Context, name: str, as_json: bool) -> None:
    """Place nothing new on an instance; what runs there ends normally.

    It is the name that is drained: an instance that restarts under it drains on, until it is undrained.

    \b
    Example:
      pd-shadow admin instances drain m7b-d1 && pd-shadow admin instances list --model m7b --watch
    """
    with client_of(ctx) as client:
        answer = client.call("DrainInstance", pb.DrainInstanceRequest(name=name))
        if as_json:
            click.echo(tables.dump(tables.to_json(answer)))
        elif answer.HasField("instance"):
            click.echo(f"{name} drains; {answer.instance.calls_in_flight} calls in flight.")
        else:
            click.echo(f"{name} was not seen yet, and will drain when it comes.")
        if answer.HasField("instance") and not answer.others_ready:
            role = tables.as_label(common.Role.DESCRIPTOR, answer.instance.role)
            click.echo(f"warning: no other {role} instance of {answer.instance.model} takes calls", err=True)


@instances.command()
@click.argument("name", shell_complete=complete(instance_names))
@as_json
@click.pass_context
@guarded
def undrain(ctx: click.Context, name: str, as_json: bool) -> None:
    """Let an instance take calls again.

    \b
    Example:
      pd-shadow admin instances undrain m7b-d1
    """
    with client_of(ctx) as client:
        answer = client.call("UndrainInstance", pb.UndrainInstanceRequest(name=name))
        click.echo(tables.dump(tables.to_json(answer)) if as_json else f"{name} takes calls again when it is healthy.")
