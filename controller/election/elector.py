"""The election at work: reads and writes the Lease in time, and says when leadership comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from controller.config import RETRY_JITTER, ElectionConfig
from controller.election.election import Election, Record
from controller.kubernetes.access import Access
from controller.kubernetes.api import CONFLICT, Api, ApiError, Json
from pd_shadow.common.logs import get_logger

_RELEASE_SECONDS = 2.0

log = get_logger("election")


class Elector:
    """A candidate; `changed` is awaited with True when it begins to lead and with False when it no longer does.

    `now` and `sleep` are the clock, monotonic, in seconds; `rng` gives 0 to 1.
    """

    def __init__(
        self,
        config: ElectionConfig,
        access: Access,
        changed: Callable[[bool], Awaitable[None]],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """Raises AccessError when no namespace is given and this process is in none."""
        self._config = config
        self._namespace = access.namespace("election.namespace", config.namespace)
        self._election = Election(config, config.identity or f"{socket.gethostname()}_{uuid.uuid4()}")
        self._api = Api(access)
        self._changed = changed
        self._now = now
        self._sleep = sleep
        self._rng = rng
        self._told = False
        self._trouble = ""
        self._holder = ""

    @property
    def identity(self) -> str:
        return self._election.identity

    def leading(self) -> bool:
        """Whether this process leads now; False from the deadline on, whether or not anybody noticed."""
        return self._election.leading(self._now())

    async def run(self) -> None:
        """Stand for election until cancelled; then let others have the Lease at once."""
        async with self._api:
            try:
                while True:
                    await self._try_in_time()
                    await self._tell()
                    await self._sleep(self._until_next_try())
                    await self._tell()
            finally:
                await self._release()

    def _left(self) -> float:
        """Seconds until this process must step down; while it does not lead, as many as it would have."""
        deadline = self._election.step_down_at
        return self._config.renew_deadline_seconds if deadline is None else max(0.0, deadline - self._now())

    def _until_next_try(self) -> float:
        if self._told:
            return min(self._config.retry_period_seconds, self._left())
        # Candidates must not all come at the same time.
        return self._config.retry_period_seconds * (1 + (RETRY_JITTER - 1) * self._rng())

    async def _try_in_time(self) -> None:
        """Try to get or keep the Lease, no longer than this process may lead: an API server may never answer."""
        trying = asyncio.ensure_future(self._try())
        alarm = asyncio.ensure_future(self._sleep(self._left()))
        try:
            await asyncio.wait({trying, alarm}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (trying, alarm):
                task.cancel()
            await asyncio.gather(trying, alarm, return_exceptions=True)
        if not trying.cancelled():
            trying.result()

    async def _try(self) -> None:
        trouble = ""
        try:
            await self._acquire_or_renew()
        except ApiError as error:
            if error.status != CONFLICT:
                trouble = str(error)
        if trouble and trouble != self._trouble:
            log.warning("lease_not_reachable", lease=self._config.lease_name, detail=trouble)
        self._trouble = trouble
        if self._election.holder != self._holder:
            self._holder = self._election.holder
            log.info("leader_seen", holder=self._holder or "nobody")

    async def _acquire_or_renew(self) -> None:
        found = await self._api.get_lease(self._namespace, self._config.lease_name)
        claim = self._election.claim(self._now(), None if found is None else _record(found), _wall())
        if claim is None:
            return
        sent_at = self._now()
        if found is None:
            meta = {"name": self._config.lease_name, "namespace": self._namespace}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": _spec(claim)}
            await self._api.create_lease(self._namespace, lease)
        else:
            await self._api.update_lease(self._namespace, _with(found, claim))
        self._election.written(sent_at, claim)

    async def _tell(self) -> None:
        """Act upon what is so now."""
        leading = self.leading()
        if not leading:
            self._election.step_down()
        if leading != self._told:
            self._told = leading
            log.info("leadership_began" if leading else "leadership_ended", identity=self.identity)
            await self._changed(leading)

    async def _release(self) -> None:
        if not self._told:
            return
        self._told = False
        await self._changed(False)
        # The others wait for the Lease's end if this fails.
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                while not await self._released():
                    pass

    async def _released(self) -> bool:
        """Give up the Lease as it is now: a renewal that was cut off may have been written, or is being written yet."""
        lease = await self._api.get_lease(self._namespace, self._config.lease_name)
        record = None if lease is None else self._election.release(_record(lease), _wall())
        if lease is None or record is None:
            return True
        try:
            await self._api.update_lease(self._namespace, _with(lease, record))
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            return False
        return True


def _record(lease: Json) -> Record:
    spec: Any = lease.get("spec", {})
    try:
        return Record(
            str(spec.get("holderIdentity") or ""),
            int(spec.get("leaseDurationSeconds") or 0),
            str(spec.get("acquireTime") or ""),
            str(spec.get("renewTime") or ""),
            int(spec.get("leaseTransitions") or 0),
        )
    except (TypeError, ValueError) as error:
        raise ApiError(0, f"the Lease's spec has another form than expected: {error}") from error


def _with(lease: Json, record: Record) -> Json:
    """The Lease with this record; its metadata, and so the version it must still have, as read."""
    return {**lease, "spec": {**lease.get("spec", {}), **_spec(record)}}


def _spec(record: Record) -> Json:
    return {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": record.duration_seconds,
        "acquireTime": record.acquired,
        "renewTime": record.renewed,
        "leaseTransitions": record.transitions,
    }


def _wall() -> str:
    """A MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
