"""`pd-shadow admin top`: one screen of a cluster, live."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pd_shadow.api.v1 import admin_pb2 as pb
from pd_shadow.cli.admin import tables
from pd_shadow.cli.admin.client import AnswerError, Client
from pd_shadow.common.figures import as_percent

# Of each list: more than a screen holds.
INSTANCES, LINKS, JOBS = 40, 20, 20


class Look(NamedTuple):
    """What one look at a controller found."""

    address: str
    instances: list[Any]
    links: list[Any]
    jobs: list[Any]
    ledger: pb.GetLedgerResponse


def look(client: Client) -> Look:
    """Ask for everything once; raises AnswerError."""
    return Look(
        client.address,
        client.collect("ListInstances", pb.ListInstancesRequest(), "instances", INSTANCES)[0],
        client.collect("ListLinks", pb.ListLinksRequest(), "links", LINKS)[0],
        client.collect("ListShadowJobs", pb.ListShadowJobsRequest(), "jobs", JOBS)[0],
        client.call("GetLedger", pb.GetLedgerRequest()),
    )


def view(found: Look, trouble: str = "") -> RenderableType:
    """The screen; `trouble` says why it is not fresh."""
    shadow, calls, now = found.ledger.shadow, found.ledger.calls, found.ledger.in_flight
    hit = shadow.hit_tokens / shadow.prefilled_tokens if shadow.prefilled_tokens else None
    cached = calls.switch_cached_tokens / calls.switch_prompt_tokens if calls.switch_prompt_tokens else None
    return Group(
        Text(f"pd-shadow {found.address}  {trouble}", "bold red" if trouble else "bold"),
        Text(
            f"calls {calls.calls:,} ({now.calls} in flight), {calls.switches:,} switches, of whose prompts "
            f"{as_percent(cached)} cached; handed off {calls.handed_off:,}, recomputed {calls.recomputed:,}"
        ),
        Text(
            f"shadow tokens: {shadow.prefilled_tokens:,} prefilled = {shadow.hit_tokens:,} hit ({as_percent(hit)}) + "
            f"{shadow.wasted_tokens:,} wasted + {shadow.resident_tokens:,} resident; {shadow.pushed_tokens:,} pushed; "
            f"{now.shadow_legs} legs in flight"
        ),
        *(
            tables.table(listing.columns, rows)
            for listing, rows in (
                (tables.INSTANCES, found.instances),
                (tables.LINKS, found.links),
                (tables.JOBS, found.jobs),
            )
        ),
    )


def run(client: Client, console: Console, interval: float) -> None:
    """Look again and again until Ctrl-C. A controller that goes away is waited for, one that was never there is not:
    raises AnswerError.
    """
    found, trouble = look(client), ""
    if not console.is_terminal:
        # Nobody to draw a screen for: one look after the other.
        while True:
            console.print(view(found, trouble))
            found, trouble = _again(client, found, interval)
    with Live(view(found), console=console, screen=True, auto_refresh=False) as live:
        while True:
            found, trouble = _again(client, found, interval)
            live.update(view(found, trouble), refresh=True)


def _again(client: Client, before: Look, interval: float) -> tuple[Look, str]:
    """Another look after a while, or the one before and why it is old."""
    time.sleep(interval)
    try:
        return look(client), ""
    except AnswerError as error:
        return before, str(error)
