"""`python -m controller` is `pd-shadow serve controller`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from controller.config import ENVIRONMENT_PREFIX, ControllerConfig
from controller.server.app import Controller, StartError
from pd_shadow.common.config import ConfigError, load
from pd_shadow.common.logs import LOG_LEVELS, configure


@click.command("controller")
@click.option("--config", "path", type=click.Path(dir_okay=False, path_type=Path), help="YAML configuration file.")
@click.option("--listen", metavar="HOST:PORT", help="Address of the gRPC server.  [default: 127.0.0.1:7070]")
@click.option("--metrics-listen", metavar="HOST:PORT", help="Address of the Prometheus endpoint.  [default: none]")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="Least severity logged.  [default: info]")
@click.option("--check", is_flag=True, help="Check the configuration and exit.")
def main(path: Path | None, check: bool, **overrides: str | None) -> None:
    """Run the control plane.

    \b
    Examples:
      pd-shadow serve controller --config cluster.yaml
      pd-shadow serve controller --config cluster.yaml --check
    """
    try:
        config = load(ControllerConfig, path, overrides, prefix=ENVIRONMENT_PREFIX)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if check:
        click.echo(f"{path or 'configuration'}: ok, {len(config.discovery.static)} static instances")
        return
    configure(config.log_level, config.log_format)
    try:
        asyncio.run(Controller(config).serve())
    except (ConfigError, StartError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
