"""The commands of `pd-shadow admin`. Exit codes: 0 done, 1 the controller said no or did not answer, 2 wrong usage."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import click
from click.shell_completion import get_completion_class
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.cli.admin import contexts, tables, top
from pd_shadow.cli.admin.client import AnswerError, Client, instance_names, model_names
from pd_shadow.common.config import ConfigError
from pd_shadow.common.reasons import labels

P = ParamSpec("P")

# What a table shows where --limit says nothing.
DEFAULT_LIMIT = 500


class Session(NamedTuple):
    """What the options of `pd-shadow admin` say."""

    context: str | None
    address: str | None
    timeout: float

    def client(self) -> Client:
        """A connection to the chosen controller; raises ConfigError."""
        chosen = contexts.read().chosen(self.context)
        if self.address is not None:
            chosen = contexts.at(self.address, chosen)
        return Client(chosen, self.timeout)


def _guarded(function: Callable[P, None]) -> Callable[P, None]:
    """Errors become a line on standard error and the right exit code; Ctrl-C ends a watch well."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except AnswerError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)
        except ConfigError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(0)

    return run


def _console() -> Console:
    # A table in a pipe is as wide as it needs to be.
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=240)


def _client(ctx: click.Context) -> Client:
    session: Session = ctx.find_root().meta["pd_shadow.admin"]
    return session.client()


