"""Pausing and resuming shadow work; its policy."""

from __future__ import annotations

from typing import Any

import click

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import instance_names, model_names
from pd_shadow.cli.admin.invocation import SETTINGS, as_json, client_of, complete, guarded
from pd_shadow.cli.admin.output import show


@click.group(context_settings=SETTINGS)
def shadow() -> None:
    """Pause and resume shadow work; change its policy."""


def _scope(model: str | None, instance: str | None, cluster: bool) -> dict[str, Any]:
    given: dict[str, Any] = {"model": model, "instance": instance, "cluster": cluster or None}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise click.UsageError("give one of --cluster, --model and --instance")
    return given


_in_cluster = click.option("--cluster", is_flag=True, help="All shadow work.")
_on_model = click.option("--model", shell_complete=complete(model_names), help="Shadow work of this model.")
_on_instance = click.option(
    "--instance", shell_complete=complete(instance_names), help="Shadow work on instances of this name."
)


def _show_pauses(answer: Any, as_json: bool) -> None:
    if as_json:
        click.echo(tables.dump(tables.to_json(answer)))
        return
    pauses = answer.pauses
    paused = [
        *(["the cluster"] if pauses.cluster else []),
        *(f"model {name}" for name in pauses.models),
        *(f"instance {name}" for name in pauses.instances),
    ]
    click.echo(f"Shadow work is paused for: {', '.join(paused)}." if paused else "Shadow work is paused nowhere.")


@shadow.command()
@_in_cluster
@_on_model
@_on_instance
@as_json
@click.pass_context
@guarded
def pause(ctx: click.Context, cluster: bool, model: str | None, instance: str | None, as_json: bool) -> None:
    """Pause shadow work, until it is resumed.

    \b
    Examples:
      pd-shadow admin shadow pause --cluster
      pd-shadow admin shadow pause --instance m7b-p0
    """
    request = pb.PauseShadowRequest(**_scope(model, instance, cluster))
    with client_of(ctx) as client:
        _show_pauses(client.call("PauseShadow", request), as_json)


@shadow.command()
@_in_cluster
@_on_model
@_on_instance
@as_json
@click.pass_context
@guarded
def resume(ctx: click.Context, cluster: bool, model: str | None, instance: str | None, as_json: bool) -> None:
    """Take back a pause of exactly this scope.

    \b
    Example:
      pd-shadow admin shadow resume --cluster
    """
    request = pb.ResumeShadowRequest(**_scope(model, instance, cluster))
    with client_of(ctx) as client:
        _show_pauses(client.call("ResumeShadow", request), as_json)


@shadow.command()
@click.option("--approach", help="Such as harvest-slo; brings its own values for the next two.")
@click.option("--enabled/--disabled", default=None, help="Whether to shadow at all.")
@click.option("--gate", type=click.FloatRange(0, 1), help="No shadow below this switch probability.")
@click.option("--top-k", type=click.IntRange(0), help="Shadow only so many of the likeliest models; 0 for all.")
@as_json
@click.pass_context
@guarded
def policy(
    ctx: click.Context,
    approach: str | None,
    enabled: bool | None,
    gate: float | None,
    top_k: int | None,
    as_json: bool,
) -> None:
    """Change the shadow policy, and show the one then in force; without options, only show it.

    \b
    Examples:
      pd-shadow admin shadow policy
      pd-shadow admin shadow policy --approach predictive --top-k 1
    """
    request = pb.SetShadowPolicyRequest(approach=approach, enabled=enabled, gate_probability=gate, top_k=top_k)
    with client_of(ctx) as client:
        if request.ListFields():
            found = client.call("SetShadowPolicy", request).policy
        else:
            found = client.call("GetEffectiveConfig", pb.GetEffectiveConfigRequest()).policy
        show(found, as_json, lambda: tables.fields(found))
