"""`pd-shadow bench …`: measurements on real engines and real transports."""

import click

from pd_shadow.cli.lazy import LazyGroup


@click.command(
    cls=LazyGroup,
    lazy={
        "control-plane": ("pd_shadow.cli.bench_control_plane", "control_plane"),
        "interference": ("pd_shadow.cli.bench_interference", "interference"),
        "transfer": ("pd_shadow.cli.bench_transfer", "transfer"),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
def bench() -> None:
    """Measure what shadow work costs and yields, on engines and transfers that are started for it and stopped again."""
