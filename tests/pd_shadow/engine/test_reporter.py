"""The reporter's thread against a scripted controller, and against a real one that dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from controller.config import ControllerConfig
from controller.core.cluster import Cluster
from controller.core.effects import Limits
from controller.core.instance import Facts, Instance, LoadReport
from controller.core.registry import Declared
from controller.core.session import SessionKey
from controller.server.app import Controller
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import engine_pb2 as pb
from pd_shadow.api.v1 import engine_pb2_grpc
from pd_shadow.common.backoff import Backoff
from pd_shadow.common.config import ConfigError
from pd_shadow.common.tls import ClientTls
from pd_shadow.engine.directives import DropSession, PauseShadow, ResumeShadow, SetLimits
from pd_shadow.engine.outbox import PENDING
from pd_shadow.engine.reporter import REFUSED_SECONDS, Reporter, is_serving
from pd_shadow.engine.settings import ReporterSettings, Role
from pd_shadow.engine.snapshot import EngineFacts, EngineSnapshot
from pd_shadow.policy.base import StepReason
from tests.credentials import chain, issue, trust, write

FACTS = EngineFacts(
    role=Role.PREFILL,
    model="m",
    block_size=16,
    hash_algorithm="sha256",
    max_context_tokens=32_768,
    kv_bytes_per_token=2048,
    vllm_version="0.32.0",
)
WAIT = 30.0


def reporter(address: str, **more: Any) -> Reporter:
    settings = ReporterSettings(controller=address, name="p0", url="http://10.0.0.7:8000", hardware="gpu-0")
    given: dict[str, Any] = {
        "life": "1700000000.50", "backoff": Backoff(0.01, 0.01), "serving": lambda url: True, **more
    }  # fmt: skip
    return Reporter(settings, FACTS, **given)


@contextlib.contextmanager
def running(address: str, **more: Any) -> Iterator[Reporter]:
    """A started reporter, closed at the end of the block."""
    started = reporter(address, **more)
    started.start()
    try:
        yield started
    finally:
        started.close()


@dataclass
class Script(engine_pb2_grpc.EngineServiceServicer):
    """A controller of this test's own: welcomes, tells what it is given, keeps what it hears."""

    interval_seconds: float = 60.0
    tells: list[pb.AttachResponse] = field(default_factory=list)
    # Streams that are refused instead, with these codes, before the others.
    refusals: list[grpc.StatusCode] = field(default_factory=list)
    heard: queue.Queue[pb.AttachRequest] = field(default_factory=queue.Queue)
    # Cleared: nothing beyond the hello is read.
    reads: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.reads.set()

    def Attach(self, request_iterator: Iterator[pb.AttachRequest], context: Any) -> Iterator[pb.AttachResponse]:  # noqa: N802
        self.heard.put(next(request_iterator))
        if self.refusals:
            context.abort(self.refusals.pop(0), "another one lives here")
        yield pb.AttachResponse(welcome=pb.Welcome(load_interval_seconds=self.interval_seconds))
        yield from self.tells
        self.reads.wait()
        for request in request_iterator:
            self.heard.put(request)

    def next(self, kind: str) -> Any:
        """The next message of a kind; others before it are passed over."""
        while True:
            message = self.heard.get(timeout=WAIT)
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)


