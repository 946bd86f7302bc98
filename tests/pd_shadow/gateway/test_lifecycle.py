"""The process: configuration, signals, shutdown."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_shadow.api.v1 import common_pb2
from pd_shadow.cli.serve_gateway import gateway
from pd_shadow.common.config import ConfigError, parse
from pd_shadow.gateway.config import GatewayConfig

from .rig import running


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"controler": "x"}, "did you mean 'controller'"),
        ({"controller": "nohost"}, "HOST:PORT"),
        ({"listen": "h:99999"}, "HOST:PORT"),
        ({"deadlines": {"prefil": 1}}, "deadlines.prefil: unknown key; did you mean 'prefill'"),
        ({"caps": {"sessions": 0}}, "caps.sessions"),
    ],
)
def test_configuration_errors_name_the_field(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("'", ".")):
        parse(GatewayConfig, settings)


def test_a_bad_file_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("listen: nowhere\n")
    result = CliRunner().invoke(gateway, ["--config", str(path)])
    assert result.exit_code == 2
    assert "listen" in result.stderr


async def test_running_calls_end_within_the_grace_period() -> None:
    async with running() as rig:
        rig.ad.hold_after = 1
        rig.ad.go.clear()
        call = asyncio.create_task(rig.chat(stream=True))
        await rig.controller.until(lambda: len(rig.controller.progress) == 2)
        stopping = asyncio.create_task(rig.gateway.stop())
        await asyncio.sleep(0)
        assert not rig.gateway.ready
        rig.ad.go.set()
        status, text, _ = await call
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")
        await stopping
        assert rig.controller.ended[0].outcome == common_pb2.CALL_OUTCOME_COMPLETED


async def test_calls_that_do_not_end_in_time_are_cut_and_ended() -> None:
    async with running({"deadlines": {"shutdown_grace": 0.05}}) as rig:
        rig.ad.hold_after = 1
        rig.ad.go.clear()
        call = asyncio.create_task(rig.chat(stream=True))
        await rig.controller.until(lambda: len(rig.controller.progress) == 2)
        await rig.gateway.stop()
        await asyncio.gather(call, return_exceptions=True)
        assert len(rig.controller.ended) == 1
        assert rig.controller.ended[0].outcome != common_pb2.CALL_OUTCOME_COMPLETED
        assert rig.ad.aborted == 1


def test_sigterm_ends_the_process_cleanly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from pd_shadow.cli.serve_gateway import gateway; gateway()",
         "--controller", "127.0.0.1:9", "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "gateway_ready" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    assert process.wait(timeout=60) == 0


async def test_a_taken_port_exits_with_1() -> None:
    async with running() as rig:
        listen = rig.url.removeprefix("http://")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from pd_shadow.cli.serve_gateway import gateway; gateway()", "--listen", listen,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert b"cannot listen on" in errors
