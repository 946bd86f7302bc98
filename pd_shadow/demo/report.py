"""From two runs to the figures: the JSON the demo writes and the table it prints."""

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pd_shadow.common.figures import as_count, as_ms, as_percent, percentile, spread, versions
from pd_shadow.demo.client import Answer
from pd_shadow.demo.cluster import Engines, Mode, Model
from pd_shadow.demo.replay import Call, Run
from pd_shadow.demo.router import Router
from pd_shadow.router import Reason

LONG_CONTEXT_TOKENS = 4096
RESAMPLES = 2000
"""Of the bootstrap."""
CAVEATS = {
    Mode.DISAGGREGATED: (
        "What it shows: both runs replay the same sessions on the same engines, so the difference is what shadow "
        "prefill did; equal token ids mean that moved and reused KV is the KV a cold prefill would have made.",
        "What it cannot show: all engines share a few CPU cores, so shadow work here waits until none of them has "
        "normal work (on GPUs of their own it would also run beside the other model's calls), and still takes some "
        "time from its neighbours; the models are small with random weights, and NIXL moves KV through local memory.",
    ),
    Mode.COLOCATED: (
        "What it shows: both runs replay the same sessions on the same engines, so the difference is what shadow "
        "prefill did; equal token ids mean that reused KV is the KV a cold prefill would have made.",
        "What it cannot show: both engines share a few CPU cores, so shadow work here waits until the other one has "
        "no normal work; beside decodes of its own engine it runs, and slows them. The models are small with random "
        "weights.",
    ),
}
EMULATED_CAVEATS = (
    "What it shows: gateway, controller, scheduling, prefix cache, shadow class and handoff are at work, and both runs "
    "replay the same sessions; tokens are made from the KV that an engine holds, so that equal token ids mean that "
    "moved and reused KV is the KV a cold prefill would have made.",
    "What it cannot show: engines are emulated. No model runs, iterations last as a latency model fitted to H100 "
    "kernels says, and the time that this machine needs for HTTP and JSON counts as often as emulated time is faster. "
    "make demo ENGINE=vllm runs real engines.",
)
ROUTER_CAVEAT = (
    "With a router the two runs ask different calls: it sends steps to other models where it finds other warmth. What "
    "compares the same call in both, token ids too, is over the calls before a session's runs part."
)
_NOTHING_MOVES = "one engine computes a prompt and generates: no KV moves between engines"
LEFT_OUT: dict[Mode, dict[str, str]] = {
    Mode.DISAGGREGATED: {},
    Mode.COLOCATED: dict.fromkeys(
        ("kv_transfer", "handed_off", "recomputed", "d_received_tokens_at_switch", "ledger.pushed"), _NOTHING_MOVES
    ),
}