@contextlib.contextmanager
def serving(script: Script, address: str = "127.0.0.1:0") -> Iterator[str]:
    """The script behind a real gRPC server; its address. Leaving the block cuts its streams."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(script, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        script.reads.set()
        server.stop(None).wait()


def test_hello_says_who_the_engine_is_and_what_it_still_holds() -> None:
    script = Script()
    with serving(script) as address:
        started = reporter(address)
        started.progress("t/s1", 2048)
        started.progress("/s2", 512)
        started.evicted("/s2", 0)
        started.progress("not-a-tag", 64)
        started.start()
        hello = script.next("hello")
        started.close()
    assert (hello.ref.name, hello.ref.incarnation) == ("p0", "1700000000.50")
    assert (hello.role, hello.model, hello.url) == (common.ROLE_PREFILL, "m", "http://10.0.0.7:8000")
    assert (hello.block_size, hello.hash_algorithm, hello.max_context_tokens) == (16, "sha256", 32_768)
    assert (hello.hardware, hello.vllm_version, hello.kv_bytes_per_token) == ("gpu-0", "0.32.0", 2048)
    assert hello.plugin_version
    assert [(r.session.tenant, r.session.session_id, r.tokens) for r in hello.resident_sessions] == [("t", "s1", 2048)]


def test_loads_come_at_a_steady_interval_and_say_what_was_published_last() -> None:
    script = Script(interval_seconds=0.05)
    with serving(script) as address, running(address) as engine:
        first = script.next("load")
        assert (first.running, first.HasField("slack_seconds"), first.step_reason) == (
            0, False, common.STEP_REASON_NO_WORK,
        )  # fmt: skip
        engine.publish(EngineSnapshot(waiting=9))
        engine.publish(
            EngineSnapshot(
                waiting=1,
                running=2,
                kv_usage=0.5,
                shadow_blocks=3,
                shadow_cap_blocks=4,
                shadow_pinned_blocks=1,
                shadow_room_tokens=160,
                shadow_jobs=2,
                slack_seconds=-0.25,
                credit_seconds=0.01,
                link_busy=True,
                step_reason=StepReason.NO_ROOM,
                shadow_tokens=10_000,
                steps_over_budget=7,
                evicted_blocks=5,
            )
        )
        while not (load := script.next("load")).waiting:
            pass
    assert load == pb.Load(
        waiting=1,
        running=2,
        kv_usage=0.5,
        shadow_blocks=3,
        shadow_cap_blocks=4,
        shadow_pinned_blocks=1,
        shadow_room_tokens=160,
        shadow_jobs=2,
        slack_seconds=-0.25,
        credit_seconds=0.01,
        link_busy=True,
        step_reason=common.STEP_REASON_NO_ROOM,
        shadow_tokens=10_000,
        steps_over_budget=7,
        evicted_blocks=5,
    )


def test_events_do_not_wait_for_the_next_load() -> None:
    script = Script()
    with serving(script) as address, running(address) as engine:
        script.next("load")
        engine.progress("/s", 512)
        progress = script.next("shadow_progress")
        assert (progress.session.session_id, progress.covered_tokens) == ("s", 512)
        engine.evicted("/s", 128)
        event = script.next("event")
        assert (event.kind, event.session.session_id, event.tokens) == (
            pb.ENGINE_EVENT_KIND_SESSION_EVICTED, "s", 128,
        )  # fmt: skip
        engine.cache_reset()
        assert script.next("event").kind == pb.ENGINE_EVENT_KIND_CACHE_RESET


def test_directives_reach_the_engine_and_bad_ones_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    script = Script(
        tells=[
            pb.AttachResponse(set_limits=pb.SetLimits(cap_share=7.0)),
            pb.AttachResponse(),
            pb.AttachResponse(set_limits=pb.SetLimits(cap_share=0.1)),
            pb.AttachResponse(pause_shadow=pb.PauseShadow()),
        ]
    )
    taken: list[object] = []
    with caplog.at_level(logging.WARNING), serving(script) as address, running(address) as engine:
        script.next("load")
        while PauseShadow() not in taken:
            taken += engine.take_directives()
    assert taken == [SetLimits(cap_share=0.1), PauseShadow()]
    assert "set_limits: cap_share" in caplog.text


def test_a_controller_that_does_not_read_holds_up_nobody_and_costs_bounded_memory() -> None:
    script = Script()
    script.reads.clear()
    sessions = PENDING + 100
    with serving(script) as address, running(address) as engine:
        script.next("hello")
        for tokens in (16, 32, 48):
            for index in range(sessions):
                engine.progress(f"/{index}", tokens)
        engine.evicted("/last", 0)
        script.reads.set()
        newest: dict[str, int] = {}
        while True:
            message = script.heard.get(timeout=WAIT)
            if message.WhichOneof("message") == "shadow_progress":
                progress = message.shadow_progress
                assert progress.covered_tokens > newest.get(progress.session.session_id, 0)
                newest[progress.session.session_id] = progress.covered_tokens
            elif message.WhichOneof("message") == "event" and message.event.session.session_id == "last":
                break
    assert newest[str(sessions - 1)] == 48


def test_nobody_hears_of_an_engine_whose_http_server_does_not_answer_yet() -> None:
    answers = iter([False, True])
    asked: list[str] = []
    script = Script()

    def serves(url: str) -> bool:
        assert script.heard.empty()
        asked.append(url)
        return next(answers)

    with serving(script) as address, running(address, serving=serves):
        script.next("hello")
    assert asked == ["http://10.0.0.7:8000"] * 2


@pytest.mark.parametrize(("status", "serves"), [(200, True), (503, False), (404, False)])
def test_an_http_server_serves_when_its_health_says_so(
    status: int, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert is_serving(f"{url}/") is serves
        finally:
            server.shutdown()
            thread.join()
    assert asked == ["/health"]
    assert not is_serving(url)


class Pauses:
    """Stands in for the wait between attempts: each lasts until the test lets it end."""

    def __init__(self) -> None:
        self._asked: queue.Queue[float] = queue.Queue()
        self._go = threading.Semaphore(0)

    def __call__(self, closing: threading.Event, seconds: float) -> None:
        self._asked.put(seconds)
        while not (self._go.acquire(timeout=0.01) or closing.is_set()):
            pass

    def asked(self) -> float:
        """Seconds of the pause that lasts now."""
        return self._asked.get(timeout=WAIT)

    def end(self) -> None:
        self._go.release()


def test_while_the_controller_is_away_attempts_get_rarer_and_start_afresh_once_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses, script = Pauses(), Script()
    with serving(Script()) as address:
        pass
    backoff = Backoff(1.0, 4.0, rng=lambda: 0.0)
    with caplog.at_level(logging.INFO), running(address, backoff=backoff, pause=pauses) as engine:
        for expected in (1.0, 2.0, 4.0, 4.0):
            assert pauses.asked() == expected
            pauses.end()
        assert pauses.asked() == 4.0
        engine.progress("/s", 512)
        with serving(script, address):
            pauses.end()
            hello = script.next("hello")
            assert [resident.tokens for resident in hello.resident_sessions] == [512]
            script.next("load")
        assert pauses.asked() == 1.0
    said = [record.getMessage() for record in caplog.records]
    assert sum("is away" in line for line in said) == 2
    assert sum("attached to" in line for line in said) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT])
def test_a_refusal_is_said_once_and_tried_again_slowly(code: grpc.StatusCode, caplog: pytest.LogCaptureFixture) -> None:
    pauses, script = Pauses(), Script(refusals=[code, code])
    backoff = Backoff(1.0, 4.0, rng=lambda: 0.0)
    with caplog.at_level(logging.INFO), serving(script) as address, running(address, backoff=backoff, pause=pauses):
        for _ in range(2):
            assert pauses.asked() == REFUSED_SECONDS
            pauses.end()
        script.next("load")
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == 1
    assert f"{code.name}: another one lives here" in refused[0]


# Against a real controller.


@contextlib.asynccontextmanager
async def controller(address: str = "127.0.0.1:0", **more: Any) -> Any:
    config = {"listen": address, "grace_seconds": 0, "discovery": {"poll_interval_seconds": 0.2}, **more}
    async with Controller(ControllerConfig.model_validate(config)).running() as serving_controller:
        yield serving_controller


async def until(plane: Plane, true: Callable[[Cluster], bool]) -> None:
    """Wait until the core says so; it is asked after every turn."""
    turned = asyncio.Event()
    turn = plane.turn

    @contextlib.contextmanager
    def watched() -> Iterator[Any]:
        with turn() as both:
            yield both
        turned.set()

    plane.turn = watched  # type: ignore[method-assign]
    try:
        while not true(plane.cluster):
            turned.clear()
            await turned.wait()
    finally:
        plane.turn = turn  # type: ignore[method-assign]


def p0(cluster: Cluster) -> Instance | None:
    return cluster.registry.named("p0")


def is_ready(cluster: Cluster) -> bool:
    instance = p0(cluster)
    return instance is not None and instance.ready and instance.load.plugin is not None


async def test_a_real_controller_sees_loads_and_its_directives_arrive() -> None:
    async with controller() as real:
        with running(f"127.0.0.1:{real.port}") as engine:
            engine.publish(EngineSnapshot(running=3, shadow_room_tokens=256, step_reason=StepReason.SLACK))
            await until(real.plane, is_ready)
            with real.plane.turn() as (cluster, now):
                cluster.limit_engines(now, common.ROLE_PREFILL, Limits(controller="eager", minimum_tokens=128))
                cluster.limit_engines(now, common.ROLE_DECODE, Limits(minimum_tokens=1))
                cluster.operators.pause_cluster(now, paused=True)
            taken: list[object] = []

            def arrived(_: Cluster) -> bool:
                taken.extend(engine.take_directives())
                return PauseShadow() in taken

            await until(real.plane, arrived)
            # The policy's own limits may have come before these, or with them.
            given: dict[str, object] = {}
            for limits in taken:
                if isinstance(limits, SetLimits):
                    given |= limits.model_dump(exclude_none=True)
            assert given == {"controller": "eager", "minimum_tokens": 128, "stale_seconds": 0.0}
            await until(real.plane, lambda cluster: p0(cluster).load.running == 3)  # type: ignore[union-attr]
            instance = p0(real.plane.cluster)
            assert instance is not None
            assert not instance.request_level
            assert instance.shadow_room_tokens == 256
            assert instance.load.plugin is not None
            assert instance.load.plugin.step_reason == common.STEP_REASON_SLACK


async def test_an_engine_outlives_its_controller_and_tells_the_next_one_what_it_holds() -> None:
    async with controller() as first:
        address = f"127.0.0.1:{first.port}"
        engine = reporter(address)
        engine.start()
        await until(first.plane, is_ready)
        engine.progress("/s", 4096)
    # Nobody listens: the engine goes on.
    engine.progress("/s", 8192)
    engine.publish(EngineSnapshot(running=1))
    async with controller(address, limits={"max_sessions": 1}) as second:
        await until(second.plane, is_ready)
        session = second.plane.cluster.sessions.get(SessionKey("", "s"))
        assert session is not None
        assert (session.bindings["m"].prefill, session.bindings["m"].prefill_tokens) == (("p0", "1700000000.50"), 8192)
        taken: list[object] = []

        def arrived(_: Cluster) -> bool:
            taken.extend(engine.take_directives())
            return ResumeShadow() in taken

        await until(second.plane, arrived)
        engine.evicted("/s", 1024)
        await until(second.plane, lambda _: session.bindings["m"].prefill_tokens == 1024)
        with second.plane.turn() as (cluster, now):
            # Another session takes the only place there is.
            cluster.declare(Declared("d0", "m", common.ROLE_DECODE, "http://d0"))
            cluster.observe(now, "d0", Facts("1", FACTS.block_size), LoadReport())
            cluster.begin_call(now, "gw", SessionKey("", "other"), "m")

        def dropped(_: Cluster) -> bool:
            taken.extend(engine.take_directives())
            return DropSession("/s") in taken

        await until(second.plane, dropped)
        engine.close()
        await until(second.plane, lambda cluster: not is_ready(cluster))
    assert "pd-shadow-reporter" not in [thread.name for thread in threading.enumerate()]


async def test_an_older_life_is_refused_for_good_while_the_newer_one_serves() -> None:
    async with controller() as real:
        address, pauses = f"127.0.0.1:{real.port}", Pauses()
        with running(address, life="old", pause=pauses):
            await until(real.plane, is_ready)
            with running(address, life="new"):
                await until(real.plane, lambda cluster: p0(cluster).ref.incarnation == "new")  # type: ignore[union-attr]
                while await asyncio.to_thread(pauses.asked) < REFUSED_SECONDS / 2:
                    pauses.end()
                instance = p0(real.plane.cluster)
                assert instance is not None
                assert instance.ref.incarnation == "new"


def test_it_attaches_with_certificates_and_token_of_the_moment(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    ca_file, pair = trust(tmp_path, old), issue(old, tmp_path, "engine")
    token = write(tmp_path / "token", "wrong-token\n")
    leaf = new.issue_cert("controller.internal")
    script = Script()
    server = grpc.server(futures.ThreadPoolExecutor(4), interceptors=[Doorkeeper()])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(script, server)
    credentials = grpc.ssl_server_credentials(
        [(leaf.private_key_pem.bytes(), chain(leaf))], new.cert_pem.bytes(), require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    said: queue.Queue[str] = queue.Queue()

    def between_attempts(closing: threading.Event, seconds: float) -> None:
        said.put(one._said)
        turn.acquire()

    turn = threading.Semaphore(0)
    tls = ClientTls(ca_file=ca_file, server_name="controller.internal", **pair._asdict())
    settings = ReporterSettings(
        controller=f"127.0.0.1:{port}", name="p0", url="http://e", controller_tls=tls, controller_token_file=token
    )
    one = Reporter(settings, FACTS, life="1.0", serving=lambda url: True, pause=between_attempts)
    one.start()
    try:
        assert "UNAVAILABLE" in said.get(timeout=WAIT)
        trust(tmp_path, new)
        issue(new, tmp_path, "engine")
        turn.release()
        refusal = said.get(timeout=WAIT)
        assert "refused" in refusal
        assert "UNAUTHENTICATED" in refusal
        assert "wrong-token" not in refusal
        write(token, "right-token\n")
        turn.release()
        assert script.heard.get(timeout=WAIT).hello.ref.name == "p0"
    finally:
        turn.release()
        one.close()
        server.stop(None).wait()


class Doorkeeper(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets the right token pass."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if ("authorization", "Bearer right-token") in handler_call_details.invocation_metadata:
            return continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        )


def test_it_is_not_made_without_its_files(tmp_path: Path) -> None:
    settings = ReporterSettings(controller="c:1", name="p0", url="http://e", controller_token_file=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^controller_token_file: .*none: No such file"):
        Reporter(settings, FACTS)
