"""How many tokens of KV a D instance received, from its own NIXL counters.

No engine reports this per request, so a reading is taken before and after a call and counts only if at most one
transfer ended in between: that one is then the call's own.
"""

import re
from dataclasses import dataclass

import aiohttp

_SAMPLE = re.compile(r"^vllm:nixl_bytes_transferred_(sum|count)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Reading:
    """Totals since the engine started."""

    transfers: int
    bytes: float


async def read(http: aiohttp.ClientSession, engine_url: str) -> Reading:
    """One look at the engine's /metrics. Raises aiohttp.ClientError if it cannot be had."""
    async with http.get(f"{engine_url}/metrics") as response:
        response.raise_for_status()
        return parse(await response.text())


def parse(metrics: str) -> Reading:
    """The totals in a Prometheus text page; zero where the engine has not received anything yet."""
    found = {"sum": 0.0, "count": 0.0}
    for name, value in _SAMPLE.findall(metrics):
        found[name] += float(value)
    return Reading(int(found["count"]), found["sum"])


def tokens_between(before: Reading, after: Reading, bytes_per_token: int) -> int | None:
    """Tokens received between two readings; None when more than one transfer ended in between."""
    if after.transfers - before.transfers > 1:
        return None
    return round((after.bytes - before.bytes) / bytes_per_token)
