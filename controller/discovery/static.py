"""Static discovery: stock engines named in the configuration."""

from __future__ import annotations

import asyncio

from controller.config import DiscoveryConfig
from controller.core.registry import Declared
from controller.discovery.engine_watch import EngineWatch, engine_session
from controller.discovery.roles import ROLES
from controller.server.plane import Plane


class StaticDiscovery:
    """Declares every configured engine and watches it."""

    def __init__(self, config: DiscoveryConfig, plane: Plane) -> None:
        self._config = config
        self._plane = plane

    async def run(self) -> None:
        """Watch until cancelled."""
        declared = [Declared(i.name, i.model, ROLES[i.role], i.url, hardware=i.hardware) for i in self._config.static]
        for instance in declared:
            with self._plane.turn() as (cluster, _):
                cluster.declare(instance)
        async with engine_session(self._config) as http, asyncio.TaskGroup() as tasks:
            for instance in declared:
                watch = EngineWatch(http, self._plane, self._config.poll_interval_seconds, instance)
                tasks.create_task(watch.run(), name=f"watch {instance.name}")
