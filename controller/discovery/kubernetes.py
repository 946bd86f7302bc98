"""Kubernetes discovery: pods with a role label are instances, each watched like any other stock engine.

What the API server says decides which instances there are, what /health and /metrics say decides how they are. An API
server that cannot be reached changes neither: known pods are looked at as before, only nothing takes their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from controller.config import DiscoveryConfig
from controller.discovery import pods
from controller.discovery.engine_watch import EngineWatch, engine_session
from controller.discovery.pods import Pod, Pods, Standing, Target
from controller.kubernetes.access import Access
from controller.kubernetes.api import Api, ApiError, WatchEvent
from controller.server.plane import Plane
from pd_shadow.common.backoff import Backoff
from pd_shadow.common.logs import get_logger

# A watch that lasted this long was no failure, even if nothing happened.
_LASTING_SECONDS = 5.0
_MAX_RETRY_AFTER_SECONDS = 60.0

log = get_logger("discovery.kubernetes")


@dataclass
class _Watched:
    target: Target
    watch: EngineWatch
    task: asyncio.Task[None]


@dataclass
class _Feed:
    """One namespace: where its watch goes on from, and whether the API server tells of it now."""

    namespace: str
    backoff: Backoff = field(default_factory=Backoff)
    # Empty: a list comes first.
    version: str = ""
    reachable: bool = False
    trouble: str = ""


class KubernetesDiscovery:
    """Follows the pods of the configured namespaces; `sleep` waits between tries."""

    def __init__(
        self,
        config: DiscoveryConfig,
        access: Access,
        plane: Plane,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises AccessError when no namespace is given and this process is in none."""
        self._config = config
        self._api = Api(access)
        self._plane = plane
        self._sleep = sleep
        given = config.kubernetes.namespaces
        namespaces = given or (access.namespace("discovery.kubernetes.namespaces", None),)
        self._feeds = {namespace: _Feed(namespace) for namespace in namespaces}
        self._pods = Pods(qualified=len(namespaces) > 1, reserved={instance.name for instance in config.static})
        self._watched: dict[str, _Watched] = {}
        # Instances drained because their pods end; the others are operators' business.
        self._drained: set[str] = set()
        self._mistakes: dict[str, str] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        async with self._api, engine_session(self._config) as http, asyncio.TaskGroup() as tasks:
            for feed in self._feeds.values():
                tasks.create_task(self._follow(feed, http, tasks), name=f"pods of {feed.namespace}")

    async def _follow(self, feed: _Feed, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        while True:
            began, wait = self._plane.now(), 0.0
            try:
                await self._list_and_watch(feed, http, tasks)
            except ApiError as error:
                if not error.passing:
                    feed.version = ""
                self._set_reachable(feed, str(error))
                wait = min(error.retry_after, _MAX_RETRY_AFTER_SECONDS)
            if self._plane.now() - began >= _LASTING_SECONDS:
                feed.backoff.reset()
            await self._sleep(max(wait, feed.backoff.next()))

    async def _list_and_watch(self, feed: _Feed, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        selector = self._config.kubernetes.label_selector
        if not feed.version:
            listing = await self._api.list_pods(feed.namespace, selector)
            found = [_read(item) for item in listing.items]
            self._pods.replace(feed.namespace, [pod for pod in found if pod is not None], listing.version)
            self._reconcile(http, tasks)
            feed.version = listing.version
        async with self._api.watch_pods(feed.namespace, selector, feed.version) as events:
            self._set_reachable(feed, "")
            async for event in events:
                feed.backoff.reset()
                if self._take(event):
                    self._reconcile(http, tasks)
                feed.version = event.version or feed.version

    def _set_reachable(self, feed: _Feed, trouble: str) -> None:
        """Say it once when the API server goes, or goes for another reason, and when it comes back."""
        if trouble and trouble != feed.trouble:
            log.warning("api_server_unreachable", namespace=feed.namespace, detail=trouble)
        if feed.trouble and not trouble:
            log.info("api_server_reachable", namespace=feed.namespace)
        feed.trouble, feed.reachable = trouble, not trouble
        for watched in self._watched.values():
            if watched.target.namespace == feed.namespace:
                self._pin(watched)

    def _take(self, event: WatchEvent) -> bool:
        """Whether the event may change an instance; bookmarks only say how far the watch is."""
        if event.kind not in ("ADDED", "MODIFIED", "DELETED"):
            return False
        pod = _read(event.object)
        if pod is None:
            return False
        if event.kind == "DELETED":
            self._pods.remove(pod)
        else:
            self._pods.put(pod)
        return True

    def _reconcile(self, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        """Make the watched instances those that the pods are now."""
        view = self._pods.view()
        for name, watched in list(self._watched.items()):
            target = view.targets.get(name)
            # Another pod, or a pod that is another instance now.
            if target is None or (target.uid, target.declared) != (watched.target.uid, watched.target.declared):
                self._drop(name)
        for name in self._drained - view.targets.keys():
            life = self._plane.cluster.registry.named(name)
            if life is None or not life.alive:
                self._undrain(name)
        for name, target in view.targets.items():
            known = self._watched.get(name)
            if known is None:
                known = self._watched[name] = self._begin(target, http, tasks)
            elif target.restarts != known.target.restarts:
                # Whether it is another life is for /metrics to say, which a sidecar's restart does not change.
                with self._plane.turn() as (cluster, now):
                    cluster.miss(now, name, refused=True)
            known.target = target
            self._stand(known)
        for name, error in view.mistakes.items():
            if self._mistakes.get(name) != error.message:
                with self._plane.turn() as (cluster, now):
                    cluster.turn_away(now, name, error)
        self._mistakes = {name: error.message for name, error in view.mistakes.items()}

    def _begin(self, target: Target, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> _Watched:
        name = target.declared.name
        with self._plane.turn() as (cluster, _):
            cluster.declare(target.declared)
        watch = EngineWatch(http, self._plane, self._config.poll_interval_seconds, target.declared)
        return _Watched(target, watch, tasks.create_task(watch.run(), name=f"watch {name}"))

    def _drop(self, name: str) -> None:
        self._watched.pop(name).task.cancel()
        with self._plane.turn() as (cluster, now):
            cluster.withdraw(now, name)

    def _stand(self, watched: _Watched) -> None:
        """Let the instance be used for what its pod may be used for."""
        name, standing = watched.target.declared.name, watched.target.standing
        life = self._plane.cluster.registry.named(name)
        alive = life is not None and life.alive
        # A terminating pod that nobody has seen healthy will not become an instance any more.
        held = standing is Standing.UNREADY or (standing is Standing.TERMINATING and not alive)
        if held and not watched.watch.held:
            with self._plane.turn() as (cluster, now):
                cluster.miss(now, name, refused=True)
        watched.watch.held = held
        self._pin(watched)
        if standing is not Standing.TERMINATING:
            self._undrain(name)
        elif life is not None and life.alive and not life.leaving:
            self._drained.add(name)
            with self._plane.turn() as (cluster, now):
                cluster.mark_leaving(now, name, leaving=True)

    def _pin(self, watched: _Watched) -> None:
        target = watched.target
        watched.watch.pinned = target.standing is Standing.TERMINATING or not self._feeds[target.namespace].reachable

    def _undrain(self, name: str) -> None:
        if name in self._drained:
            self._drained.discard(name)
            with self._plane.turn() as (cluster, now):
                cluster.mark_leaving(now, name, leaving=False)


def _read(item: object) -> Pod | None:
    try:
        return pods.read(item)
    except (TypeError, ValueError) as error:
        log.warning("pod_not_understood", detail=str(error))
        return None