def build(
    cold: Run,
    shadow: Run,
    *,
    seed: int,
    specs: Sequence[Model],
    config: dict[str, Any],
    mode: Mode = Mode.DISAGGREGATED,
    engines: Engines = Engines.VLLM,
    router: Router = Router.NONE,
    kv_transfer: str = "NIXL",
) -> dict[str, Any]:
    """The figures, ready for JSON. Times in seconds, lengths in tokens, shares and reductions as fractions.

    What has no meaning in a mode is not there; `left_out` says why.
    """
    ledger = shadow.ledger.shadow
    figures: dict[str, Any] = {
        "engine": str(engines),
        "mode": str(mode),
        "switch_ttft_s": _pair(cold, shadow, lambda run: spread(c.answer.ttft for c in long_switches(run))),
        "switch_ttft_reduction": reduction(long_switches(cold), long_switches(shadow)),
        "switch_ttft_reduction_interval": reduction_interval(long_switches(cold), long_switches(shadow)),
        "switch_ttft_reduction_mean": reduction(long_switches(cold), long_switches(shadow), statistics.fmean),
        "switch_ttft_reduction_paired": paired_reduction(long_switches(cold), long_switches(shadow)),
        "switch_ttft_s_all_contexts": _pair(cold, shadow, lambda run: spread(c.answer.ttft for c in switches(run))),
        "switch_ttft_reduction_all_contexts": reduction(switches(cold), switches(shadow)),
        "switch_ttft_context_tokens_at_least": LONG_CONTEXT_TOKENS,
        "same_model_ttft_s": _pair(
            cold, shadow, lambda run: spread(c.answer.ttft for c in good(run) if not c.is_switch and c.number > 0)
        ),
        "hit_rate": {
            "all": _pair(cold, shadow, lambda run: hit_rate(good(run))),
            "switch": _pair(cold, shadow, lambda run: hit_rate(switches(run))),
        },
        "tokens_identical": tokens_identical(cold, shadow),
        "tokens_compared": tokens_compared(cold, shadow),
        "handed_off": cold.ledger.calls.handed_off + shadow.ledger.calls.handed_off,
        "recomputed": cold.ledger.calls.recomputed + shadow.ledger.calls.recomputed,
        "ledger": {
            "prefilled": ledger.prefilled_tokens,
            "pushed": ledger.pushed_tokens,
            "hit": ledger.hit_tokens,
            "wasted": ledger.wasted_tokens,
            "resident": ledger.resident_tokens,
        },
        "d_received_tokens_at_switch": _pair(cold, shadow, _received),
        "normal": {
            "requests": _pair(cold, shadow, lambda run: len(run.normal)),
            "ttft_s": _pair(cold, shadow, lambda run: spread(a.ttft for a in run.normal.values() if not a.error)),
            "tpot_s": _pair(cold, shadow, lambda run: spread(a.tpot for a in run.normal.values() if not a.error)),
            "ttft_p99_ratio": _p99_ratio(cold, shadow, "ttft"),
            "tpot_p99_ratio": _p99_ratio(cold, shadow, "tpot"),
        },
        "calls": len(cold.calls) + len(shadow.calls),
        "switches": len([c for c in shadow.calls if c.is_switch]),
        "router": None if router is Router.NONE else {"policy": str(router), **_pair(cold, shadow, routed)},
        "failed": len(cold.errors) + len(shadow.errors),
        "run_seconds": _pair(cold, shadow, lambda run: round(run.seconds, 1)),
        "seed": seed,
        "config": config,
        "models": [spec.model_dump(exclude={"chat_template", "special_tokens"}) for spec in specs],
        "versions": versions(),
        "caveats": [
            *(EMULATED_CAVEATS if engines is Engines.EMULATED else CAVEATS[mode]),
            *([] if router is Router.NONE else [ROUTER_CAVEAT]),
        ],
        "kv_transfer": kv_transfer,
        "left_out": LEFT_OUT[mode],
    }
    for path in LEFT_OUT[mode]:
        *outer, key = path.split(".")
        holder = figures
        for name in outer:
            holder = holder[name]
        del holder[key]
    return figures


def good(run: Run) -> list[Call]:
    """Calls that got their answer."""
    return [call for call in run.calls if not call.answer.error]


def switches(run: Run) -> list[Call]:
    """Good calls whose model differs from the previous call's."""
    return [call for call in good(run) if call.is_switch]


def long_switches(run: Run) -> list[Call]:
    """Switch calls with a context worth shadowing."""
    return [call for call in switches(run) if call.answer.prompt_tokens >= LONG_CONTEXT_TOKENS]


def reduction(
    cold: Sequence[Call],
    shadow: Sequence[Call],
    middle: Callable[[list[float]], float] = statistics.median,
) -> float | None:
    """1 - median (or `middle`) TTFT with shadow ÷ the same cold; None without calls."""
    if not cold or not shadow:
        return None
    before, after = (middle([call.answer.ttft for call in calls]) for calls in (cold, shadow))
    return round(1 - after / before, 4) if before else None


def paired_reduction(cold: Sequence[Call], shadow: Sequence[Call]) -> float | None:
    """Median over switch calls of 1 - its TTFT with shadow ÷ the same call's cold; None without pairs."""
    after = {(call.session, call.number, call.model): call.answer.ttft for call in shadow}
    pairs = [(call.answer.ttft, after.get((call.session, call.number, call.model))) for call in cold]
    shares = [1 - warm / before for before, warm in pairs if warm is not None and before]
    return round(statistics.median(shares), 4) if shares else None


def reduction_interval(cold: Sequence[Call], shadow: Sequence[Call]) -> list[float] | None:
    """95 % bootstrap interval of `reduction`, drawing switch calls that both runs have; None without pairs."""
    after = {(call.session, call.number, call.model): call for call in shadow}
    pairs = [(call, after[key]) for call in cold if (key := (call.session, call.number, call.model)) in after]
    if not pairs:
        return None
    rng = random.Random(0)
    drawn = []
    for _ in range(RESAMPLES):
        sample = rng.choices(pairs, k=len(pairs))
        drawn.append(reduction([before for before, _ in sample], [warm for _, warm in sample]) or 0.0)
    drawn.sort()
    return [round(percentile(drawn, share), 4) for share in (2.5, 97.5)]


