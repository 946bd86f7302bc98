"""One stock engine, watched over /health and /metrics; what every kind of discovery does with an instance it knows."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import aiohttp

from controller.config import DiscoveryConfig
from controller.core.instance import Facts, LoadReport
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.discovery import vllm_metrics
from controller.server.plane import Plane
from pd_shadow.common.logs import get_logger

log = get_logger("discovery")


def engine_session(config: DiscoveryConfig) -> aiohttp.ClientSession:
    """The HTTP session that looks go through."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=config.poll_timeout_seconds))


class EngineWatch:
    """Looks at a declared engine at a steady interval and tells the core what it saw."""

    def __init__(self, http: aiohttp.ClientSession, plane: Plane, interval_seconds: float, declared: Declared) -> None:
        self._http = http
        self._plane = plane
        self._interval = interval_seconds
        self._declared = declared
        # Somebody else says the engine is not ready: every look is missed unseen.
        self.held = False
        # The engine cannot have restarted: whatever says so answers at an address that was the engine's.
        self.pinned = False
        # Why the last look failed: said once, not at every look.
        self._trouble = ""
        # The context window of the incarnation seen last, which never changes within one.
        self._context_tokens: dict[str, int] = {}

    async def run(self) -> NoReturn:
        """Watch until cancelled."""
        while True:
            await self._turn()
            await asyncio.sleep(self._interval)

    async def _turn(self) -> None:
        name, trouble = self._declared.name, ""
        try:
            if self.held:
                raise ValueError("its pod is not ready")
            facts, load = await self.look()
            if self.held:
                raise ValueError("its pod became not ready")
            self._check_life(facts)
            with self._plane.turn() as (cluster, now):
                cluster.observe(now, name, facts, load)
        except (aiohttp.ClientError, TimeoutError, ValueError, ArithmeticError, RejectedError) as error:
            trouble = f"{type(error).__name__}: {error}"
            refused = self.held or isinstance(error, aiohttp.ClientConnectorError)
            with self._plane.turn() as (cluster, now):
                cluster.miss(now, name, refused=refused)
        if trouble and trouble != self._trouble:
            log.warning("instance_not_healthy", instance=name, detail=trouble)
        self._trouble = trouble

    async def look(self) -> tuple[Facts, LoadReport]:
        """One look; raises aiohttp.ClientError, TimeoutError or ValueError for an engine that is not healthy."""
        url, model = self._declared.url, self._declared.model
        async with self._http.get(f"{url}/health") as response:
            if response.status != 200:
                raise ValueError(f"/health answers {response.status}")
        async with self._http.get(f"{url}/metrics") as response:
            metrics = vllm_metrics.parse(await response.text())
        if metrics.process_start not in self._context_tokens:
            served = await self._served_models()
            if model not in served:
                raise ValueError(f"serves {', '.join(served) or 'nothing'}, not {model!r} as configured")
            self._context_tokens = {metrics.process_start: served[model]}
        facts = Facts(
            metrics.process_start,
            metrics.block_size,
            metrics.hash_algorithm,
            self._context_tokens[metrics.process_start],
        )
        load = LoadReport(
            metrics.running, metrics.waiting, metrics.kv_usage, metrics.failed_transfers, metrics.expired_exports
        )
        return facts, load

    def _check_life(self, facts: Facts) -> None:
        life = self._plane.cluster.registry.named(self._declared.name)
        if self.pinned and life is not None and life.facts.incarnation != facts.incarnation:
            raise ValueError(
                f"another process answers, begun {facts.incarnation}; "
                "it is taken once the API server says that the pod's container restarted"
            )

    async def _served_models(self) -> dict[str, int]:
        async with self._http.get(f"{self._declared.url}/v1/models") as response:
            body = await response.json()
        try:
            return {str(entry["id"]): int(entry.get("max_model_len") or 0) for entry in body["data"]}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"/v1/models has not the form of a vLLM server's ({error!r})") from error
