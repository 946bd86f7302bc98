"""`pd-shadow serve …`: one process of the system, in the foreground."""

import click

from pd_shadow.cli.lazy import LazyGroup


@click.command(
    cls=LazyGroup,
    lazy={
        "controller": ("controller.__main__", "main"),
        "gateway": ("pd_shadow.cli.serve_gateway", "gateway"),
        "engine": ("pd_shadow.cli.serve_engine", "engine"),
    },
)
def serve() -> None:
    """Run one process of the system in the foreground; SIGTERM stops it gracefully."""