def routed(run: Run) -> dict[str, Any]:
    """What a router made of a run: switches made and held, calls per reason, preferred models given, TTFT of all."""
    calls = good(run)
    reasons = Counter(str(call.reason) for call in calls)
    preferred = [call for call in calls if call.model == call.preferred]
    return {
        "switches_made": len(switches(run)),
        "switches_held": reasons[Reason.GATE_HELD],
        "reasons": dict(sorted(reasons.items())),
        "preferred_share": round(len(preferred) / len(calls), 4) if calls else None,
        "ttft_s": spread(call.answer.ttft for call in calls),
    }


def hit_rate(calls: Sequence[Call]) -> float | None:
    """Cached prompt tokens ÷ prompt tokens, token-weighted, as the engines reported them."""
    prompt = sum(call.answer.prompt_tokens for call in calls)
    return round(sum(call.answer.cached_tokens for call in calls) / prompt, 4) if prompt else None


def tokens_identical(cold: Run, shadow: Run) -> bool:
    """Whether every generated token id that both runs have is equal, and both have every session call.

    Where a router sent a session's runs to different models, its calls from there on are left out.
    """
    a, b = _ids(cold, shadow)
    agents = {key for key in a | b if isinstance(key, tuple)}
    return agents <= a.keys() & b.keys() and all(a[key] == b[key] for key in a.keys() & b.keys())


def tokens_compared(cold: Run, shadow: Run) -> int:
    """Number of token ids behind `tokens_identical`."""
    a, b = _ids(cold, shadow)
    return sum(len(a[key]) for key in a.keys() & b.keys())


def render(figures: dict[str, Any], console: Console) -> None:
    """The side-by-side table and what it is worth."""
    if figures["engine"] == Engines.EMULATED:
        moves = f"; KV moves over: {figures['kv_transfer']}" if "kv_transfer" in figures else ""
        console.print(
            f"Engines are EMULATED ({', '.join(model['name'] for model in figures['models'])}; H100 latencies){moves}. "
            f"Times are emulated time, which ran {figures['config'].get('speed', 1):g} times as fast.",
            style="bold",
        )
    table = Table(title="Same sessions, same engines", title_justify="left")
    table.add_column("")
    for column in ("cold", "shadow", ""):
        table.add_column(column, justify="right")
    rows = [
        (f"switch TTFT p50, contexts ≥ {LONG_CONTEXT_TOKENS} tokens", "switch_ttft_s", "p50"),
        ("switch TTFT mean", "switch_ttft_s", "mean"),
        ("switch TTFT p90", "switch_ttft_s", "p90"),
        ("switch TTFT p50, all contexts", "switch_ttft_s_all_contexts", "p50"),
        ("same-model TTFT p50", "same_model_ttft_s", "p50"),
    ]
    for label, key, part in rows:
        pair = figures[key]
        table.add_row(label, *(as_ms(pair[run][part]) for run in ("cold", "shadow")), _change(pair, part))
    router = figures["router"]
    if router is not None:
        runs = [router[run] for run in ("cold", "shadow")]
        policy = f"router {router['policy']}"
        table.add_row(f"{policy}: switches made", *(as_count(run["switches_made"]) for run in runs), "")
        table.add_row(f"{policy}: switches held", *(as_count(run["switches_held"]) for run in runs), "")
        table.add_row(f"{policy}: calls on the preferred model", *(as_percent(run["preferred_share"]) for run in runs))
        for part in ("p50", "mean"):
            change = _change({name: router[name]["ttft_s"] for name in ("cold", "shadow")}, part)
            table.add_row(f"{policy}: TTFT {part}, all calls", *(as_ms(run["ttft_s"][part]) for run in runs), change)
    for label, key in (("hit rate, all calls", "all"), ("hit rate, switch calls", "switch")):
        pair = figures["hit_rate"][key]
        table.add_row(label, *(as_percent(pair[run]) for run in ("cold", "shadow")), "")
    received = figures.get("d_received_tokens_at_switch")
    if received is not None:
        table.add_row(
            "tokens D received at a switch, mean",
            *(as_count(received[run]["mean"]) for run in ("cold", "shadow")),
            f"{received['cold']['n']} and {received['shadow']['n']} measurable",
        )
    normal = figures["normal"]
    for label, key in (("normal traffic TTFT p99", "ttft"), ("normal traffic time per token p99", "tpot")):
        pair = normal[f"{key}_s"]
        ratio = normal[f"{key}_p99_ratio"]
        cells = (as_ms(pair[run]["p99"]) for run in ("cold", "shadow"))
        table.add_row(label, *cells, "" if ratio is None else f"× {ratio:.2f}")
    console.print(table)
    paired = figures["switch_ttft_reduction_paired"]
    if paired is not None:
        console.print(f"The same switch call, with shadow against cold: {-paired:+.0%} TTFT at the median.")
    interval = figures["switch_ttft_reduction_interval"]
    if interval is not None:
        strong, weak = (f"{-share:+.0%}" for share in reversed(interval))
        console.print(
            f"Change of the median switch TTFT, contexts ≥ {LONG_CONTEXT_TOKENS} tokens: "
            f"{-figures['switch_ttft_reduction']:+.0%} (95 % bootstrap interval {strong} to {weak})."
        )
    ledger = figures["ledger"]
    moved = ""
    if "handed_off" in figures:
        moved = f" KV handed off for {figures['handed_off']} calls, recomputed for {figures['recomputed']},"
    console.print(
        f"{figures['calls']} calls in two runs, {figures['switches']} switches in "
        f"{'each' if router is None else 'the second'};{moved} "
        f"{figures['failed']} failed."
    )
    console.print("Shadow tokens: " + ", ".join(f"{ledger[key]:,} {key}" for key in ledger) + ".")
    same = "identical" if figures["tokens_identical"] else "DIFFERENT"
    console.print(
        f"Generated tokens: {same} ({figures['tokens_compared']:,} token ids compared). Seed {figures['seed']}."
    )
    for line in figures["caveats"]:
        console.print(line, style="dim")


