"""Static discovery: stock engines named in the configuration, watched over /health and /metrics."""

from __future__ import annotations

import asyncio

import aiohttp

from controller.config import DiscoveryConfig, StaticInstance
from controller.core.instance import Facts, LoadReport
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.discovery import vllm_metrics
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.logs import get_logger

log = get_logger("discovery")

_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "colocated": pb.ROLE_COLOCATED}


class StaticDiscovery:
    """Looks at every declared engine at a steady interval and tells the core what it saw."""

    def __init__(self, config: DiscoveryConfig, plane: Plane) -> None:
        self._config = config
        self._plane = plane
        # Why an instance's last look failed: said once, not at every look.
        self._trouble: dict[str, str] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        for instance in self._config.static:
            with self._plane.turn() as (cluster, _):
                declared = Declared(
                    instance.name,
                    instance.model,
                    _ROLES[instance.role],
                    instance.url,
                    hardware=instance.hardware,
                )
                cluster.declare(declared)
        timeout = aiohttp.ClientTimeout(total=self._config.poll_timeout_seconds)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as tasks:
            for instance in self._config.static:
                tasks.create_task(self._watch(http, instance), name=f"watch {instance.name}")

    async def _watch(self, http: aiohttp.ClientSession, instance: StaticInstance) -> None:
        context_tokens: dict[str, int] = {}
        while True:
            trouble = ""
            try:
                facts, load = await self.look(http, instance, context_tokens)
                with self._plane.turn() as (cluster, now):
                    cluster.observe(now, instance.name, facts, load)
            except (aiohttp.ClientError, TimeoutError, ValueError, RejectedError) as error:
                trouble = f"{type(error).__name__}: {error}"
                with self._plane.turn() as (cluster, now):
                    cluster.miss(now, instance.name, refused=isinstance(error, aiohttp.ClientConnectorError))
            if trouble and self._trouble.get(instance.name) != trouble:
                log.warning("instance_not_healthy", instance=instance.name, detail=trouble)
            self._trouble[instance.name] = trouble
            await asyncio.sleep(self._config.poll_interval_seconds)

    async def look(
        self, http: aiohttp.ClientSession, instance: StaticInstance, context_tokens: dict[str, int]
    ) -> tuple[Facts, LoadReport]:
        """One look; `context_tokens` remembers the context window per incarnation, which never changes within one."""
        async with http.get(f"{instance.url}/health") as response:
            if response.status != 200:
                raise ValueError(f"/health answers {response.status}")
        async with http.get(f"{instance.url}/metrics") as response:
            metrics = vllm_metrics.parse(await response.text())
        if metrics.process_start not in context_tokens:
            served = await self._served_models(http, instance)
            if instance.model not in served:
                raise ValueError(f"serves {', '.join(served) or 'nothing'}, not {instance.model!r} as configured")
            context_tokens.clear()
            context_tokens[metrics.process_start] = served[instance.model]
        facts = Facts(
            metrics.process_start, metrics.block_size, metrics.hash_algorithm, context_tokens[metrics.process_start]
        )
        load = LoadReport(
            metrics.running, metrics.waiting, metrics.kv_usage, metrics.failed_transfers, metrics.expired_exports
        )
        return facts, load

    async def _served_models(self, http: aiohttp.ClientSession, instance: StaticInstance) -> dict[str, int]:
        async with http.get(f"{instance.url}/v1/models") as response:
            body = await response.json()
        return {entry["id"]: int(entry.get("max_model_len") or 0) for entry in body.get("data", [])}
