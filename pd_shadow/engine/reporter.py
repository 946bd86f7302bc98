"""The engine core's side of EngineService.Attach: a thread that reports to the controller and takes its directives.

The engine's thread hands over plain values and never waits: not for the network, not for this thread. No prompt and no
token ever comes here. While the controller is away the engine serves on, and the thread tries again.
"""

import importlib.metadata
import logging
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import engine_pb2 as pb
from pd_shadow.api.v1.engine_pb2_grpc import EngineServiceStub
from pd_shadow.common.backoff import Backoff
from pd_shadow.common.config import ConfigError
from pd_shadow.common.controller_access import ControllerAccess
from pd_shadow.common.credential_files import CredentialError
from pd_shadow.engine import directives, session_tag
from pd_shadow.engine.directives import Directive, Directives
from pd_shadow.engine.incarnation import incarnation
from pd_shadow.engine.outbox import Outbox
from pd_shadow.engine.settings import ReporterSettings, Role
from pd_shadow.engine.snapshot import EngineFacts, EngineSnapshot

# vLLM's own logger, so that the lines come out where the engine's do.
log = logging.getLogger("vllm.pd_shadow.reporter")

REFUSED_SECONDS = 30.0
"""Wait after a refusal, which only a change of configuration or another engine's end can lift."""
SERVING_POLL_SECONDS = 0.5
EVENT_PAUSE_SECONDS = 0.05
"""Shortest time between two looks at what the engine said about sessions: it may say something in every step."""
MIN_LOAD_INTERVAL_SECONDS = 0.05
CLOSE_SECONDS = 2.0

_ROLES = {Role.PREFILL: common.ROLE_PREFILL, Role.DECODE: common.ROLE_DECODE, Role.COLOCATED: common.ROLE_COLOCATED}
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