def _pair(cold: Run, shadow: Run, figure: Any) -> dict[str, Any]:
    return {"cold": figure(cold), "shadow": figure(shadow)}


def _received(run: Run) -> dict[str, float | int | None]:
    measured = [call for call in switches(run) if call.received_tokens is not None]
    tails = [call.uncovered_tokens for call in measured if call.uncovered_tokens is not None]
    excess = [
        abs(call.received_tokens - call.uncovered_tokens)
        for call in measured
        if call.received_tokens is not None and call.uncovered_tokens is not None
    ]
    return {
        "mean": round(statistics.fmean(c.received_tokens for c in measured if c.received_tokens is not None), 1)
        if measured
        else None,
        "n": len(measured),
        "switches": len(switches(run)),
        "uncovered_tail_mean": round(statistics.fmean(tails), 1) if tails else None,
        "max_difference_from_uncovered_tail": max(excess) if excess else None,
    }


def _ids(cold: Run, shadow: Run) -> tuple[dict[Any, tuple[int, ...]], dict[Any, tuple[int, ...]]]:
    """Token ids of both runs by call, but for those after a session's runs parted."""
    models = [{(c.session, c.number): c.model for c in run.calls} for run in (cold, shadow)]
    parted: dict[str, int] = {}
    for session, number in models[0].keys() & models[1].keys():
        if models[0][session, number] != models[1][session, number]:
            parted[session] = min(number, parted.get(session, number))

    def ids(run: Run) -> dict[Any, tuple[int, ...]]:
        alike = [c for c in good(run) if c.session not in parted or c.number < parted[c.session]]
        sessions: dict[Any, tuple[int, ...]] = {(c.session, c.number): c.answer.token_ids for c in alike}
        return sessions | {n: a.token_ids for n, a in run.normal.items() if not a.error}

    return ids(cold), ids(shadow)


def _p99_ratio(cold: Run, shadow: Run, what: str) -> float | None:
    def p99(answers: Iterable[Answer]) -> float | None:
        values = sorted(getattr(answer, what) for answer in answers if not answer.error)
        return percentile(values, 99) if values else None

    before, after = p99(cold.normal.values()), p99(shadow.normal.values())
    return round(after / before, 3) if before and after is not None else None


def _change(pair: dict[str, Any], part: str) -> str:
    before, after = pair["cold"][part], pair["shadow"][part]
    return f"{(after - before) / before:+.0%}" if before and after is not None else ""
