"""One child process in a group of its own: started with a log file, watched, and never left behind."""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

TAIL_LINES = 15
POLL_SECONDS = 0.2


class ProcessDiedError(Exception):
    """A child ended, or did not become healthy in time; the message carries the end of its log."""


class ManagedProcess:
    """A named child. Its log is appended to across restarts."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, health_url: str) -> None:
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._env = dict(env)
        self._health_url = health_url
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env={**os.environ, **self._env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    async def wait_healthy(self, http: aiohttp.ClientSession, timeout_seconds: float) -> None:
        """Return when the health URL answers 200. Raises ProcessDiedError on an early end or at the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(self._health_url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(POLL_SECONDS)
        raise ProcessDiedError(f"{self.name} was not healthy after {timeout_seconds:.0f} s{self._tail()}")

    def check(self) -> None:
        """Raises ProcessDiedError if the child has ended."""
        if self._process is not None and self._process.returncode is not None:
            raise ProcessDiedError(f"{self.name} ended with exit code {self._process.returncode}{self._tail()}")

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """SIGTERM, then SIGKILL to whatever of the group is left after the grace."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the whole group, as a crash would."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The group outlives its leader until its last member is gone, and a new session's group id is its leader's pid.
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            lines = []
        return f"; the end of {self.log}:\n" + "\n".join(f"  {line}" for line in lines)


def _die_with_parent() -> None:
    # Linux only, and only for a parent that is killed without a chance to clean up.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
