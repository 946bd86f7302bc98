"""A whole cluster on loopback: two models' engines, and a controller and gateway that can be replaced."""

import asyncio
import contextlib
import enum
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import aiohttp
import grpc.aio
import yaml

from pd_shadow.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pd_shadow.demo import emulated, models
from pd_shadow.demo.emulated import EmulatedModel
from pd_shadow.demo.process import POLL_SECONDS, ManagedProcess, ProcessDiedError
from pd_shadow.engine.emulated.config import EmulatedEngine
from pd_shadow.engine.emulated.mover import TimedLink
from pd_shadow.engine.settings import PluginSettings, ReporterSettings, Role, SloSettings
from pd_shadow.engine.vllm.command import EngineCommand
from pd_shadow.policy.approach import Approach

HOST = "127.0.0.1"
HARDWARE = "this-machine"
"""All engines share the machine's cores: shadow work waits until none of them has normal work."""
TPOT_FLOOR_SECONDS = 0.1
"""On a CPU an iteration with a useful prefill chunk takes far longer than one with a decode: half of five decodes, the
budget of an idle colocated engine by default, holds no chunk behind a few thousand tokens."""
PLUGIN_MINIMUM_TOKENS = 128
"""One block, which is what a core computes in well under a tenth of a second at contexts of 10K tokens."""
STOCK_BATCHED_TOKENS = 128
"""Bounds every iteration of a stock engine, for it does not tell a shadow's from others."""
PLUGIN_BATCHED_TOKENS = 512
"""The plugin bounds shadow iterations by itself, so that normal prefills need not be cut as small as those."""
BOOT_SECONDS = 300.0
CONTROL_SECONDS = 60.0


class Engines(enum.StrEnum):
    """What serves the models: vLLM on the CPU, or emulated engines, with the latencies of GPUs and no models at all."""

    EMULATED = "emulated"
    VLLM = "vllm"


