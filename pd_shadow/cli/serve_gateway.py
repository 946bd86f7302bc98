"""`pd-shadow serve gateway`."""

import asyncio
import os
import sys
from pathlib import Path

import click

from pd_shadow.common import logs
from pd_shadow.common.config import ConfigError, load


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), help="YAML file; options on this line win over it.")
@click.option("--controller", metavar="HOST:PORT", help="The controller's gRPC address.")
@click.option("--listen", metavar="HOST:PORT", help="Where to serve the OpenAI API, /health, /ready and /metrics.")
@click.option("--log-level", type=click.Choice(logs.LOG_LEVELS), default="info", show_default=True)
def gateway(config: Path | None, controller: str | None, listen: str | None, log_level: str) -> None:
    """Serve the OpenAI API over prefill and decode instances, and run shadow legs for the controller."""
    from pd_shadow.gateway.config import ENVIRONMENT_PREFIX, GatewayConfig
    from pd_shadow.gateway.serve import serve

    logs.configure(log_level)
    try:
        settings = load(GatewayConfig, config, {"controller": controller, "listen": listen}, prefix=ENVIRONMENT_PREFIX)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    try:
        asyncio.run(serve(settings))
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"cannot listen on {settings.listen}: {os.strerror(error.errno or 0)}", err=True)
        sys.exit(1)
