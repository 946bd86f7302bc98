"""Scripts for shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and names.

    \b
    Examples:
      eval "$(pd-shadow admin completion bash)"
      pd-shadow admin completion fish > ~/.config/fish/completions/pd-shadow.fish
    """
    made = get_completion_class(shell)
    if made is not None:
        click.echo(made(ctx.find_root().command, {}, "pd-shadow", "_PD_SHADOW_COMPLETE").source())