def is_serving(url: str) -> bool:
    """Whether the HTTP server at a base URL answers /health; proxies of the environment are not for it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


@dataclass
class _Stream:
    """One attempt."""

    interval_seconds: float = math.inf
    welcomed: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class Reporter:
    """Made, fed and closed by the engine's thread.

    `serving(url)` says whether the engine's HTTP server answers: it starts after the engine core, and no gateway should
    hear of the engine before. `pause(event, seconds)` waits between attempts, and ends early when the event is set.
    Raises CredentialError when a certificate or token file of the settings is unusable.
    """

    def __init__(
        self,
        settings: ReporterSettings,
        facts: EngineFacts,
        *,
        life: str | None = None,
        backoff: Backoff | None = None,
        serving: Callable[[str], bool] = is_serving,
        pause: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._access = ControllerAccess(
            settings.controller, settings.controller_tls, settings.controller_token_file, on_stale=_stale
        )
        self._life = incarnation() if life is None else life
        self._version = importlib.metadata.version("pd-shadow")
        self._backoff = Backoff() if backoff is None else backoff
        self._serving = serving
        self._pause = pause
        self._snapshot = EngineSnapshot()
        self._outbox = Outbox()
        self._directives = Directives()
        self._wake = threading.Event()
        self._closing = threading.Event()
        # Ends the attempt under way.
        self._cancel: Callable[[], object] | None = None
        # What was said last about not being attached, so that it is said once.
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="pd-shadow-reporter", daemon=True)

    def start(self) -> None:
        """Begin to attach."""
        self._thread.start()

    def close(self) -> None:
        """Detach and end the thread; returns within CLOSE_SECONDS."""
        self._closing.set()
        cancel = self._cancel
        if cancel is not None:
            cancel()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    # The engine's thread.

    def publish(self, snapshot: EngineSnapshot) -> None:
        """What the next load report says."""
        self._snapshot = snapshot

    def progress(self, session: str, covered_tokens: int) -> None:
        """The session's shadow leg covers so many tokens now; `session` is its tag."""
        self._outbox.put(session, covered_tokens, evicted=False)
        self._wake.set()

    def evicted(self, session: str, remaining_tokens: int) -> None:
        """Blocks of the session's context were given up; so many tokens, from the beginning, remain."""
        self._outbox.put(session, remaining_tokens, evicted=True)
        self._wake.set()

    def cache_reset(self) -> None:
        """The whole prefix cache was cleared."""
        self._outbox.reset()
        self._wake.set()

    def take_directives(self) -> list[Directive]:
        """What the controller wants, each directive once."""
        return self._directives.take()

    # The reporter's thread.

    def _run(self) -> None:
        while not self._serving(self._settings.url):
            self._say(f"waits until {self._settings.url}/health answers")
            if self._closing.wait(SERVING_POLL_SECONDS):
                return
        while not self._closing.is_set():
            try:
                seconds = self._attach()
            except Exception:
                log.exception("PD-Shadow reporter: attempt failed")
                seconds = self._backoff.next()
            if not self._closing.is_set():
                self._pause(self._closing, seconds)

    def _attach(self) -> float:
        """One stream from Hello to its end; returns the seconds to wait for the next."""
        stream = _Stream()
        # A channel of its own, because one that failed would keep a backoff and certificates of its own.
        with self._access.channel() as channel:
            call = EngineServiceStub(channel).Attach(self._requests(stream), metadata=self._access.metadata())
            self._cancel = call.cancel
            try:
                if self._closing.is_set():
                    return 0.0
                for response in call:
                    self._take(response, stream)
                why = "the controller ended the stream"
            except grpc.RpcError as error:
                why = _reason(error)
                if error.code() in _REFUSALS:
                    self._say(f"refused by {self._settings.controller}: {why}")
                    return self._backoff.jitter(REFUSED_SECONDS)
            finally:
                self._cancel = None
                stream.ended.set()
                stream.welcomed.set()
                self._wake.set()
        if not self._closing.is_set():
            self._say(f"controller {self._settings.controller} is away: {why}")
        return self._backoff.next()

    def _take(self, response: pb.AttachResponse, stream: _Stream) -> None:
        if response.WhichOneof("directive") == "welcome":
            stream.interval_seconds = max(MIN_LOAD_INTERVAL_SECONDS, response.welcome.load_interval_seconds)
            stream.welcomed.set()
            self._backoff.reset()
            self._say(f"attached to {self._settings.controller} as {self._settings.name}", level=logging.INFO)
            return
        try:
            directive = directives.directive(response)
        except (ConfigError, ValueError) as error:
            log.warning("PD-Shadow reporter: directive ignored: %s", error)
            return
        if directive is not None:
            self._directives.put(directive)

    def _requests(self, stream: _Stream) -> Iterator[pb.AttachRequest]:
        """What goes up, for as long as the stream lasts; runs in a thread of gRPC's."""
        yield pb.AttachRequest(hello=self._hello())
        stream.welcomed.wait()
        due = time.monotonic()
        while not stream.ended.is_set():
            if time.monotonic() >= due:
                yield pb.AttachRequest(load=_load(self._snapshot))
                due = time.monotonic() + stream.interval_seconds
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            if stream.ended.is_set():
                return
            news = self._news()
            if news:
                yield from news
                stream.ended.wait(EVENT_PAUSE_SECONDS)

    def _news(self) -> list[pb.AttachRequest]:
        news = self._outbox.take()
        messages = []
        if news.cache_reset:
            messages.append(pb.AttachRequest(event=pb.EngineEvent(kind=pb.ENGINE_EVENT_KIND_CACHE_RESET)))
        for session, tokens, evicted in news.coverage:
            key = _key(session)
            if key is None:
                continue
            if evicted:
                event = pb.EngineEvent(kind=pb.ENGINE_EVENT_KIND_SESSION_EVICTED, session=key, tokens=tokens)
                messages.append(pb.AttachRequest(event=event))
            else:
                progress = pb.ShadowProgress(session=key, covered_tokens=tokens)
                messages.append(pb.AttachRequest(shadow_progress=progress))
        return messages

    def _hello(self) -> pb.Hello:
        settings, facts = self._settings, self._facts
        named = [(_key(session), tokens) for session, tokens in self._outbox.resident().items()]
        return pb.Hello(
            ref=common.InstanceRef(name=settings.name, incarnation=self._life),
            role=_ROLES[facts.role],
            model=facts.model,
            url=settings.url,
            block_size=facts.block_size,
            hash_algorithm=facts.hash_algorithm,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            max_context_tokens=facts.max_context_tokens,
            hardware=settings.hardware,
            plugin_version=self._version,
            vllm_version=facts.vllm_version,
            resident_sessions=[
                pb.ResidentSession(session=key, tokens=tokens) for key, tokens in named if key is not None
            ],
        )

    def _say(self, message: str, level: int = logging.WARNING) -> None:
        if message != self._said:
            self._said = message
            log.log(level, "PD-Shadow reporter: %s", message)


def _stale(error: CredentialError) -> None:
    log.warning("PD-Shadow reporter: the older credential stays in use: %s", error)


def _load(snapshot: EngineSnapshot) -> pb.Load:
    values = snapshot._asdict()
    if math.isinf(snapshot.slack_seconds):
        del values["slack_seconds"]
    values["step_reason"] = common.StepReason.Value(f"STEP_REASON_{snapshot.step_reason.name}")
    return pb.Load(**values)


def _key(tag: str) -> common.SessionKey | None:
    """The session a tag names; None for a tag that is not the gateway's."""
    try:
        return common.SessionKey(**session_tag.decode(tag)._asdict())
    except ValueError:
        return None


def _reason(error: grpc.RpcError) -> str:
    """The status, what was said about it, and the API's reason if it carries one."""
    said = f"{error.code().name}: {error.details()}"
    status = rpc_status.from_call(cast(grpc.Call, error))
    info = error_details_pb2.ErrorInfo()
    if status is not None and any(detail.Unpack(info) for detail in status.details):
        said += f" ({info.reason})"
    return said
