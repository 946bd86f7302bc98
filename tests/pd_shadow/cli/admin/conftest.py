"""A real controller in a thread of its own, since the command is synchronous."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result

from controller.config import ControllerConfig
from controller.core.cluster import Cluster
from controller.server.app import Controller
from pd_shadow.api.v1 import common_pb2
from pd_shadow.cli.main import main
from tests.controller.server.test_app import add_instance


class Running:
    """The controller, and a way to its core."""

    def __init__(self, controller: Controller, loop: asyncio.AbstractEventLoop) -> None:
        self._controller = controller
        self.loop = loop
        self.address = f"127.0.0.1:{controller.port}"

    def turn(self, act: Callable[[Cluster, float], Any]) -> Any:
        """Do something to the core, where it lives."""

        async def do() -> Any:
            with self._controller.plane.turn() as (cluster, now):
                return act(cluster, now)

        return asyncio.run_coroutine_threadsafe(do(), self.loop).result()


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[Running]:
    """A controller of two models with a P and a D each."""
    started: Future[tuple[Running, asyncio.Event]] = Future()

    async def serve() -> None:
        config = ControllerConfig.model_validate({"listen": "127.0.0.1:0", "grace_seconds": 0, **settings})
        stop = asyncio.Event()
        async with Controller(config).running() as running:
            for model in "ab":
                add_instance(running.plane, f"{model}-p0", model, common_pb2.ROLE_PREFILL)
                add_instance(running.plane, f"{model}-d0", model, common_pb2.ROLE_DECODE)
            started.set_result((Running(running, asyncio.get_running_loop()), stop))
            await stop.wait()

    # In a process of its own, its log is on standard error.
    with structlog.testing.capture_logs():
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        running, stop = started.result()
        try:
            yield running
        finally:
            running.loop.call_soon_threadsafe(stop.set)
            thread.join()


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Running]:
    monkeypatch.setenv("PD_SHADOW_CONTEXTS", str(tmp_path / "contexts.yaml"))
    with serving() as running:
        yield running


@pytest.fixture
def run(controller: Running) -> Callable[..., Result]:
    """`pd-shadow admin …` against the controller."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["admin", "--address", controller.address, *arguments])

    return run
