"""NIXL as the transport: UCX unless told otherwise, host memory or GPU memory.

Uses NIXL's bindings and not its Python class, which sets the progress thread's delay to zero (one spinning core per
agent, and on few cores notification times in milliseconds) and cannot pass options to a backend. Checked with
NIXL 1.5.1.
"""

import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from transfer.transport.base import (
    DescriptorList,
    Held,
    Indices,
    Memory,
    Message,
    Operation,
    PeerLostError,
    Region,
    Registration,
    Rows,
    Transfer,
    TransportError,
)

_ENVIRONMENT = threading.Lock()
_OPTION_PREFIXES = ("UCX_", "NIXL_")


@dataclass(frozen=True)
class NixlSettings:
    """How an agent is built. Raises ValueError naming the setting.

    `backend_options` go to the backend (`num_threads`, `ucx_error_handling_mode`, …); `environment` holds UCX_ and
    NIXL_ variables in force while the agent is built, e.g. UCX_TLS or UCX_NET_DEVICES.
    """

    backend: str = "UCX"
    backend_options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: Memory = Memory.DRAM
    progress_thread: bool = True
    """Whether NIXL advances transfers between our calls. A side that only sends does without: its courier polls while
    anything is in flight, and the thread would compete with the copies."""
    progress_delay_microseconds: int = 2000
    """The progress thread sleeps in poll() for up to this long and wakes for every event. Zero would spin."""

    def __post_init__(self) -> None:
        if not 1 <= self.progress_delay_microseconds <= 1_000_000:
            raise ValueError(
                f"progress_delay_microseconds: {self.progress_delay_microseconds} is not in 1…1000000 (0 spins)"
            )
        for name in self.environment:
            if not name.startswith(_OPTION_PREFIXES):
                raise ValueError(f"environment: {name} is not an option of UCX or NIXL ({', '.join(_OPTION_PREFIXES)})")


@contextmanager
def _environment(options: Mapping[str, str]) -> Iterator[None]:
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in options}
        os.environ.update(options)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


class NixlTransport:
    """One NIXL agent with one backend. Raises TransportError when NIXL is missing or the backend does not start."""

    def __init__(self, name: str, settings: NixlSettings | None = None) -> None:
        settings = settings or NixlSettings()
        self._name = name
        try:
            self._nixl: Any = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise TransportError(f"NIXL is not installed (pip install 'pd-shadow[transfer]'): {error}") from error
        self._segment = getattr(self._nixl, f"{settings.memory.value}_SEG")
        self._operations = {
            Operation.WRITE: self._nixl.NIXL_WRITE,
            Operation.READ: self._nixl.NIXL_READ,
        }
        self._registrations: dict[Registration, Any] = {}
        self._registered = 0
        self._lists: set[DescriptorList] = set()
        self._transfers: set[Transfer] = set()
        self._peers: set[str] = set()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = settings.progress_thread
        config.pthrDelay = settings.progress_delay_microseconds
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = False
        with _environment(settings.environment), self._translated():
            self._agent: Any = self._nixl.nixlAgent(name, config)
            if settings.backend not in self._agent.getAvailPlugins():
                raise TransportError(f"backend: NIXL has no {settings.backend}")
            self._backends = [self._agent.createBackend(settings.backend, dict(settings.backend_options))]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._nixl.nixlRemoteDisconnectError as error:
            raise PeerLostError(str(error)) from error
        except TransportError:
            raise
        # The bindings' errors share no base class of their own.
        except Exception as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> bytes:
        with self._translated():
            return bytes(self._agent.getLocalMD())

    def register(self, regions: Sequence[Region]) -> Registration:
        with self._translated():
            rows = [(region.address, region.length, region.device, "") for region in regions]
            descriptors = self._nixl.nixlRegDList(self._segment, rows)
            self._agent.registerMem(descriptors, self._backends)
        self._registered += 1
        registration = Registration(self._registered)
        self._registrations[registration] = descriptors
        return registration

    def deregister(self, registration: Registration) -> None:
        with self._translated():
            self._agent.deregisterMem(self._registrations[registration], self._backends)
        del self._registrations[registration]

    def connect(self, name: str, metadata: bytes) -> None:
        if name in self._peers:
            raise TransportError(f"{name} is connected already; disconnect it first")
        with self._translated():
            loaded = self._agent.loadRemoteMD(metadata)
            found = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            if found != name:
                if found not in self._peers:
                    self._agent.invalidateRemoteMD(found)
                raise TransportError(f"the metadata is that of {found}, not of {name}")
        self._peers.add(name)

    def disconnect(self, name: str) -> None:
        if name in self._peers:
            self._peers.discard(name)
            with self._translated():
                self._agent.invalidateRemoteMD(name)

    def prepare(self, rows: Rows, peer: str | None = None) -> DescriptorList:
        owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        with self._translated():
            handle = DescriptorList(self._agent.prepXferDlist(owner, self._segment, rows, self._backends))
        self._lists.add(handle)
        return handle

    def release_list(self, descriptors: DescriptorList) -> None:
        with self._translated():
            self._agent.releasedDlistH(descriptors)
        self._lists.discard(descriptors)

    def post(
        self,
        operation: Operation,
        local: tuple[DescriptorList, Indices],
        remote: tuple[DescriptorList, Indices],
    ) -> tuple[Transfer, bool]:
        with self._translated():
            handle = Transfer(
                self._agent.makeXferReq(
                    self._operations[operation], local[0], local[1], remote[0], remote[1], b"", self._backends, False
                )
            )
        self._transfers.add(handle)
        try:
            with self._translated():
                return handle, self._over(self._agent.postXferReq(handle, b""))
        except TransportError:
            # What cannot be released now is tried again by close().
            with suppress(TransportError):
                self.release(handle)
            raise

    def poll(self, transfer: Transfer) -> bool:
        with self._translated():
            return self._over(self._agent.getXferStatus(transfer))

    def _over(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise TransportError(f"the transfer failed: {status}")

    def release(self, transfer: Transfer) -> None:
        with self._translated():
            self._agent.releaseXferReq(transfer)
        self._transfers.discard(transfer)

    def send(self, peer: str, body: bytes) -> None:
        with self._translated():
            self._agent.genNotif(peer, body)

    def receive(self) -> list[Message]:
        with self._translated():
            arrived = self._agent.getNotifs({}, self._backends)
        return [Message(peer, body) for peer, bodies in arrived.items() for body in bodies]

    def held(self) -> Held:
        return Held(len(self._registrations), len(self._lists), len(self._transfers), len(self._peers))

    def close(self) -> None:
        if self._agent is None:
            return
        errors: list[TransportError] = []
        steps = [
            *((self.release, transfer) for transfer in list(self._transfers)),
            *((self.release_list, descriptors) for descriptors in list(self._lists)),
            *((self.disconnect, peer) for peer in list(self._peers)),
            *((self.deregister, registration) for registration in list(self._registrations)),
        ]
        for step, subject in steps:
            try:
                step(subject)  # type: ignore[operator]
            except TransportError as error:
                errors.append(error)
        # The last reference: the agent's destructor ends its threads and connections.
        self._agent = None
        if errors:
            raise TransportError(f"{len(errors)} resources were not released in order: {errors[0]}")
