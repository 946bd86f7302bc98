"""From what was measured to the figures: the JSON that `bench interference` writes and the table it prints."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from pd_shadow.bench import trace
from pd_shadow.bench.modes import Mode
from pd_shadow.bench.samples import Phase, Sample
from pd_shadow.bench.slo import Slo
from pd_shadow.common.figures import as_count, as_ms, as_percent, percentile, spread, versions
from pd_shadow.demo.models import ModelSpec
from pd_shadow.engine.steps import StepRecord
from pd_shadow.policy.base import BETA
from pd_shadow.policy.credit import ROUTED_DELTA

ERRORS_KEPT = 5
_ms = partial(as_ms, digits=1)
CAVEATS = (
    "What it shows: every mode is asked the same requests at the same times of the same engine build, so the modes "
    "differ by what they do with shadow work; whether the bounds hold that the method gives (an arrival waits for one "
    "bounded iteration, routed calls stretch by δ at most); how much shadow work each mode gets done for it.",
    "What it cannot show: times and throughputs of a GPU. Here decodes are bound by arithmetic as much as prefill is, "
    "so shadow tokens ride along less cheaply; there are no CUDA graphs and no scheduling one step ahead; engine, HTTP "
    "server and load generator share the CPU's cores, so that part of every time is theirs, and shadow requests cost "
    "some of it in every mode; the model is small, its weights random.",
)


def build(
    slo: Slo,
    phases: Mapping[Mode, Sequence[Phase]],
    routed: Sequence[tuple[Phase, Phase]],
    records: Sequence[StepRecord] | None,
    *,
    seed: int,
    config: Mapping[str, Any],
    engine: Mapping[str, Any],
    model: ModelSpec,
) -> dict[str, Any]:
    """The figures, ready for JSON. Times in seconds, shares as fractions; None for what could not be measured."""
    modes = {mode.value: mode_figures(slo, own, records if mode.has_plugin else None) for mode, own in phases.items()}
    everything = [phase for own in phases.values() for phase in own] + [phase for pair in routed for phase in pair]
    errors = [sample.error for phase in everything for sample in phase.samples if sample.error]
    return {
        "modes": modes,
        "routed": routed_figures(routed) if routed else None,
        "slo": {**slo.summary(), "one_iteration_s": round(one_iteration(slo), 6)},
        "verdicts": verdicts(modes, one_iteration(slo)),
        "failed": len(errors),
        "errors": errors[:ERRORS_KEPT],
        "seed": seed,
        "config": dict(config),
        "engine": dict(engine),
        "model": model.model_dump(exclude={"chat_template", "special_tokens"}),
        "versions": versions(),
        "caveats": list(CAVEATS),
    }


def mode_figures(slo: Slo, phases: Sequence[Phase], records: Sequence[StepRecord] | None) -> dict[str, Any]:
    """One mode over all of its phases."""
    samples = [sample for phase in phases for sample in phase.samples]
    legs = [leg for phase in phases for leg in phase.legs_inside]
    seconds = sum(phase.seconds for phase in phases)
    ends: dict[str, int] = {}
    for leg in legs:
        ends[leg.end] = ends.get(leg.end, 0) + 1
    return {
        **_times([sample for sample in samples if not sample.error]),
        "slo_attainment": slo.attainment(samples),
        "requests": len(samples),
        "failed": sum(1 for sample in samples if sample.error),
        "shadow_tokens_per_s": round(sum(leg.computed_tokens for leg in legs) / seconds, 1) if seconds else None,
        "shadow_legs_by_end": dict(sorted(ends.items())),
        "shadow_errors": sorted({leg.error for leg in legs if leg.error})[:ERRORS_KEPT],
        "seconds": round(seconds, 3),
        **trace.figures(None if records is None else trace.during(records, phases)),
    }


def routed_figures(pairs: Sequence[tuple[Phase, Phase]]) -> dict[str, Any]:
    """Routed calls without shadow work and with it.

    `stretch`: mean time per token with shadow work ÷ without, over all tokens of all passes; `stretch_by_pass` says
    how far passes differ.
    """
    without = [sample for pair in pairs for sample in pair[0].good]
    with_shadow = [sample for pair in pairs for sample in pair[1].good]
    whole = stretch(without, with_shadow)
    legs = [leg for pair in pairs for leg in pair[1].legs_inside]
    seconds = sum(pair[1].seconds for pair in pairs)
    both = {"without_shadow": _times(without), "with_shadow": _times(with_shadow)}
    return {
        "stretch": whole,
        "stretch_by_pass": [stretch(before.good, after.good) for before, after in pairs],
        "bound": 1 + ROUTED_DELTA,
        "within_bound": None if whole is None else whole <= 1 + ROUTED_DELTA,
        **{key: {side: times[f"{key}_s"] for side, times in both.items()} for key in ("ttft", "tpot")},
        "shadow_tokens_per_s": round(sum(leg.computed_tokens for leg in legs) / seconds, 1) if seconds else None,
    }


def stretch(without: Sequence[Sample], with_shadow: Sequence[Sample]) -> float | None:
    """Mean time per token after the first, with shadow work ÷ without; None where there are none."""
    before, after = _seconds_per_token(without), _seconds_per_token(with_shadow)
    return round(after / before, 4) if before and after is not None else None


def one_iteration(slo: Slo) -> float:
    """Longest iteration with shadow work that an arrival may have to wait for: β times the TPOT SLO, in seconds."""
    return BETA * slo.tpot


def verdicts(modes: Mapping[str, Mapping[str, Any]], iteration_seconds: float) -> dict[str, Any]:
    """The plugin against its promises; None where a mode is missing.

    `shadow_throughput_vs_stock_low` is a ratio: shadow tokens per second, plugin ÷ stock_low.
    """
    plugin, idle, low = (modes.get(mode) for mode in (Mode.PLUGIN, Mode.NO_SHADOW, Mode.STOCK_LOW))
    found: dict[str, Any] = {
        "slo_not_below_no_shadow": None,
        "ttft_p99_within_one_iteration": None,
        "shadow_throughput_vs_stock_low": None,
    }
    if plugin and idle and plugin["slo_attainment"] is not None and idle["slo_attainment"] is not None:
        found["slo_not_below_no_shadow"] = plugin["slo_attainment"] >= idle["slo_attainment"]
    if plugin and idle and plugin["ttft_s"]["n"] and idle["ttft_s"]["n"]:
        later = plugin["ttft_s"]["p99"] - idle["ttft_s"]["p99"]
        found["ttft_p99_within_one_iteration"] = later <= iteration_seconds
    if plugin and low and low["shadow_tokens_per_s"]:
        found["shadow_throughput_vs_stock_low"] = round(plugin["shadow_tokens_per_s"] / low["shadow_tokens_per_s"], 4)
    return found


def render(figures: dict[str, Any], console: Console) -> None:
    """The table, the verdicts and what they are worth."""
    modes = figures["modes"]
    table = Table(title="The same requests on one colocated engine", title_justify="left")
    table.add_column("")
    for name in modes:
        table.add_column(name, justify="right")
    for label, key in (("TTFT", "ttft_s"), ("time per token", "tpot_s"), ("longest gap", "longest_gap_s")):
        for part in ("p50", "p90", "p99"):
            table.add_row(f"{label} {part}", *(_ms(mode[key][part]) for mode in modes.values()))
    table.add_row("longest gap of all", *(_ms(mode["longest_gap_s"]["max"]) for mode in modes.values()))
    table.add_row("SLO attainment", *(as_percent(mode["slo_attainment"]) for mode in modes.values()))
    table.add_row("shadow tokens/s", *(as_count(mode["shadow_tokens_per_s"]) for mode in modes.values()))
    table.add_row("iterations over budget", *(as_percent(mode["over_budget_share"]) for mode in modes.values()))
    table.add_row("  by, mean", *(_ms(mode["over_budget_seconds_mean"]) for mode in modes.values()))
    table.add_row("requests (failed)", *(f"{mode['requests']} ({mode['failed']})" for mode in modes.values()))
    console.print(table)
    slo = figures["slo"]
    prefill = ", ".join(f"{_ms(seconds)} for {tokens}" for tokens, seconds in slo["isolated_prefill_s"].items())
    limits = ", ".join(f"{_ms(seconds)} for {tokens}" for tokens, seconds in slo["ttft_s"].items())
    console.print(
        f"SLOs, the same in all modes: TTFT {limits} prompt tokens; time per token {_ms(slo['tpot_s'])}. From the "
        f"idle engine: prefill {prefill} prompt tokens; {_ms(slo['isolated_decode_s'])} per token."
    )
    _render_routed(figures["routed"], console)
    verdict = figures["verdicts"]
    ratio = verdict["shadow_throughput_vs_stock_low"]
    within = f"TTFT p99 within one iteration ({_ms(slo['one_iteration_s'])}) of no_shadow"
    console.print(f"SLO attainment with the plugin not below no_shadow: {_yes(verdict['slo_not_below_no_shadow'])}.")
    console.print(f"{within}: {_yes(verdict['ttft_p99_within_one_iteration'])}.")
    console.print(f"Shadow throughput, plugin to stock_low: {'-' if ratio is None else f'{ratio:.2f}'}.")
    console.print(f"Seed {figures['seed']}.")
    for line in figures["errors"]:
        console.print(f"failed: {line}", style="red", markup=False)
    for line in figures["caveats"]:
        console.print(line, style="dim")


def _render_routed(routed: Mapping[str, Any] | None, console: Console) -> None:
    if routed is None:
        return
    whole = routed["stretch"]
    passes = ", ".join("-" if each is None else f"{each:.3f}" for each in routed["stretch_by_pass"])
    tpot = routed["tpot"]
    console.print(
        f"Routed calls with the plugin: stretched × {'-' if whole is None else f'{whole:.3f}'} by shadow work (passes: "
        f"{passes}; bound {routed['bound']:.3f}); time per token p50 {_ms(tpot['without_shadow']['p50'])} without, "
        f"{_ms(tpot['with_shadow']['p50'])} with; {as_count(routed['shadow_tokens_per_s'])} shadow tokens/s meanwhile."
    )


def _times(samples: Sequence[Sample]) -> dict[str, Any]:
    gaps = sorted(sample.longest_gap for sample in samples)
    return {
        "ttft_s": spread(sample.ttft for sample in samples),
        "tpot_s": spread(sample.tpot for sample in samples),
        "longest_gap_s": {**spread(gaps), "max": round(percentile(gaps, 100), 6) if gaps else None},
    }


def _seconds_per_token(samples: Sequence[Sample]) -> float | None:
    tokens = sum(sample.decode_tokens for sample in samples)
    return sum(sample.decode_seconds for sample in samples) / tokens if tokens else None


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"
