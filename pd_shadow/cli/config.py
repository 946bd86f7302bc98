"""`pd-shadow config …`: look at configuration before a process does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import click
import yaml

import controller.config
import pd_shadow.gateway.config
from controller.config import ControllerConfig
from pd_shadow.common.config import Config, ConfigError, load
from pd_shadow.gateway.config import GatewayConfig

SETTINGS = {"help_option_names": ["-h", "--help"]}


class Process(NamedTuple):
    """A process that is configured: its model, and the prefix of its variables."""

    model: type[Config]
    prefix: str


PROCESSES = {
    "controller": Process(ControllerConfig, controller.config.ENVIRONMENT_PREFIX),
    "gateway": Process(GatewayConfig, pd_shadow.gateway.config.ENVIRONMENT_PREFIX),
}

_process = click.argument("process", type=click.Choice(sorted(PROCESSES)))
_file = click.argument("file", required=False, type=click.Path(path_type=Path))


@click.group("config", context_settings=SETTINGS)
def config() -> None:
    """Check, show and describe the configuration of the controller and the gateway.

    Settings come from the file, then from variables such as PD_SHADOW_CONTROLLER__SHADOW__TOP_K (lists and mappings as
    YAML, null unsets), then from the command line of `pd-shadow serve`; the later ones win.

    \b
    Examples:
      pd-shadow config check controller cluster.yaml
      PD_SHADOW_GATEWAY__CAPS__SESSIONS=100 pd-shadow config show gateway gateway.yaml
      pd-shadow config schema controller > controller.schema.json
    """


def _loaded(process: str, file: Path | None) -> Config:
    chosen = PROCESSES[process]
    try:
        return load(chosen.model, file, prefix=chosen.prefix)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


@config.command()
@_process
@_file
def check(process: str, file: Path | None) -> None:
    """Check a file and the environment; exit code 2 says that a process would refuse them, and why.

    \b
    Example:
      pd-shadow config check controller cluster.yaml
    """
    _loaded(process, file)
    click.echo(f"{file or 'configuration'}: ok")


@config.command()
@_process
@_file
@click.option("--json", "as_json", is_flag=True, help="JSON instead of YAML.")
def show(process: str, file: Path | None, as_json: bool) -> None:
    """Show every setting as a process would have it, defaults and environment included.

    \b
    Example:
      pd-shadow config show controller cluster.yaml
    """
    found = _loaded(process, file).model_dump(mode="json")
    click.echo(json.dumps(found, indent=2) if as_json else yaml.safe_dump(found, sort_keys=False), nl=as_json)


@config.command()
@_process
def schema(process: str) -> None:
    """Print the JSON schema of a process's file, for editors and charts.

    \b
    Example:
      pd-shadow config schema gateway > gateway.schema.json
    """
    click.echo(json.dumps(PROCESSES[process].model.model_json_schema(), indent=2))
