"""What a decision of the control plane costs: the core alone, and `BeginCall` at a controller in a process of its own.

Synthetic instances that are always ready, sessions that have called two models; no engines, no gateways.
"""

import asyncio
import ctypes
import gc
import itertools
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import psutil

from controller.config import ControllerConfig
from controller.core.cluster import CallEnd, Cluster
from controller.core.instance import Facts, LoadReport
from controller.core.registry import Declared
from controller.core.session import SessionKey
from controller.server.app import Controller
from controller.server.placement import PlacementServicer
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.api.v1 import placement_pb2_grpc
from pd_shadow.common.logs import configure

MODELS = ("model-a", "model-b")
GATEWAY = "gateway"
BLOCK_TOKENS = 128
SHORT_PROMPT, LONG_PROMPT = 8 * 1024, 1024 * 1024
OUTPUT_TOKENS = 100
CYCLES_AT_MOST = 256
"""Call cycles in flight at a time: an overloaded server is measured, not buried."""
START_SECONDS = 120.0


@dataclass(frozen=True)
class Plan:
    """What is measured; `rate` in calls per second, `calls` per repetition."""

    sessions: int = 100_000
    instances: int = 100
    memory_sessions: int = 200_000
    calls: int = 5_000
    rate: float = 1_000.0
    repeats: int = 3
    seed: int = 1

    def check(self) -> None:
        """Raises ValueError naming the option."""
        if self.instances % 4:
            raise ValueError(f"--instances: {self.instances} is no multiple of 4 (P and D of two models)")


class Core(NamedTuple):
    """The core alone; decisions are begin_call and end_call, two per call."""

    decisions_per_s: list[float]
    short_begin_s: list[float]
    long_begin_s: list[float]


class Served(NamedTuple):
    """One repetition at the server; seconds per BeginCall, inside its handler and as the client sees it."""

    inside_s: list[float]
    client_s: list[float]
    calls_per_s: float
    calls_left: int


Step = Callable[[str], None]
"""Told what begins."""
STEPS = 3


def run(plan: Plan, on_step: Step) -> tuple[Core, list[Served], float]:
    """The core, the repetitions at the server, and resident bytes per session.

    Raises RuntimeError or OSError when the controller does not start or a call fails.
    """
    on_step("the core alone")
    core = measure_core(plan)
    on_step("a controller over gRPC")
    served = measure_served(plan)
    on_step("memory per session")
    return core, served, measure_memory(plan)


def config(sessions: int) -> ControllerConfig:
    return ControllerConfig.model_validate(
        {"listen": "127.0.0.1:0", "limits": {"max_sessions": max(1, sessions)}, "log_level": "error"}
    )


def populate(cluster: Cluster, instances: int, sessions: int) -> None:
    """Instances in equal numbers per model and role, all ready; sessions that have called both models."""
    roles = (common.ROLE_PREFILL, common.ROLE_DECODE)
    sides = list(itertools.product(MODELS, roles))
    for index in range(instances):
        model, role = sides[index % len(sides)]
        name = f"{model}-{common.Role.Name(role).lower()}-{index}"
        cluster.declare(Declared(name, model, role, f"http://{name}"))
        cluster.observe(0.0, name, Facts("1", BLOCK_TOKENS), LoadReport())
    for number in range(sessions):
        for model in MODELS:
            # As a request's field: no string is shared with another call.
            cycle(cluster, key(number), "".join(model), SHORT_PROMPT)
    cluster.take_effects()


def key(number: int) -> SessionKey:
    return SessionKey("", f"session-{number:012d}")


def cycle(cluster: Cluster, session: SessionKey, model: str, prompt_tokens: int) -> float:
    """A whole call that goes well; the seconds that begin_call took."""
    begun_at = time.perf_counter()
    begun = cluster.begin_call(0.0, GATEWAY, session, model, prompt_tokens=prompt_tokens)
    seconds = time.perf_counter() - begun_at
    cluster.progress(0.0, begun.call.call_id, pb.CALL_PHASE_TRANSFER)
    cluster.progress(0.0, begun.call.call_id, pb.CALL_PHASE_DECODE)
    cluster.end_call(0.0, begun.call.call_id, _end(prompt_tokens))
    return seconds


def _end(prompt_tokens: int) -> CallEnd:
    return CallEnd(
        common.CALL_OUTCOME_COMPLETED,
        common.HANDOFF_HANDED_OFF,
        prompt_tokens=prompt_tokens,
        completion_tokens=OUTPUT_TOKENS,
    )


def measure_core(plan: Plan) -> Core:
    """Decisions per second of this process, and begin_call with short and with long prompts in turns."""
    cluster = Cluster(config(plan.sessions), epoch="bench")
    populate(cluster, plan.instances, plan.sessions)
    generator = random.Random(plan.seed)
    core = Core([], [], [])
    for _ in range(plan.repeats):
        chosen = [(key(generator.randrange(plan.sessions)), generator.choice(MODELS)) for _ in range(plan.calls)]
        begun_at = time.perf_counter()
        for session, model in chosen:
            begun = cluster.begin_call(0.0, GATEWAY, session, model, prompt_tokens=SHORT_PROMPT)
            cluster.end_call(0.0, begun.call.call_id, _end(SHORT_PROMPT))
        core.decisions_per_s.append(2 * plan.calls / (time.perf_counter() - begun_at))
        seconds: dict[int, list[float]] = {SHORT_PROMPT: [], LONG_PROMPT: []}
        order = (SHORT_PROMPT, LONG_PROMPT)
        for session, model in chosen:
            for tokens in order:
                seconds[tokens].append(cycle(cluster, session, model, tokens))
            # The second of two finds the session in the processor's caches.
            order = order[::-1]
        core.short_begin_s.append(statistics.median(seconds[SHORT_PROMPT]))
        core.long_begin_s.append(statistics.median(seconds[LONG_PROMPT]))
    return core


