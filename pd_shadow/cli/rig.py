"""What commands that start a rig of engines of their own have in common: a run folder, exit codes, the figures file."""

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

Figures = dict[str, Any]


def check_figures_file(file: Path | None, option: str = "--json") -> None:
    """Raises UsageError for a file that cannot be written at the end of a long run."""
    if file is not None and not file.parent.is_dir():
        raise click.UsageError(f"{option}: {file.parent} is not a directory")


def run(
    name: str,
    measure: Callable[[Path], Coroutine[Any, Any, Figures]],
    keep_logs: Path | None,
    also_fails_with: tuple[type[Exception], ...] = (),
) -> Figures:
    """Measure in a run folder, which is `keep_logs` or goes away; `name` is part of a temporary one's name.

    Exits with 1 when something does not start or ends, or on `also_fails_with`, and with 130 when interrupted or told
    to terminate.
    """
    from pd_shadow.demo.process import ProcessDiedError

    failures: tuple[type[Exception], ...] = (ProcessDiedError, RuntimeError, OSError, *also_fails_with)
    run_dir = keep_logs or Path(tempfile.mkdtemp(prefix=f"pd-shadow-{name}-"))
    try:
        with exit_codes(failures):
            return asyncio.run(measure(run_dir))
    finally:
        if keep_logs is None:
            shutil.rmtree(run_dir, ignore_errors=True)


@contextlib.contextmanager
def exit_codes(failures: tuple[type[Exception], ...]) -> Iterator[None]:
    """Exit with 1 on `failures`, with 130 when interrupted or told to terminate."""
    # SIGTERM takes Ctrl-C's way out, which stops every process that was started.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except failures as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("interrupted; everything is stopped", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def write_figures(figures: Figures, json_file: Path | None, console: Console) -> None:
    """Write the figures where `--json` says, if it does."""
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
        console.print(f"Figures: {json_file}", markup=False)
