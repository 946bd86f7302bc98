"""`pd-shadow bench …`: measurements on real engines."""

import click

from pd_shadow.cli.lazy import LazyGroup


@click.command(
    cls=LazyGroup,
    lazy={"interference": ("pd_shadow.cli.bench_interference", "interference")},
    context_settings={"help_option_names": ["-h", "--help"]},
)
def bench() -> None:
    """Measure what shadow work costs and yields, on engines that are started for it and stopped again."""
