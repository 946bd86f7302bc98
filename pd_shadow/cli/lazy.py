"""A command group whose commands are imported when they are named: `--help` needs nothing installed."""

import importlib
from collections.abc import Mapping
from typing import Any

import click

from pd_shadow.common.suggestion import nearest


class LazyGroup(click.Group):
    """`lazy` maps a command's name to the module and attribute it lives in."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._lazy)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click would look for what was meant among commands that are there already, and here none is.
        name = args[0]
        unknown = name not in self._lazy and not name.startswith("-") and not ctx.resilient_parsing
        near = nearest(name, self._lazy, cutoff=0.6) if unknown else None
        if near is not None:
            ctx.fail(f"No such command {name!r}; did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, attribute = self._lazy[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command
