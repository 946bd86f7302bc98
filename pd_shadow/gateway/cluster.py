"""The gateway's last known view of the cluster, and placement by rendezvous hash when nobody else places."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence

from pd_shadow.api.v1 import common_pb2, placement_pb2

_DECODES = frozenset({common_pb2.ROLE_DECODE, common_pb2.ROLE_COLOCATED})


class ClusterView:
    """Models and instances as WatchCluster last told them; kept while the controller is away."""

    def __init__(self, default_block_size: int) -> None:
        self._default_block_size = default_block_size
        self._instances: tuple[placement_pb2.ClusterInstance, ...] = ()
        self._models: tuple[str, ...] = ()
        self._waiting: dict[asyncio.Future[None], common_pb2.InstanceRef] = {}

    def update(self, instances: Iterable[placement_pb2.ClusterInstance]) -> None:
        """Take a whole new view."""
        self._instances = tuple(instances)
        self._models = tuple(sorted({instance.model for instance in self._instances}))
        alive = {_life(i.endpoint.ref) for i in self._instances if i.state != common_pb2.INSTANCE_STATE_GONE}
        for lost, ref in self._waiting.items():
            if _life(ref) not in alive and not lost.done():
                lost.set_result(None)

    async def until_lost(self, ref: common_pb2.InstanceRef) -> None:
        """Wait until a new view shows that this life of an instance is over; one that is merely suspect is not."""
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lost] = ref
        try:
            await lost
        finally:
            del self._waiting[lost]

    @property
    def models(self) -> Sequence[str]:
        """Names of the models that have or had an instance."""
        return self._models

    def ready_models(self) -> dict[str, int]:
        """Models that can generate now, with their context window in tokens (0 if unknown)."""
        ready: dict[str, int] = {}
        for instance in self._ready(_DECODES):
            ready[instance.model] = max(ready.get(instance.model, 0), instance.max_context_tokens)
        return dict(sorted(ready.items()))

    def model_label(self, model: str) -> str:
        """The model's name as a metric label: callers cannot make new ones up."""
        return model if model in self._models else "unknown"

    def block_size(self, name: str) -> int:
        """KV block size of an instance in tokens, or the configured default."""
        sizes = (i.block_size for i in self._instances if i.endpoint.ref.name == name)
        return next(sizes, 0) or self._default_block_size

    def place(self, model: str, key: str) -> tuple[placement_pb2.Placement | None, placement_pb2.Placement] | None:
        """(P, D) for a call by rendezvous hash: the same key keeps its instances while they live.

        None if no instance can generate; P is None if only D is left, or if D is a colocated instance.
        """
        prefill = self._choose(model, key, frozenset({common_pb2.ROLE_PREFILL}))
        decode = self._choose(model, key, _DECODES)
        return None if decode is None else (prefill, decode)

    def _choose(self, model: str, key: str, roles: frozenset[int]) -> placement_pb2.Placement | None:
        ready = [instance for instance in self._ready(roles) if instance.model == model]
        if not ready:
            return None
        best = max(ready, key=lambda instance: _score(key, instance.endpoint.ref.name))
        reason = common_pb2.PLACEMENT_REASON_CONTROLLER_UNREACHABLE
        return placement_pb2.Placement(instance=best.endpoint, reason=reason, role=best.role)

    def _ready(self, roles: frozenset[int]) -> list[placement_pb2.ClusterInstance]:
        state = common_pb2.INSTANCE_STATE_READY
        return [instance for instance in self._instances if instance.state == state and instance.role in roles]


def _life(ref: common_pb2.InstanceRef) -> tuple[str, str]:
    return ref.name, ref.incarnation


def _score(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
