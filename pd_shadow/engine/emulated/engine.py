"""One emulated engine that runs: an instance driven in real time, behind an HTTP server."""

import asyncio
import contextlib
import time
from typing import Any

from aiohttp import web

from pd_shadow.common.logs import get_logger
from pd_shadow.engine.attachment import Attachment
from pd_shadow.engine.emulated.block_pool import HASH_ALGORITHM
from pd_shadow.engine.emulated.clock import EngineClock
from pd_shadow.engine.emulated.config import AttachTo, EmulatedEngine
from pd_shadow.engine.emulated.instance import Instance, Load
from pd_shadow.engine.emulated.mover import Mover, TransferFailedError
from pd_shadow.engine.emulated.movers import mover_for
from pd_shadow.engine.emulated.request import EngineRequest
from pd_shadow.engine.emulated.server import application
from pd_shadow.engine.snapshot import EngineFacts
from pd_shadow.engine.steps import StepLog

LATE_SECONDS = 0.1
"""Real time that an engine may be behind its iterations and catch up; beyond, the machine is too slow for it."""

log = get_logger("emulated")


class Engine:
    """Start once, then close once. `mover` is what brings KV from P, by default what `config.kv_transfer` says."""

    def __init__(
        self,
        config: EmulatedEngine,
        attach: AttachTo | None = None,
        *,
        mover: Mover | None = None,
    ) -> None:
        self.config = config
        self.clock = EngineClock(config.speed)
        self.mover: Mover = mover_for(config, self.clock) if mover is None else mover
        self.started_at = 0.0
        self.instance: Instance
        self.url = ""
        self._attach = attach
        self._wake = asyncio.Event()
        self._loads: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._attachment: Attachment | None = None
        self._log: StepLog | None = None

    @property
    def incarnation(self) -> str:
        """This life, as discovery reads it off /metrics."""
        return f"{self.started_at:.2f}"

    async def start(self) -> None:
        """Serve and attach. Raises OSError when it cannot listen or move KV."""
        config = self.config
        self.started_at = time.time()
        runner = self._runner = web.AppRunner(
            application(self), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        try:
            await self.mover.start()
            await runner.setup()
            await web.TCPSite(runner, config.host, config.port).start()
            port = runner.addresses[0][1]
            self.url = config.url_at(port)
            facts = EngineFacts(
                role=config.role,
                model=config.served_name,
                block_size=config.block_size,
                hash_algorithm=HASH_ALGORITHM,
                max_context_tokens=config.context_tokens,
                kv_bytes_per_token=config.kv_bytes_per_token,
                vllm_version="emulated",
            )
            settings = config.attached_to(self._attach, port)
            self._log = StepLog(settings.trace_file)
            self._attachment = Attachment(settings, facts, self._log, life=self.incarnation)
            self.instance = Instance(config, port, self._attachment, self._log)
            # Nothing runs until a request comes, and the controller sends no shadow work where there is no room.
            self.instance.show(self.clock.now())
            self._loop = asyncio.create_task(self._run(), name=f"engine {config.name}")
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End requests in flight after a short grace, detach, and stop."""
        if self._runner is not None:
            await self._runner.cleanup()
        tasks = [task for task in (self._loop, *self._loads) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.mover.close()
        if self._attachment is not None:
            # It waits for its reporter's thread.
            await asyncio.to_thread(self._attachment.close)
        if self._log is not None:
            self._log.close()

    def submit(self, request: EngineRequest) -> None:
        self.instance.submit(request, self.clock.now())
        self._wake.set()

    def abort(self, request: EngineRequest) -> None:
        self.instance.abort(request, self.clock.now())
        self._wake.set()

    def read(self, request_id: str, blocks: list[int]) -> list[bytes] | None:
        """See Instance.read."""
        contents = self.instance.read(request_id, blocks, self.clock.now())
        self._wake.set()
        return contents

    def lay(self, request_id: str, blocks: list[int]) -> dict[str, Any] | None:
        """How a reader gets at the bytes of handed-out blocks. Raises KeyError when they are not held for it."""
        contents = self.instance.held(request_id, blocks)
        if contents is None:
            raise KeyError(request_id)
        return self.mover.lay(blocks, contents)

    async def _run(self) -> None:
        try:
            ended = 0.0
            while True:
                # Where one iteration follows another, timers that ring late do not add up.
                now = self.clock.now()
                late = LATE_SECONDS * self.clock.speed
                now = ended if ended <= now <= ended + late else now
                step = self.instance.plan(now)
                for load in self.instance.take_loads():
                    task = asyncio.create_task(self._load(load))
                    self._loads.add(task)
                    task.add_done_callback(self._loads.discard)
                if step is None:
                    ended = 0.0
                    await self._sleep()
                    continue
                ended = now + step.seconds
                await self.clock.sleep_until(ended)
                self.instance.finish(ended)
        except Exception:
            # An engine that served on without iterations would hang its clients.
            log.exception("engine_failed", engine=self.config.name)
            if self._attachment is not None:
                await asyncio.to_thread(self._attachment.close)
            if self._runner is not None:
                await self._runner.cleanup()
            raise

    async def _sleep(self) -> None:
        """Until something comes, or is due."""
        now = self.clock.now()
        look = self.instance.next_look(now)
        seconds = None if look is None else max(0.0, look - now) / self.clock.speed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    async def _load(self, load: Load) -> None:
        contents = None
        try:
            contents = await self.mover.pull(load.source, load.remote_blocks, load.blocks, load.size)
        except TransferFailedError as error:
            if load.blocks:
                log.warning("transfer_failed", engine=self.config.name, why=str(error))
        self.instance.loaded(load, contents, self.clock.now())
        self._wake.set()
