"""Composition root: each command imports what it runs, so that `pd-shadow --help` needs nothing installed."""

import importlib
from typing import Any

import click

COMMANDS = {
    "serve": ("pd_shadow.cli.serve", "serve"),
    "demo": ("pd_shadow.cli.demo", "demo"),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pd-shadow")
def main(**_: Any) -> None:
    """Keep the next model warm: shadow prefill for per-step model routing on disaggregated vLLM.

    \b
    Examples:
      pd-shadow serve controller --config cluster.yaml
      pd-shadow serve gateway --controller 127.0.0.1:7070 --port 8000
      pd-shadow demo --engine vllm --json demo.json
    """
