"""One screen of a cluster, live."""

from __future__ import annotations

import click

from pd_shadow.cli.admin import top
from pd_shadow.cli.admin.invocation import client_of, guarded
from pd_shadow.cli.admin.output import console


@click.command("top")
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="One look, without the live view.")
@click.pass_context
@guarded
def show_top(ctx: click.Context, interval: float, once: bool) -> None:
    """Watch instances, links, shadow jobs and the ledgers live, until Ctrl-C.

    \b
    Example:
      pd-shadow admin top --interval 0.5
    """
    with client_of(ctx) as client:
        if once:
            console().print(top.view(top.look(client)))
        else:
            top.run(client, console(), interval)