# The controller's process.


class _Timed(PlacementServicer):
    """The product's servicer, with the seconds that BeginCall spends in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds: list[float] = []

    async def BeginCall(self, request: pb.BeginCallRequest, context: Any) -> pb.BeginCallResponse:  # noqa: N802
        begun_at = time.perf_counter()
        try:
            return await super().BeginCall(request, context)
        finally:
            self.seconds.append(time.perf_counter() - begun_at)


def _serve(plan: Plan, pipe: Connection) -> None:
    settings = config(plan.sessions)
    configure(settings.log_level, settings.log_format)
    asyncio.run(_serve_until_told(plan, settings, pipe))


async def _serve_until_told(plan: Plan, settings: ControllerConfig, pipe: Connection) -> None:
    timed: list[_Timed] = []

    def placement(*args: Any) -> PlacementServicer:
        timed.append(_Timed(*args))
        return timed[-1]

    controller = Controller(settings, placement=placement)
    now = controller.plane.now()
    populate(controller.plane.cluster, plan.instances, plan.sessions)
    for session in controller.plane.cluster.sessions:
        session.last_call = now
    async with controller.running():
        pipe.send(controller.port)
        # One answer per repetition; the other side's end of the pipe, closed, is the end.
        while await asyncio.to_thread(_asked, pipe):
            pipe.send((timed[0].seconds, len(controller.plane.cluster.calls)))
            timed[0].seconds = []


def _asked(pipe: Connection) -> bool:
    try:
        return bool(pipe.recv())
    except EOFError:
        return False


def measure_served(plan: Plan) -> list[Served]:
    """Call cycles at `plan.rate` from this process to a controller in another, over TCP on loopback."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(plan, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise RuntimeError(f"the controller was not up after {START_SECONDS:.0f} s")
        return asyncio.run(_drive(plan, ours.recv(), ours))
    except EOFError:
        raise RuntimeError("the controller's process ended early") from None
    except ExceptionGroup as failed:
        # One call's failure ends the others; the first says why.
        raise RuntimeError(str(failed.exceptions[0])) from failed
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


async def _drive(plan: Plan, port: int, pipe: Connection) -> list[Served]:
    generator = random.Random(plan.seed)
    found = []
    room = asyncio.Semaphore(CYCLES_AT_MOST)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = placement_pb2_grpc.PlacementServiceStub(channel)
        for _ in range(plan.repeats):
            client: list[float] = []
            begun_at = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for number in range(plan.calls):
                    await asyncio.sleep(begun_at + number / plan.rate - time.perf_counter())
                    await room.acquire()
                    session, model = key(generator.randrange(plan.sessions)), generator.choice(MODELS)
                    tasks.create_task(_cycle_over(stub, session, model, client, room))
            seconds = time.perf_counter() - begun_at
            pipe.send(True)
            inside, left = await asyncio.to_thread(pipe.recv)
            found.append(Served(inside, client, plan.calls / seconds, left))
    return found


async def _cycle_over(stub: Any, session: SessionKey, model: str, client: list[float], room: asyncio.Semaphore) -> None:
    """One cycle; gives back the room its caller took for it."""
    request = pb.BeginCallRequest(
        gateway_id=GATEWAY,
        session=common.SessionKey(**session._asdict()),
        model=model,
        prompt_tokens=SHORT_PROMPT,
    )
    begun_at = time.perf_counter()
    try:
        begun = await stub.BeginCall(request)
        client.append(time.perf_counter() - begun_at)
        phases = (pb.CALL_PHASE_TRANSFER, pb.CALL_PHASE_DECODE)
        await stub.ReportProgress(iter([pb.ReportProgressRequest(call_id=begun.call_id, phase=p) for p in phases]))
        await stub.EndCall(pb.EndCallRequest(call_id=begun.call_id, **_end(SHORT_PROMPT)._asdict()))
    except grpc.aio.AioRpcError as error:
        raise RuntimeError(f"a call failed: {error.code().name}: {error.details()}") from error
    finally:
        room.release()


def measure_memory(plan: Plan) -> float:
    """Resident bytes per session that has called two models, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_resident, args=(theirs, plan), daemon=True)
    process.start()
    theirs.close()
    try:
        return float(ours.recv())
    except EOFError:
        raise RuntimeError("the process whose memory is measured ended early") from None
    finally:
        process.kill()
        process.join()


def _send_resident(pipe: Connection, plan: Plan) -> None:
    pipe.send(resident_per_session(plan.memory_sessions, plan.instances))


def resident_per_session(sessions: int, instances: int) -> float:
    """What this process grows by, per session."""
    cluster = Cluster(config(sessions), epoch="bench")
    populate(cluster, instances, 0)
    before = _resident()
    for number in range(sessions):
        for model in MODELS:
            cycle(cluster, key(number), "".join(model), SHORT_PROMPT)
    cluster.take_effects()
    return (_resident() - before) / sessions


def _resident() -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return psutil.Process().memory_info().rss
