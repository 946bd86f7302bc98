"""The figures of the control plane's benchmark: as data, and as a table."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pd_shadow.bench.control_plane import Core, Plan, Served
from pd_shadow.common.figures import percentile

Figures = dict[str, Any]
DECISIONS_LEAST = 50_000.0
BEGIN_P50_MS_MOST, BEGIN_P99_MS_MOST = 0.5, 3.0
BYTES_MOST = 2_048.0
LENGTH_RATIO_MOST = 0.1
"""How far the ratio of long to short prompts may be from 1."""


def build(plan: Plan, core: Core, served: Sequence[Served], bytes_per_session: float) -> Figures:
    """Medians over repetitions, each with its spread; milliseconds, bytes, decisions and calls per second."""
    inside = {name: _spread([_ms(one.inside_s, q) for one in served]) for name, q in _PERCENTILES.items()}
    client = {name: _spread([_ms(one.client_s, q) for one in served]) for name, q in _PERCENTILES.items()}
    ratio = _spread([long / short for short, long in zip(core.short_begin_s, core.long_begin_s, strict=True)])
    decisions = _spread(core.decisions_per_s)
    cycles = _spread([one.calls_per_s for one in served])
    return {
        "config": dataclasses.asdict(plan),
        "seed": plan.seed,
        "decisions_per_s": decisions["median"],
        "begin_call_ms": {name: spread["median"] for name, spread in inside.items()},
        "begin_call_client_ms": {name: spread["median"] for name, spread in client.items()},
        "bytes_per_session": bytes_per_session,
        "length_ratio": ratio["median"],
        "calls_per_s": cycles["median"],
        "calls_left": sum(one.calls_left for one in served),
        "spread": {
            "decisions_per_s": decisions,
            "begin_call_ms": inside,
            "begin_call_client_ms": client,
            "length_ratio": ratio,
            "calls_per_s": cycles,
        },
        "verdicts": {
            "decisions_per_s": decisions["median"] >= DECISIONS_LEAST,
            "begin_call_p50": inside["p50"]["median"] <= BEGIN_P50_MS_MOST,
            "begin_call_p99": inside["p99"]["median"] <= BEGIN_P99_MS_MOST,
            "independent_of_length": abs(ratio["median"] - 1) <= LENGTH_RATIO_MOST,
            "bytes_per_session": bytes_per_session <= BYTES_MOST,
            "no_call_left": not any(one.calls_left for one in served),
        },
    }


_PERCENTILES = {"p50": 50, "p99": 99}


def _ms(seconds: Sequence[float], share: float) -> float:
    return 1e3 * percentile(sorted(seconds), share)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"lowest": min(values), "median": statistics.median(values), "highest": max(values)}


def render(figures: Figures, console: Console) -> None:
    spread, verdicts = figures["spread"], figures["verdicts"]
    table = Table(title="The control plane")
    for name in ("Figure", "Median", "Lowest to highest", "Bar", "Met"):
        table.add_column(name, justify="left" if name == "Figure" else "right")

    def met(verdict: str) -> str:
        return "yes" if verdicts[verdict] else "[bold red]no[/bold red]"

    def row(name: str, found: dict[str, float], form: str, bar: str = "", verdict: str = "") -> None:
        span = f"{found['lowest']:{form}} to {found['highest']:{form}}"
        table.add_row(name, f"{found['median']:{form}}", span, bar, met(verdict) if verdict else "")

    inside, client = spread["begin_call_ms"], spread["begin_call_client_ms"]
    row("decisions/s, core alone", spread["decisions_per_s"], ",.0f", f"≥ {DECISIONS_LEAST:,.0f}", "decisions_per_s")
    row("BeginCall in the server, p50 ms", inside["p50"], ".3f", f"≤ {BEGIN_P50_MS_MOST:g}", "begin_call_p50")
    row("BeginCall in the server, p99 ms", inside["p99"], ".3f", f"≤ {BEGIN_P99_MS_MOST:g}", "begin_call_p99")
    row("BeginCall at the client, p50 ms", client["p50"], ".2f")
    row("BeginCall at the client, p99 ms", client["p99"], ".2f")
    row("call cycles/s", spread["calls_per_s"], ",.0f", f"{figures['config']['rate']:,.0f} offered")
    row("1M ÷ 8K tokens, p50", spread["length_ratio"], ".3f", "0.9 to 1.1", "independent_of_length")
    table.add_row(
        "bytes per session",
        f"{figures['bytes_per_session']:,.0f}",
        "",
        f"≤ {BYTES_MOST:,.0f}",
        met("bytes_per_session"),
    )
    console.print(table)
    console.print(f"Calls left in the ledger at the end: {figures['calls_left']}", highlight=False)