def _complete(pick: Callable[[Client], list[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Names for shell completion, from the controller of the context; silent where there is none."""

    def complete(ctx: click.Context, _: click.Parameter, typed: str) -> list[str]:
        # While completing, click runs no command: what was typed before is in the contexts on the way.
        given = {key: value for above in _upwards(ctx) for key, value in above.params.items()}
        options = Session(given.get("context"), given.get("address"), 1.0)
        with contextlib.suppress(ConfigError), options.client() as client:
            return [name for name in client.names(pick) if name.startswith(typed)]
        return []

    return complete


def _upwards(ctx: click.Context) -> list[click.Context]:
    return [ctx, *(_upwards(ctx.parent) if ctx.parent else [])]


def _complete_context(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    with contextlib.suppress(ConfigError):
        return [name for name in sorted(contexts.read().contexts) if name.startswith(typed)]
    return []


def _number(descriptor: EnumDescriptor, chosen: str | None) -> int:
    """The enum's number for a label; 0 for none."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return descriptor.values_by_name[f"{prefix}{chosen.upper()}"].number if chosen else 0


def _key(session: str, tenant: str) -> common.SessionKey:
    return common.SessionKey(tenant=tenant, session_id=session)


as_json = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
watching = click.option("--watch", "-w", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
limited = click.option(
    "--limit", type=click.IntRange(1), default=DEFAULT_LIMIT, show_default=True, help="Most lines shown."
)
of_model = click.option("--model", default="", shell_complete=_complete(model_names), help="Only this model.")
of_tenant = click.option("--tenant", default="", help="The session's tenant.  [default: the default tenant]")
SETTINGS = {"help_option_names": ["-h", "--help"]}


@click.group("admin", context_settings=SETTINGS)
@click.option("--context", shell_complete=_complete_context, help="A context other than the current one.")
@click.option("--address", metavar="HOST:PORT", help="The controller's gRPC address; wins over the context's.")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, help="Seconds to wait."
)
@click.pass_context
def admin(ctx: click.Context, context: str | None, address: str | None, timeout: float) -> None:
    """See and steer a running controller.

    Exit codes: 0 done; 1 the controller said no, knows no such thing, or did not answer; 2 wrong usage.

    \b
    Examples:
      pd-shadow admin context set prod --address controller.prod:7070 --ca ca.pem --token-env PD_SHADOW_TOKEN
      pd-shadow admin instances list --model m7b --watch
      pd-shadow admin instances drain m7b-d1
      pd-shadow admin shadow pause --model m7b
      pd-shadow admin --address 127.0.0.1:7070 top
      eval "$(pd-shadow admin completion bash)"
    """
    ctx.find_root().meta["pd_shadow.admin"] = Session(context, address, timeout)


# Showing.


def _show_list(
    ctx: click.Context, listing: tables.Listing, request: Message, as_json: bool, watch: bool, limit: int
) -> None:
    with _client(ctx) as client:
        if watch:
            _watch(client, listing, request, as_json, limit)
            return
        found, more = client.collect(listing.rpc, request, listing.field, limit)
        _print_list(listing, found, as_json)
        if more:
            click.echo(f"There are more than {limit}; --limit shows them.", err=True)


def _print_list(listing: tables.Listing, found: Sequence[Any], as_json: bool, *, indent: int | None = 2) -> None:
    if as_json:
        click.echo(tables.dump({listing.field: [tables.to_json(item) for item in found]}, indent=indent))
    else:
        _console().print(tables.table(listing.columns, found))


def _watch(client: Client, listing: tables.Listing, request: Any, as_json: bool, limit: int) -> None:
    request.page_size = min(limit, 1000)
    stream = client.stream("Watch", pb.WatchRequest(**{listing.watched: request}))
    answers = (getattr(getattr(answer, listing.watched), listing.field) for answer in stream)
    if as_json or not sys.stdout.isatty():
        for found in answers:
            _print_list(listing, found, as_json, indent=None)
            sys.stdout.flush()
        return
    with Live(console=_console(), auto_refresh=False) as live:
        for found in answers:
            live.update(tables.table(listing.columns, found), refresh=True)


def _show(message: Message, as_json: bool, made: Callable[[], Table]) -> None:
    if as_json:
        click.echo(tables.dump(tables.to_json(message)))
    else:
        _console().print(made())


def _show_one(message: Message, as_json: bool, listing: tables.Listing) -> None:
    _show(message, as_json, lambda: tables.table(listing.columns, [message]))


# Models, instances, sessions, jobs, links.


@admin.group(context_settings=SETTINGS)
def models() -> None:
    """Models and how many instances serve them."""


@models.command("list")
@as_json
@watching
@limited
@click.pass_context
@_guarded
def list_models(ctx: click.Context, as_json: bool, watch: bool, limit: int) -> None:
    """List models.

    \b
    Example:
      pd-shadow admin models list
    """
    _show_list(ctx, tables.MODELS, pb.ListModelsRequest(), as_json, watch, limit)


@models.command("get")
@click.argument("model", shell_complete=_complete(model_names))
@as_json
@click.pass_context
@_guarded
def get_model(ctx: click.Context, model: str, as_json: bool) -> None:
    """Show one model.

    \b
    Example:
      pd-shadow admin models get m7b --json
    """
    with _client(ctx) as client:
        _show_one(client.call("GetModel", pb.GetModelRequest(name=model)).model, as_json, tables.MODELS)


@admin.group(context_settings=SETTINGS)
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
@_guarded
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
        role=common.Role.ValueType(_number(common.Role.DESCRIPTOR, role)),
        state=common.InstanceState.ValueType(_number(common.InstanceState.DESCRIPTOR, state)),
    )
    _show_list(ctx, tables.INSTANCES, request, as_json, watch, limit)


@instances.command("get")
@click.argument("name", shell_complete=_complete(instance_names))
@as_json
@click.pass_context
@_guarded
def get_instance(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show one instance.

    \b
    Example:
      pd-shadow admin instances get m7b-p0 --json
    """
    with _client(ctx) as client:
        answer = client.call("GetInstance", pb.GetInstanceRequest(name=name))
        _show_one(answer.instance, as_json, tables.INSTANCES)


@instances.command()
@click.argument("name", shell_complete=_complete(instance_names))
@as_json
@click.pass_context
@_guarded
def drain(ctx: click.Context, name: str, as_json: bool) -> None:
    """Place nothing new on an instance; what runs there ends normally.

    It is the name that is drained: an instance that restarts under it drains on, until it is undrained.

    \b
    Example:
      pd-shadow admin instances drain m7b-d1 && pd-shadow admin instances list --model m7b --watch
    """
    with _client(ctx) as client:
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
@click.argument("name", shell_complete=_complete(instance_names))
@as_json
@click.pass_context
@_guarded
def undrain(ctx: click.Context, name: str, as_json: bool) -> None:
    """Let an instance take calls again.

    \b
    Example:
      pd-shadow admin instances undrain m7b-d1
    """
    with _client(ctx) as client:
        answer = client.call("UndrainInstance", pb.UndrainInstanceRequest(name=name))
        click.echo(tables.dump(tables.to_json(answer)) if as_json else f"{name} takes calls again when it is healthy.")


@admin.group(context_settings=SETTINGS)
def sessions() -> None:
    """Agent sessions: list, get, rebind, forget."""


@sessions.command("list")
@click.option("--tenant", help="Only this tenant.  [default: all]")
@of_model
@click.option("--instance", default="", shell_complete=_complete(instance_names), help="Only those bound to it.")
@as_json
@watching
@limited
@click.pass_context
@_guarded
def list_sessions(
    ctx: click.Context, tenant: str | None, model: str, instance: str, as_json: bool, watch: bool, limit: int
) -> None:
    """List sessions; --model: whose last call went to that model.

    \b
    Example:
      pd-shadow admin sessions list --instance m7b-d1
    """
    request = pb.ListSessionsRequest(tenant=tenant, model=model, instance=instance)
    _show_list(ctx, tables.SESSIONS, request, as_json, watch, limit)


@sessions.command("get")
@click.argument("session")
@of_tenant
@as_json
@click.pass_context
@_guarded
def get_session(ctx: click.Context, session: str, tenant: str, as_json: bool) -> None:
    """Show one session.

    \b
    Example:
      pd-shadow admin sessions get agent-17 --tenant acme
    """
    with _client(ctx) as client:
        answer = client.call("GetSession", pb.GetSessionRequest(session=_key(session, tenant)))
        _show_one(answer.session, as_json, tables.SESSIONS)


@sessions.command()
@click.argument("session")
@of_tenant
@click.option("--model", required=True, shell_complete=_complete(model_names), help="The model to bind for.")
@click.option("--prefill", shell_complete=_complete(instance_names), help="P or colocated instance; '' unbinds.")
@click.option("--decode", shell_complete=_complete(instance_names), help="D instance; '' unbinds.")
@as_json
@click.pass_context
@_guarded
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
    request = pb.RebindSessionRequest(session=_key(session, tenant), model=model, prefill=prefill, decode=decode)
    with _client(ctx) as client:
        _show_one(client.call("RebindSession", request).session, as_json, tables.SESSIONS)


@sessions.command()
@click.argument("session")
@of_tenant
@click.pass_context
@_guarded
def forget(ctx: click.Context, session: str, tenant: str) -> None:
    """Forget a session, with its bindings and shadow work.

    \b
    Example:
      pd-shadow admin sessions forget agent-17
    """
    with _client(ctx) as client:
        client.call("ForgetSession", pb.ForgetSessionRequest(session=_key(session, tenant)))
        click.echo(f"{tables.session_name(_key(session, tenant))} is forgotten.")


@admin.group(context_settings=SETTINGS)
def jobs() -> None:
    """Shadow jobs, and what holds them."""


@jobs.command("list")
@of_model
@click.option("--reason", type=click.Choice(labels(common.ShadowReason.DESCRIPTOR)), help="Only with this reason.")
@as_json
@watching
@limited
@click.pass_context
@_guarded
def list_jobs(ctx: click.Context, model: str, reason: str | None, as_json: bool, watch: bool, limit: int) -> None:
    """List shadow jobs.

    \b
    Example:
      pd-shadow admin jobs list --reason backoff
    """
    number = common.ShadowReason.ValueType(_number(common.ShadowReason.DESCRIPTOR, reason))
    _show_list(ctx, tables.JOBS, pb.ListShadowJobsRequest(model=model, reason=number), as_json, watch, limit)


@jobs.command("get")
@click.argument("session")
@click.argument("model", shell_complete=_complete(model_names))
@of_tenant
@as_json
@click.pass_context
@_guarded
def get_job(ctx: click.Context, session: str, model: str, tenant: str, as_json: bool) -> None:
    """Show the shadow job of a session on a model.

    \b
    Example:
      pd-shadow admin jobs get agent-17 m7b
    """
    with _client(ctx) as client:
        request = pb.GetShadowJobRequest(session=_key(session, tenant), model=model)
        _show_one(client.call("GetShadowJob", request).job, as_json, tables.JOBS)


@admin.group(context_settings=SETTINGS)
def links() -> None:
    """Inbound links of decode instances."""


@links.command("list")
@of_model
@as_json
@watching
@limited
@click.pass_context
@_guarded
def list_links(ctx: click.Context, model: str, as_json: bool, watch: bool, limit: int) -> None:
    """List links.

    \b
    Example:
      pd-shadow admin links list --watch
    """
    _show_list(ctx, tables.LINKS, pb.ListLinksRequest(model=model), as_json, watch, limit)


@links.command("get")
@click.argument("decode", shell_complete=_complete(instance_names))
@as_json
@click.pass_context
@_guarded
def get_link(ctx: click.Context, decode: str, as_json: bool) -> None:
    """Show the inbound link of a decode instance.

    \b
    Example:
      pd-shadow admin links get m7b-d0
    """
    with _client(ctx) as client:
        _show_one(client.call("GetLink", pb.GetLinkRequest(decode=decode)).link, as_json, tables.LINKS)


# Events, ledgers, configuration.


@admin.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(labels(pb.EventKind.DESCRIPTOR)), help="Only these.")
@click.option("--subject", default="", help="Only about this instance, session, gateway, model or approach.")
@click.option("--after", type=click.IntRange(0), help="Only events after this sequence number.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most events shown.")
@watching
@as_json
@click.pass_context
@_guarded
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
    numbers = [pb.EventKind.ValueType(_number(pb.EventKind.DESCRIPTOR, kind)) for kind in kinds]
    with _client(ctx) as client:
        if watch:
            for answer in client.stream(
                "WatchEvents", pb.WatchEventsRequest(after_sequence=after, kinds=numbers, subject=subject)
            ):
                event = answer.event
                click.echo(tables.dump(tables.to_json(event), indent=None) if as_json else tables.event_line(event))
            return
        request = pb.ListEventsRequest(after_sequence=after or 0, kinds=numbers, subject=subject, page_size=limit)
        found = client.call("ListEvents", request)
        _show(found, as_json, lambda: tables.table(tables.EVENTS, found.events))


@admin.command()
@as_json
@click.pass_context
@_guarded
def ledger(ctx: click.Context, as_json: bool) -> None:
    """Show the shadow ledger, the call ledger, and what is in flight.

    \b
    Example:
      pd-shadow admin ledger --json
    """
    with _client(ctx) as client:
        answer = client.call("GetLedger", pb.GetLedgerRequest())
        _show(answer, as_json, lambda: tables.ledger(answer))


@admin.command()
@as_json
@click.pass_context
@_guarded
def stats(ctx: click.Context, as_json: bool) -> None:
    """Show counts by reason since the controller started.

    \b
    Example:
      pd-shadow admin stats
    """
    with _client(ctx) as client:
        answer = client.call("GetStatistics", pb.GetStatisticsRequest())
        _show(answer, as_json, lambda: tables.statistics(answer))


@admin.command("config")
@click.pass_context
@_guarded
def effective_config(ctx: click.Context) -> None:
    """Show the configuration, policy, pauses and drains in force, as JSON.

    \b
    Example:
      pd-shadow admin config
    """
    with _client(ctx) as client:
        answer = client.call("GetEffectiveConfig", pb.GetEffectiveConfigRequest())
        click.echo(tables.dump(tables.to_json(answer)))


# Shadow work.


@admin.group(context_settings=SETTINGS)
def shadow() -> None:
    """Pause and resume shadow work; change its policy."""


def _scope(model: str | None, instance: str | None, cluster: bool) -> dict[str, Any]:
    given: dict[str, Any] = {"model": model, "instance": instance, "cluster": cluster or None}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise click.UsageError("give one of --cluster, --model and --instance")
    return given


_in_cluster = click.option("--cluster", is_flag=True, help="All shadow work.")
_on_model = click.option("--model", shell_complete=_complete(model_names), help="Shadow work of this model.")
_on_instance = click.option(
    "--instance", shell_complete=_complete(instance_names), help="Shadow work on instances of this name."
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
@_guarded
def pause(ctx: click.Context, cluster: bool, model: str | None, instance: str | None, as_json: bool) -> None:
    """Pause shadow work, until it is resumed.

    \b
    Examples:
      pd-shadow admin shadow pause --cluster
      pd-shadow admin shadow pause --instance m7b-p0
    """
    request = pb.PauseShadowRequest(**_scope(model, instance, cluster))
    with _client(ctx) as client:
        _show_pauses(client.call("PauseShadow", request), as_json)


@shadow.command()
@_in_cluster
@_on_model
@_on_instance
@as_json
@click.pass_context
@_guarded
def resume(ctx: click.Context, cluster: bool, model: str | None, instance: str | None, as_json: bool) -> None:
    """Take back a pause of exactly this scope.

    \b
    Example:
      pd-shadow admin shadow resume --cluster
    """
    request = pb.ResumeShadowRequest(**_scope(model, instance, cluster))
    with _client(ctx) as client:
        _show_pauses(client.call("ResumeShadow", request), as_json)


@shadow.command()
@click.option("--approach", help="Such as harvest-slo; brings its own values for the next two.")
@click.option("--enabled/--disabled", default=None, help="Whether to shadow at all.")
@click.option("--gate", type=click.FloatRange(0, 1), help="No shadow below this switch probability.")
@click.option("--top-k", type=click.IntRange(0), help="Shadow only so many of the likeliest models; 0 for all.")
@as_json
@click.pass_context
@_guarded
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
    with _client(ctx) as client:
        if request.ListFields():
            found = client.call("SetShadowPolicy", request).policy
        else:
            found = client.call("GetEffectiveConfig", pb.GetEffectiveConfigRequest()).policy
        _show(found, as_json, lambda: tables.fields(found))


# This side.


@admin.command("top")
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="One look, without the live view.")
@click.pass_context
@_guarded
def show_top(ctx: click.Context, interval: float, once: bool) -> None:
    """Watch instances, links, shadow jobs and the ledgers live, until Ctrl-C.

    \b
    Example:
      pd-shadow admin top --interval 0.5
    """
    with _client(ctx) as client:
        if once:
            _console().print(top.view(top.look(client)))
        else:
            top.run(client, _console(), interval)


@admin.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands, options and names.

    \b
    Examples:
      eval "$(pd-shadow admin completion bash)"
      pd-shadow admin completion fish > ~/.config/fish/completions/pd-shadow.fish
    """
    made = get_completion_class(shell)
    if made is not None:
        click.echo(made(admin, {}, "pd-shadow", "_PD_SHADOW_COMPLETE").source())


@admin.group("context", context_settings=SETTINGS)
def context_group() -> None:
    """Controllers this command knows: list, use, set, delete."""


@context_group.command("list")
@as_json
@_guarded
def list_contexts(as_json: bool) -> None:
    """List contexts; a star marks the current one.

    \b
    Example:
      pd-shadow admin context list
    """
    known = contexts.read()
    if as_json:
        click.echo(tables.dump(known.model_dump(mode="json")))
        return
    columns = (
        tables.Column("", lambda item: "*" if item[0] == known.current else ""),
        tables.Column("CONTEXT", lambda item: item[0]),
        tables.Column("ADDRESS", lambda item: item[1].address),
        tables.Column("TLS", lambda item: "mutual" if item[1].cert else "yes" if item[1].ca else "no"),
        tables.Column(
            "TOKEN", lambda item: item[1].token_file or (item[1].token_env and f"${item[1].token_env}") or "-"
        ),
    )
    _console().print(tables.table(columns, sorted(known.contexts.items())))


@context_group.command()
@click.argument("name", shell_complete=_complete_context)
@_guarded
def use(name: str) -> None:
    """Make a context the current one.

    \b
    Example:
      pd-shadow admin context use prod
    """
    contexts.write(contexts.read().using(name))
    click.echo(f"{name} is the current context.")


@context_group.command("set")
@click.argument("name", shell_complete=_complete_context)
@click.option("--address", metavar="HOST:PORT", help="The controller's gRPC address.")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM file with the certificate authority: TLS.")
@click.option("--cert", type=click.Path(path_type=Path), help="PEM file with this operator's certificate: mTLS.")
@click.option("--key", type=click.Path(path_type=Path), help="PEM file with its key.")
@click.option("--server-name", metavar="NAME", help="Name in the controller's certificate, where it is not the host.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the bearer token.")
@click.option("--token-env", help="Environment variable with the bearer token.")
@_guarded
def set_context(name: str, **given: Any) -> None:
    """Make or change a context; what is not given stays. Secrets are named, never stored.

    \b
    Example:
      pd-shadow admin context set prod --address controller.prod:7070 --ca ca.pem --token-file ~/.pd-shadow-token
    """
    changes = {key: str(value.absolute()) if isinstance(value, Path) else value for key, value in given.items()}
    file = contexts.write(contexts.read().with_context(name, changes))
    click.echo(f"{name} is set in {file}.")


@context_group.command()
@click.argument("name", shell_complete=_complete_context)
@_guarded
def delete(name: str) -> None:
    """Delete a context.

    \b
    Example:
      pd-shadow admin context delete prod
    """
    contexts.write(contexts.read().without(name))
    click.echo(f"{name} is deleted.")
