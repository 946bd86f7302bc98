"""The group `pd-shadow admin`. Exit codes: 0 done, 1 the controller said no or did not answer, 2 wrong usage."""

from __future__ import annotations

import click

from pd_shadow.cli.admin.invocation import SETTINGS, Invocation, complete_context
from pd_shadow.cli.lazy import LazyGroup

COMMANDS = "pd_shadow.cli.admin.commands"
# Where each command lives.
MODULES = {
    "completion": ("completion", "completion"),
    "config": ("config", "effective_config"),
    "context": ("context", "context_group"),
    "events": ("events", "events"),
    "instances": ("instances", "instances"),
    "jobs": ("jobs", "jobs"),
    "ledger": ("ledger", "ledger"),
    "links": ("links", "links"),
    "models": ("models", "models"),
    "sessions": ("sessions", "sessions"),
    "shadow": ("shadow", "shadow"),
    "stats": ("ledger", "stats"),
    "top": ("top", "show_top"),
}


@click.command(
    "admin",
    cls=LazyGroup,
    lazy={name: (f"{COMMANDS}.{module}", attribute) for name, (module, attribute) in MODULES.items()},
    context_settings=SETTINGS,
)
@click.option("--context", shell_complete=complete_context, help="A context other than the current one.")
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
    ctx.find_root().meta["pd_shadow.admin"] = Invocation(context, address, timeout)