class Mode(enum.StrEnum):
    """How a model is served: by a prefill and a decode engine with NIXL between them, or by one that does both."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


ROLES: Mapping[Mode, Sequence[Role]] = {
    Mode.DISAGGREGATED: (Role.PREFILL, Role.DECODE),
    Mode.COLOCATED: (Role.COLOCATED,),
}

Progress = Callable[[str], None]
Model = models.ModelSpec | EmulatedModel
PROGRAM = (sys.executable, "-c", "from pd_shadow.cli.main import main; main()")


@dataclass(frozen=True)
class ControlPlane:
    """Addresses of one controller and its gateway."""

    gateway_url: str
    controller_address: str
    controller: ManagedProcess
    gateway: ManagedProcess


class Cluster:
    """Async context manager: engines are healthy inside it, and nothing is left running after it.

    `run_dir` receives logs and configuration, `cache_dir` the built models. `progress` is called with a line of text
    whenever a process is ready. Engines run the plugin unless `stock`. `speed` is seconds of the engines' time per real
    second, other than 1 for emulated ones only. Raises ProcessDiedError when a process does not come up.
    """

    kv_transfer = "NIXL"
    """What moves KV from P to D."""
    hardware = HARDWARE
    poll_interval_seconds = 1.0

    def __init__(
        self,
        run_dir: Path,
        cache_dir: Path,
        specs: Sequence[Model] = (models.SMALL, models.LARGE),
        progress: Progress | None = None,
        mode: Mode = Mode.DISAGGREGATED,
        stock: bool = False,
        speed: float = 1.0,
    ) -> None:
        self.run_dir = run_dir
        self.cache_dir = cache_dir
        self.specs = tuple(specs)
        self.mode = mode
        self.stock = stock
        self.speed = speed
        # Engines with the plugin are told at their start where controllers are found.
        self.controller_address = ""
        self.commands: dict[str, EngineCommand | EmulatedEngine] = {}
        self._engines: dict[str, ManagedProcess] = {}
        self._progress = progress or (lambda line: None)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Cluster":
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._http = aiohttp.ClientSession()
        try:
            await self._prepare()
            await self._start_engines(list(self._engines))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def engine(self, model: str, role: Role) -> EngineCommand | EmulatedEngine:
        """The engine of a model and role."""
        return next(c for c in self.commands.values() if c.served_name == model and c.role is role)

    async def kill_engine(self, name: str) -> None:
        """kill -9, as a crash would."""
        await self._engines[name].kill()

    async def restart_engine(self, name: str) -> None:
        """Start a killed engine again, on the same addresses, and wait until it is healthy."""
        await self._start_engines([name])

    def check(self) -> None:
        """Raises ProcessDiedError if an engine has ended."""
        for engine in self._engines.values():
            engine.check()

    @contextlib.asynccontextmanager
    async def control_plane(self, approach: Approach, name: str = "control") -> AsyncIterator[ControlPlane]:
        """A fresh controller and gateway over the running engines, for as long as the block runs."""
        metrics_port, gateway_port = free_ports(2)
        config = self.run_dir / f"{name}-controller.yaml"
        config.write_text(yaml.safe_dump(self._controller_config(metrics_port, approach)))
        controller = ManagedProcess(
            f"{name} controller",
            [*PROGRAM, "serve", "controller", "--config", str(config)],
            {},
            self.run_dir / f"{name}-controller.log",
            f"http://{HOST}:{metrics_port}/metrics",
        )
        address = self.controller_address
        gateway_url = f"http://{HOST}:{gateway_port}"
        gateway = ManagedProcess(
            f"{name} gateway",
            [*PROGRAM, "serve", "gateway", "--controller", address, "--listen", f"{HOST}:{gateway_port}"],
            {},
            self.run_dir / f"{name}-gateway.log",
            f"{gateway_url}/ready",
        )
        try:
            for process in (controller, gateway):
                await process.start()
            for process in (controller, gateway):
                await process.wait_healthy(self._session(), CONTROL_SECONDS)
            await self._all_instances_ready(address, gateway_url, name)
            for process in (controller, gateway):
                self._progress(f"{process.name} ready")
            yield ControlPlane(gateway_url, address, controller, gateway)
        finally:
            # In this order, so that the gateway never finds its controller gone.
            await gateway.stop()
            await controller.stop()

    async def _all_instances_ready(self, controller_address: str, gateway_url: str, name: str) -> None:
        """Return once the controller has seen every engine and the gateway serves every model.

        Both answer as ready from their first instance on. Raises ProcessDiedError at the timeout.
        """
        missing = set(self.commands) | {spec.name for spec in self.specs}
        try:
            async with asyncio.timeout(CONTROL_SECONDS), grpc.aio.insecure_channel(controller_address) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                while missing:
                    seen = await admin.ListInstances(admin_pb2.ListInstancesRequest())
                    missing -= {
                        i.endpoint.ref.name
                        for i in seen.instances
                        if i.state == common_pb2.INSTANCE_STATE_READY and i.request_level == self.stock
                    }
                    missing -= await self._served_models(gateway_url)
                    await asyncio.sleep(POLL_SECONDS)
        except (TimeoutError, grpc.aio.AioRpcError, aiohttp.ClientError) as error:
            raise ProcessDiedError(f"{name}: still waiting for {', '.join(sorted(missing))}: {error!r}") from error

    async def _served_models(self, gateway_url: str) -> set[str]:
        async with self._session().get(f"{gateway_url}/v1/models") as answer:
            return {entry["id"] for entry in (await answer.json())["data"]}

    async def _prepare(self) -> None:
        roles = ROLES[self.mode]
        *ports, controller_port = free_ports(2 * len(roles) * len(self.specs) + 1)
        self.controller_address = f"{HOST}:{controller_port}"
        folders = {}
        specs = [spec for spec in self.specs if isinstance(spec, models.ModelSpec)]
        for spec in specs:
            folders[spec.name] = await asyncio.to_thread(models.build, spec, self.cache_dir)
            self._progress(f"{spec.name} built")
        for role in roles:
            for spec in specs:
                name = f"{spec.name}-{role}"
                port = ports.pop()
                command = EngineCommand(
                    model_dir=folders[spec.name],
                    served_name=spec.name,
                    role=role,
                    host=HOST,
                    port=port,
                    side_channel_port=None if role is Role.COLOCATED else ports.pop(),
                    max_model_len=spec.max_model_len,
                    plugin=None if self.stock else self._plugin(name, f"http://{HOST}:{port}"),
                    max_num_batched_tokens=STOCK_BATCHED_TOKENS if self.stock else PLUGIN_BATCHED_TOKENS,
                )
                self.commands[name] = command
                self._engines[name] = ManagedProcess(
                    name,
                    command.argv(),
                    command.env(),
                    self.run_dir / f"{name}.log",
                    f"{command.url}/health",
                )

    async def _start_engines(self, names: Sequence[str]) -> None:
        for name in names:
            await self._engines[name].start()
        try:
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(self._ready(self._engines[name]))
        except BaseExceptionGroup as several:
            died, _ = several.split(ProcessDiedError)
            raise (died or several).exceptions[0] from None

    async def _ready(self, process: ManagedProcess) -> None:
        await process.wait_healthy(self._session(), BOOT_SECONDS)
        self._progress(f"{process.name} ready")

    def _plugin(self, name: str, url: str) -> PluginSettings:
        return PluginSettings(
            minimum_tokens=PLUGIN_MINIMUM_TOKENS,
            slo=SloSettings(tpot_floor_seconds=TPOT_FLOOR_SECONDS),
            trace_file=self.run_dir / f"{name}-steps.jsonl",
            reporter=ReporterSettings(controller=self.controller_address, name=name, url=url, hardware=HARDWARE),
        )

    def _controller_config(self, metrics_port: int, approach: Approach) -> dict[str, object]:
        return {
            "listen": self.controller_address,
            "metrics_listen": f"{HOST}:{metrics_port}",
            "discovery": {
                "static": [
                    {
                        "name": name,
                        "model": command.served_name,
                        "role": str(command.role),
                        "url": command.url,
                        "hardware": self.hardware,
                    }
                    for name, command in self.commands.items()
                ],
                "poll_interval_seconds": self.poll_interval_seconds,
            },
            "shadow": {"approach": str(approach)},
        }

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("a cluster is used inside its `async with` block")
        return self._http

    async def _close(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        if self._http is not None:
            await self._http.close()


class EmulatedCluster(Cluster):
    """The same cluster of emulated engines, each a process of its own on hardware of its own."""

    kv_transfer = TimedLink.name
    hardware = ""
    poll_interval_seconds = 0.25

    async def _prepare(self) -> None:
        roles = ROLES[self.mode]
        *ports, controller_port = free_ports(len(roles) * len(self.specs) + 1)
        self.controller_address = f"{HOST}:{controller_port}"
        for role in roles:
            for spec in self.specs:
                name = f"{spec.name}-{role}"
                config = {
                    "name": name,
                    "model": spec.name,
                    "role": role.value,
                    "host": HOST,
                    "port": ports.pop(),
                    "speed": self.speed,
                    "block_size": emulated.BLOCK_SIZE,
                    **({"plugin": None} if self.stock else {}),
                }
                file = self.run_dir / f"{name}.yaml"
                file.write_text(yaml.safe_dump({"controller": self.controller_address, "engines": [config]}))
                command = EmulatedEngine.model_validate(config)
                self.commands[name] = command
                self._engines[name] = ManagedProcess(
                    name,
                    [*PROGRAM, "serve", "engine", "--emulated", "--config", str(file)],
                    {},
                    self.run_dir / f"{name}.log",
                    f"{command.url}/health",
                )


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports free at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
