"""Logs say where something failed, and never what was in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

MARKER = "M4RK3R"
SCRIPT = """
import logging
from pd_shadow.common import logs

logs.configure("debug", {format!r})

def fail():
    try:
        raise KeyError("M4RK3R inner")
    except KeyError as error:
        raise ValueError("M4RK3R outer") from error

for logger in (logs.get_logger("here"), logging.getLogger("some.library")):
    try:
        fail()
    except ValueError as error:
        logger.exception("went_wrong")
        logger.error("went_wrong_later", exc_info=error)
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_show_places_and_types_but_no_content(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(format=log_format)], capture_output=True, text=True, check=True
    )
    said = done.stdout + done.stderr
    assert MARKER not in said
    assert said.count("in fail") == 8
    assert said.count("builtins.KeyError") == said.count("builtins.ValueError") == 4
    assert said.count("which led to") == 4
