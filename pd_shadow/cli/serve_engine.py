"""`pd-shadow serve engine`: vLLM on GPUs, or an emulated engine."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from pd_shadow.cli.serve_engine_vllm import start
from pd_shadow.common import logs
from pd_shadow.common.config import ConfigError, load, parse

OF_THE_POD = ("name", "host")
"""Settings of one emulated engine that pods of one configuration differ in."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--emulated", is_flag=True, help="Emulate engines instead of starting vLLM.")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="YAML file of one engine or many.")
@click.option("--model", metavar="NAME", help="Model of the catalogue, such as L3.1-8B: its latencies and KV sizes.")
@click.option("--served-model-name", metavar="NAME", help="The name clients use.  [default: the model's]")
@click.option("--role", metavar="ROLE", help="prefill, decode or colocated.")
@click.option("--name", help="What the instance is called at the controller; also on top of a --config of one engine.")
@click.option("--address", metavar="HOST", help="vLLM: where others reach this engine, such as the pod's address.")
@click.option("--print", "show", is_flag=True, help="vLLM: print the command line and its environment, and exit.")
@click.option("--host", help="Address to listen on, also on top of a --config of one engine.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on.  [default: 8000]")
@click.option("--speed", type=float, help="Seconds of emulated time per real second.  [default: 1]")
@click.option("--controller", metavar="HOST:PORT", help="The controller to attach to.  [default: none]")
@click.option("--log-level", type=click.Choice(logs.LOG_LEVELS), default="info", show_default=True)
def engine(
    emulated: bool,
    config: Path | None,
    controller: str | None,
    log_level: str,
    address: str | None,
    show: bool,
    **one: str | int | float | None,
) -> None:
    """Start vLLM with exactly the flags the plugin needs; --config, --name and --address say which engine.

    With --emulated serve OpenAI-compatible engines whose iterations are emulated: scheduling, prefix cache, shadow
    class, P/D handoff and reports are real, tokens are made up, and time passes as on the GPUs of the catalogue.

    \b
    Examples:
      pd-shadow serve engine --config engine.yaml --name large-p-0 --address 10.0.0.7
      pd-shadow serve engine --emulated --model L3.1-8B --role prefill --port 8100 --controller 127.0.0.1:7070
      pd-shadow serve engine --emulated --config engines.yaml
      pd-shadow serve engine --emulated --config engine.yaml --name small-p-0 --host 10.0.0.7
    """
    from pd_shadow.engine.emulated.config import EmulatedEngines
    from pd_shadow.engine.emulated.serve import serve

    given: dict[str, Any] = {key: value for key, value in one.items() if value is not None}
    if not emulated:
        name = given.pop("name", None)
        for option in (*given, *(["controller"] if controller else [])):
            raise click.UsageError(
                f"--{option.replace('_', '-')}: only with --emulated; vLLM's settings are in --config"
            )
        if config is None:
            raise click.UsageError("give --config, a file of one vLLM engine's settings, or say --emulated")
        start(config, name, address, show=show)
        return
    if address is not None or show:
        raise click.UsageError("--address, --print: not with --emulated; use --host")
    in_file = [key for key in given if key not in OF_THE_POD]
    if config is not None and in_file:
        raise click.UsageError(f"--{in_file[0].replace('_', '-')}: not with --config; set it in the file")
    if config is None and not {"model", "role"} <= given.keys():
        raise click.UsageError("give --model and --role for one engine, or --config for a file of them")
    logs.configure(log_level)
    try:
        if config is not None:
            settings = load(EmulatedEngines, config, {"controller": controller}).with_only_engine(given)
        else:
            given.setdefault("name", f"{given['model']}-{given['role']}")
            settings = parse(EmulatedEngines, {"controller": controller, "engines": [given]}, source="options")
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    try:
        asyncio.run(serve(settings))
    except ConfigError as error:
        # A certificate or token file.
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"error: cannot start: {error.strerror or error}", err=True)
        sys.exit(1)
