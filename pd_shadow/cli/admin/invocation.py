"""What every command of `pd-shadow admin` shares: options, the connection they lead to, errors, names to complete."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

import click
from google.protobuf.descriptor import EnumDescriptor

from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.cli.admin import contexts
from pd_shadow.cli.admin.client import AnswerError, Client, model_names
from pd_shadow.common.config import ConfigError

P = ParamSpec("P")

# What a table shows where --limit says nothing.
DEFAULT_LIMIT = 500


class Invocation(NamedTuple):
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


def guarded(function: Callable[P, None]) -> Callable[P, None]:
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


def client_of(ctx: click.Context) -> Client:
    """The connection that a command's options ask for; raises ConfigError."""
    given: Invocation = ctx.find_root().meta["pd_shadow.admin"]
    return given.client()


def complete(pick: Callable[[Client], list[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Names for shell completion, from the controller of the context; silent where there is none."""

    def complete(ctx: click.Context, _: click.Parameter, typed: str) -> list[str]:
        # While completing, click runs no command: what was typed before is in the contexts on the way.
        given = {key: value for above in _upwards(ctx) for key, value in above.params.items()}
        options = Invocation(given.get("context"), given.get("address"), 1.0)
        with contextlib.suppress(ConfigError), options.client() as client:
            return [name for name in client.names(pick) if name.startswith(typed)]
        return []

    return complete


def _upwards(ctx: click.Context) -> list[click.Context]:
    return [ctx, *(_upwards(ctx.parent) if ctx.parent else [])]


def complete_context(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    """Names of contexts for shell completion."""
    with contextlib.suppress(ConfigError):
        return [name for name in sorted(contexts.read().contexts) if name.startswith(typed)]
    return []


def enum_number(descriptor: EnumDescriptor, chosen: str | None) -> int:
    """The enum's number for a label; 0 for none."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return descriptor.values_by_name[f"{prefix}{chosen.upper()}"].number if chosen else 0


def session_key(session: str, tenant: str) -> common.SessionKey:
    """The key of a session that was named on the command line; no tenant is the default one."""
    return common.SessionKey(tenant=tenant, session_id=session)


as_json = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
watching = click.option("--watch", "-w", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
limited = click.option(
    "--limit", type=click.IntRange(1), default=DEFAULT_LIMIT, show_default=True, help="Most lines shown."
)
of_model = click.option("--model", default="", shell_complete=complete(model_names), help="Only this model.")
of_tenant = click.option("--tenant", default="", help="The session's tenant.  [default: the default tenant]")
SETTINGS = {"help_option_names": ["-h", "--help"]}
