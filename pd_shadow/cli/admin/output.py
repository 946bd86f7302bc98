"""How commands show what the controller answers: tables, JSON, and lists that go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
from google.protobuf.message import Message
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import Client
from pd_shadow.cli.admin.invocation import client_of


def console() -> Console:
    """Standard output; a table in a pipe is as wide as it needs to be."""
    terminal = Console(highlight=False, soft_wrap=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=240)


def show_list(
    ctx: click.Context, listing: tables.Listing, request: Message, as_json: bool, watch: bool, limit: int
) -> None:
    """Ask for a list and show it, or show it whenever it changes; raises ConfigError and AnswerError."""
    with client_of(ctx) as client:
        if watch:
            _watch(client, listing, request, as_json, limit)
            return
        found, more = client.collect(listing.rpc, request, listing.field, limit)
        _print_list(listing, found, as_json)
        if more:
            click.echo(f"There are more than {limit}; --limit shows them.", err=True)


def show(message: Message, as_json: bool, made: Callable[[], Table]) -> None:
    """Show an answer as JSON, or as the table that `made` makes of it."""
    if as_json:
        click.echo(tables.dump(tables.to_json(message)))
    else:
        console().print(made())


def show_one(message: Message, as_json: bool, listing: tables.Listing) -> None:
    """Show an answer as JSON, or as the only line of a table."""
    show(message, as_json, lambda: tables.table(listing.columns, [message]))


def _print_list(listing: tables.Listing, found: Sequence[Any], as_json: bool, *, indent: int | None = 2) -> None:
    if as_json:
        click.echo(tables.dump({listing.field: [tables.to_json(item) for item in found]}, indent=indent))
    else:
        console().print(tables.table(listing.columns, found))


def _watch(client: Client, listing: tables.Listing, request: Any, as_json: bool, limit: int) -> None:
    request.page_size = min(limit, 1000)
    stream = client.stream("Watch", pb.WatchRequest(**{listing.watched: request}))
    answers = (getattr(getattr(answer, listing.watched), listing.field) for answer in stream)
    if as_json or not sys.stdout.isatty():
        for found in answers:
            _print_list(listing, found, as_json, indent=None)
            sys.stdout.flush()
        return
    with Live(console=console(), auto_refresh=False) as live:
        for found in answers:
            live.update(tables.table(listing.columns, found), refresh=True)
