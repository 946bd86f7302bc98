"""`pd-shadow serve engine` for vLLM on GPUs: checks the settings, then becomes the vLLM server."""

import os
import shlex
import sys
from pathlib import Path

import click

from pd_shadow.common.config import ConfigError, load


def start(config: Path, name: str | None, address: str | None, *, show: bool) -> None:
    """Check one engine's settings and become its vLLM server, or with `show` print the command line.

    Exits with 2, naming each field and the fix, when the settings cannot be used.
    """
    from pd_shadow.engine.vllm.gpu_command import GpuEngineCommand

    try:
        command = load(GpuEngineCommand, config, {"name": name, "address": address})
        argv = command.argv()
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if show:
        variables = [f"{key}={shlex.quote(value)}" for key, value in sorted(command.env().items())]
        click.echo(" ".join([*variables, shlex.join(argv)]))
        return
    # In place, so that vLLM gets the container's signals and the pod its exit status.
    os.execve(argv[0], argv, {**os.environ, **command.env()})
