"""The controller as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "controller"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shadow: {top_kk: 1}", "shadow.top_kk: unknown key; did you mean 'top_k'?"),
        ("listen: nonsense", "listen: expected HOST:PORT"),
        ("discovery: {static: [{name: a, model: m, role: router, url: 'http://h:1'}]}", "discovery.static.0.role"),
        ("discovery: {static: [{name: a, model: m, role: decode, url: 'h:1'}]}", "expected a base URL"),
        (
            "discovery: {static: ["
            "{name: a, model: m, role: decode, url: 'http://h:1'}, {name: a, model: m, role: decode, url: 'http://h:2'}]}",
            "discovery.static: two instances are named 'a'; names must be unique",
        ),
        (
            "discovery: {static: [{name: c, model: m, role: colocated, url: 'http://h:1'}, "
            "{name: p, model: m, role: prefill, url: 'http://h:2'}]}",
            "model 'm' has 'c' (colocated) and 'p' (prefill); give it colocated instances only",
        ),
        (
            "shadow: {approach: harvest-sol}",
            "shadow.approach: unknown approach 'harvest-sol'; did you mean",
        ),
    ],
)
def test_bad_configuration_exits_with_2_and_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text(text)
    result = run("--config", str(path), "--check")
    assert result.returncode == 2
    assert message in result.stderr


def test_an_unusable_credential_exits_with_2_and_names_field_and_path(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text(f"{{listen: '127.0.0.1:0', auth: {{admin_token_file: {tmp_path}/none}}}}")
    result = run("--config", str(path))
    assert result.returncode == 2
    assert result.stderr == f"error: auth.admin_token_file: {tmp_path}/none: No such file or directory\n"


def test_a_good_configuration_passes_the_check(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text("discovery: {static: [{name: a, model: m, role: decode, url: 'http://h:1'}]}")
    result = run("--config", str(path), "--check")
    assert (result.returncode, result.stdout.strip()) == (0, f"{path}: ok, 1 static instances")


def test_sigterm_stops_it_gracefully_and_a_taken_address_is_told(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    serving = json.loads(process.stderr.readline())
    assert serving["event"] == "controller_serving"
    second = run("--listen", f"127.0.0.1:{serving['port']}")
    assert second.returncode == 1
    assert f"cannot bind 127.0.0.1:{serving['port']}" in second.stderr
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == 0
    assert "controller_stopped" in rest
