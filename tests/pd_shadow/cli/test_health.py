"""`pd-shadow health` against real servers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.cli.main import main
from tests import credentials


async def health(*arguments: str) -> Any:
    """From another thread, since the servers live on this one's loop."""
    return await asyncio.to_thread(CliRunner().invoke, main, ["health", *arguments])


@pytest.fixture
async def controller() -> Any:
    async with Controller(ControllerConfig(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0")).running() as running:
        yield running


@pytest.mark.parametrize("service", ["liveness", "readiness"])
async def test_a_serving_controller_is_healthy(controller: Controller, service: str) -> None:
    result = await health(f"127.0.0.1:{controller.port}", "--service", service)
    assert (result.exit_code, result.output) == (0, f"127.0.0.1:{controller.port}: SERVING\n")


async def test_a_service_nobody_knows_is_not(controller: Controller) -> None:
    result = await health(f"127.0.0.1:{controller.port}", "--service", "liveliness")
    assert result.exit_code == 1
    assert "NOT_FOUND" in result.output


async def test_http(controller: Controller) -> None:
    base = f"http://127.0.0.1:{controller.metrics_port}"
    assert (await health(f"{base}/metrics")).exit_code == 0
    missing = await health(f"{base}/nothing")
    assert (missing.exit_code, missing.output) == (1, f"{base}/nothing: 404\n")


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1/health"])
async def test_nobody_there(target: str) -> None:
    assert (await health(target, "--timeout", "0.5")).exit_code == 1


async def test_certificates_come_in_pairs_and_with_a_ca(tmp_path: Path) -> None:
    file = tmp_path / "tls.pem"
    file.write_text("")
    assert (await health("h:1", "--cert-file", str(file))).exit_code == 2
    assert (await health("h:1", "--cert-file", str(file), "--key-file", str(file))).exit_code == 2


async def test_mutual_tls_as_the_charts_probes_speak_it(tmp_path: Path) -> None:
    """With the controller's own files, and a name that is not the address asked at."""
    ca = trustme.CA()
    trusted = credentials.trust(tmp_path, ca)
    pair = credentials.issue(ca, tmp_path, "tls")
    tls: Any = {**pair._asdict(), "client_ca_file": trusted}
    async with Controller(ControllerConfig(listen="127.0.0.1:0", tls=tls)).running() as running:
        target = f"127.0.0.1:{running.port}"
        with_ca = [target, "--service", "readiness", "--ca-file", str(trusted), "--server-name", "localhost"]
        own = ["--cert-file", str(pair.cert_file), "--key-file", str(pair.key_file)]
        assert (await health(*with_ca, *own)).exit_code == 0
        assert (await health(*with_ca, "--timeout", "1")).exit_code == 1
        assert (await health(target, "--service", "readiness", "--timeout", "1")).exit_code == 1
        elsewhere = [*with_ca[:-1], "elsewhere.example.com", *own, "--timeout", "1"]
        assert (await health(*elsewhere)).exit_code == 1
