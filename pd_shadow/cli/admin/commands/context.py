"""Controllers this command knows: list, use, set, delete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pd_shadow.cli.admin import contexts, tables
from pd_shadow.cli.admin.invocation import SETTINGS, as_json, complete_context, guarded
from pd_shadow.cli.admin.output import console


@click.group("context", context_settings=SETTINGS)
def context_group() -> None:
    """Controllers this command knows: list, use, set, delete."""


@context_group.command("list")
@as_json
@guarded
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
    console().print(tables.table(columns, sorted(known.contexts.items())))


@context_group.command()
@click.argument("name", shell_complete=complete_context)
@guarded
def use(name: str) -> None:
    """Make a context the current one.

    \b
    Example:
      pd-shadow admin context use prod
    """
    contexts.write(contexts.read().using(name))
    click.echo(f"{name} is the current context.")


@context_group.command("set")
@click.argument("name", shell_complete=complete_context)
@click.option("--address", metavar="HOST:PORT", help="The controller's gRPC address.")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM file with the certificate authority: TLS.")
@click.option("--cert", type=click.Path(path_type=Path), help="PEM file with this operator's certificate: mTLS.")
@click.option("--key", type=click.Path(path_type=Path), help="PEM file with its key.")
@click.option("--server-name", metavar="NAME", help="Name in the controller's certificate, where it is not the host.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the bearer token.")
@click.option("--token-env", help="Environment variable with the bearer token.")
@guarded
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
@click.argument("name", shell_complete=complete_context)
@guarded
def delete(name: str) -> None:
    """Delete a context.

    \b
    Example:
      pd-shadow admin context delete prod
    """
    contexts.write(contexts.read().without(name))
    click.echo(f"{name} is deleted.")
