"""Composition root of the `pd-shadow` command."""

import click

from pd_shadow.cli.lazy import LazyGroup


@click.command(
    cls=LazyGroup,
    lazy={
        "admin": ("pd_shadow.cli.admin.admin", "admin"),
        "config": ("pd_shadow.cli.config", "config"),
        "serve": ("pd_shadow.cli.serve", "serve"),
        "demo": ("pd_shadow.cli.demo", "demo"),
        "bench": ("pd_shadow.cli.bench", "bench"),
        "health": ("pd_shadow.cli.health", "health"),
        "simulate": ("pd_shadow.cli.simulate", "simulate"),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="pd-shadow")
def main() -> None:
    """Keep the next model warm: shadow prefill for per-step model routing on disaggregated vLLM.

    \b
    Examples:
      pd-shadow serve controller --config cluster.yaml
      pd-shadow serve gateway --controller 127.0.0.1:7070 --listen 127.0.0.1:8000
      pd-shadow admin instances list --watch
      pd-shadow demo --engine vllm --json demo.json
      pd-shadow bench interference --quick
      pd-shadow simulate --preset 8d --quick
    """
