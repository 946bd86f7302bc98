"""Links that fail, and their quarantine.

A link is one pair of lives (P, D): only that pair shares the configuration, the network path and the handshake that a
transfer needs. Counting by D alone would take a D from service for what one P does to it; counting by P, the reverse.
A link of which nothing bad is known is not remembered, and a new life of either side begins with a clean link.

What counts is what only the link can explain, between two engines that are both ready when it is reported: a call whose
D had the parameters and yet computed the prompt (TRANSFER_FAILED), and a fetch that failed, timed out, or whose KV did
not arrive. Of a P leg that failed or gave no parameters P is to blame; of an engine that is away, its own state says
so; a dispatcher's silence says nothing.

Rules:

- `quarantine_after_failures` in a row put a link in quarantine; every failed probe doubles its time.
- When the time is up, one probe is let through, a call or the next chunk of a shadow; the link stays closed to others.
- KV that arrives over a link lifts its quarantine, whoever moved it. Failures of what began before the quarantine say
  nothing new; only the probe's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from controller.config import LinksConfig
from controller.core.instance import READY, Instance, InstanceRef
from pd_shadow.api.v1 import common_pb2 as pb

# A few failing links are the exception; the one that failed longest ago is forgotten beyond this many.
LINKS_KEPT = 10_000


class LinkKey(NamedTuple):
    prefill: InstanceRef
    decode: InstanceRef


@dataclass(eq=False)
class Link:
    """What is known of one pair with failures; seconds are the core's."""

    key: LinkKey
    model: str
    failures: int = 0
    # The length of the quarantine; 0 while there is none.
    seconds: float = 0.0
    until: float = 0.0
    # The call or shadow job that may use the link to see whether it works again.
    probe: object | None = None

    @property
    def quarantined(self) -> bool:
        return self.seconds > 0

    @property
    def state(self) -> pb.LinkState.ValueType:
        if not self.quarantined:
            return pb.LINK_STATE_FAILING
        return pb.LINK_STATE_QUARANTINED if self.probe is None else pb.LINK_STATE_PROBING


class Links:
    """The links that failed lately. `changed` hears of every change of a quarantine, in words."""

    def __init__(self, config: LinksConfig, changed: Callable[[Link, pb.LinkState.ValueType, str], None]) -> None:
        self._config = config
        self._changed = changed
        self._links: dict[LinkKey, Link] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def __len__(self) -> int:
        return len(self._links)

    def get(self, prefill: Instance, decode: Instance) -> Link | None:
        return self._links.get(LinkKey(prefill.ref, decode.ref)) if self._links else None

    def into(self, decode: Instance) -> list[Link]:
        """The links to a D that failed lately, by the name of their P."""
        return sorted(
            (link for key, link in self._links.items() if key.decode == decode.ref), key=lambda link: link.key
        )

    def usable(self, now: float, prefill: Instance, decode: Instance) -> bool:
        """Whether something may go over the link now: it is in no quarantine, or its probe is due."""
        link = self.get(prefill, decode)
        return link is None or not link.quarantined or (link.probe is None and now >= link.until)

    def of_prefill(self, now: float, decodes: list[Instance]) -> Callable[[Instance], bool] | None:
        """Whether a P has a usable link to any of these D; None when all links are good."""
        return (lambda prefill: any(self.usable(now, prefill, d) for d in decodes)) if self._links else None

    def of_decode(self, now: float, prefill: Instance | None) -> Callable[[Instance], bool] | None:
        """Whether a D has a usable link from this P; None when all links are good, or no P is there."""
        if prefill is None or not self._links:
            return None
        return lambda decode: self.usable(now, prefill, decode)

    def begin(self, now: float, prefill: Instance, decode: Instance, user: object) -> None:
        """A call or shadow job is about to use the link; it is the probe if one is due."""
        link = self.get(prefill, decode)
        if link is not None and link.quarantined and link.probe is None and now >= link.until:
            link.probe = user
            self._changed(link, link.state, f"a probe after {link.seconds:g} s")

    def succeeded(self, prefill: Instance, decode: Instance) -> None:
        """KV arrived."""
        link = self._links.pop(LinkKey(prefill.ref, decode.ref), None)
        if link is not None and link.quarantined:
            self._changed(link, pb.LINK_STATE_OPEN, "KV arrived")

    def failed(self, now: float, prefill: Instance, decode: Instance, user: object) -> None:
        """KV did not arrive."""
        if prefill.state != READY or decode.state != READY:
            return
        key = LinkKey(prefill.ref, decode.ref)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = Link(key, prefill.model)
            if len(self._links) > LINKS_KEPT:
                del self._links[next(iter(self._links))]
        if link.quarantined and link.probe is not user:
            return
        link.failures += 1
        if link.quarantined:
            self._close(now, link, min(2 * link.seconds, self._config.max_quarantine_seconds))
        elif link.failures >= self._config.quarantine_after_failures:
            self._close(now, link, self._config.quarantine_seconds)

    def ended(self, prefill: Instance, decode: Instance, user: object) -> None:
        """A user is done with the link; a probe that proved nothing leaves its turn to another."""
        link = self.get(prefill, decode)
        if link is not None and link.probe is user:
            link.probe = None

    def forget(self, instance: Instance) -> None:
        """A life is over, and its links with it."""
        for key in [key for key in self._links if instance.ref in key]:
            del self._links[key]

    def _close(self, now: float, link: Link, seconds: float) -> None:
        link.seconds, link.until, link.probe = seconds, now + seconds, None
        self._changed(link, link.state, f"{link.failures} failures in a row; closed for {seconds:g} s")
