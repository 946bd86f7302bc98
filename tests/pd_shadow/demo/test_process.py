"""Children: watched, and gone with everything they started."""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest

from pd_shadow.demo.cluster import free_ports
from pd_shadow.demo.process import ManagedProcess, ProcessDiedError

SERVER = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]))"
WITH_CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)
time.sleep(600)
"""


def child(tmp_path: Path, code: str, *arguments: str, url: str = "http://127.0.0.1:9") -> ManagedProcess:
    return ManagedProcess("child", [sys.executable, "-c", code, *arguments], {}, tmp_path / "child.log", url)


async def test_a_server_becomes_healthy_and_stops(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = child(tmp_path, SERVER, str(port), url=f"http://127.0.0.1:{port}/")
    await process.start()
    async with aiohttp.ClientSession() as http:
        await process.wait_healthy(http, 30)
    await process.stop()
    assert not process.running


async def test_an_early_death_shows_the_end_of_the_log(tmp_path: Path) -> None:
    process = child(tmp_path, "raise SystemExit('no such model')")
    await process.start()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ProcessDiedError, match=r"exit code 1(?s:.*)no such model"):
            await process.wait_healthy(http, 30)


async def test_what_never_answers_times_out(tmp_path: Path) -> None:
    process = child(tmp_path, "import time; time.sleep(600)")
    await process.start()
    try:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(ProcessDiedError, match="not healthy after 1 s"):
                await process.wait_healthy(http, 1)
    finally:
        await process.stop(grace_seconds=1)


async def test_stop_takes_the_whole_group_even_if_sigterm_is_ignored(tmp_path: Path) -> None:
    process = child(tmp_path, WITH_CHILD)
    await process.start()
    for _ in range(200):
        if (tmp_path / "child.log").read_text():
            break
        await asyncio.sleep(0.05)
    grandchild = int((tmp_path / "child.log").read_text())
    await process.stop(grace_seconds=0.2)
    for _ in range(100):
        if not _alive(grandchild):
            break
        await asyncio.sleep(0.05)
    assert not _alive(grandchild)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed process that nobody has reaped yet still has its id.
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
