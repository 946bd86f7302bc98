"""The figures: which calls they are over, and what makes a run unequal."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from pd_shadow.api.v1 import admin_pb2
from pd_shadow.demo import report
from pd_shadow.demo.client import Answer
from pd_shadow.demo.cluster import Mode
from pd_shadow.demo.models import LARGE, SMALL
from pd_shadow.demo.replay import Call, Run
from pd_shadow.demo.router import Router
from pd_shadow.router import Reason


def answer(ttft: float, prompt: int = 8000, cached: int = 0, ids: tuple[int, ...] = (1, 2)) -> Answer:
    return Answer(text="x", token_ids=ids, ttft=ttft, tpot=0.01, prompt_tokens=prompt, cached_tokens=cached)


def run(switch_ttft: float, cached: int, received: int | None = 384, handed_off: int = 3) -> Run:
    calls = [
        Call("a", 0, "s", False, answer(0.3, prompt=2000)),
        Call("a", 1, "l", True, answer(9.0, prompt=3000)),
        Call("a", 2, "s", True, answer(switch_ttft, cached=cached), received, 300),
    ]
    ledger = admin_pb2.GetLedgerResponse(
        shadow=admin_pb2.ShadowLedger(prefilled_tokens=10, pushed_tokens=9, hit_tokens=8, wasted_tokens=1),
        calls=admin_pb2.CallLedger(handed_off=handed_off),
    )
    return Run(calls, {0: answer(0.2)}, ledger, 12.0)


def build(cold: Run, shadow: Run) -> dict[str, object]:
    return report.build(cold, shadow, seed=4, specs=(SMALL, LARGE), config={"sessions": 1})


def test_the_reduction_is_over_long_switches_and_the_whole_fits_json() -> None:
    figures = json.loads(json.dumps(build(run(1.0, 0), run(0.25, 7600))))
    assert figures["switch_ttft_reduction"] == pytest.approx(0.75)
    assert figures["switch_ttft_s"]["cold"]["n"] == 1
    assert figures["switch_ttft_s_all_contexts"]["cold"]["n"] == 2
    assert figures["hit_rate"]["switch"] == {"cold": 0.0, "shadow": round(7600 / 11000, 4)}
    assert figures["handed_off"] == 6
    assert figures["recomputed"] == 0
    assert figures["ledger"] == {"prefilled": 10, "pushed": 9, "hit": 8, "wasted": 1, "resident": 0}
    assert figures["d_received_tokens_at_switch"]["shadow"] == {
        "mean": 384.0, "n": 1, "switches": 2, "uncovered_tail_mean": 300.0, "max_difference_from_uncovered_tail": 84,
    }  # fmt: skip
    assert figures["normal"]["ttft_p99_ratio"] == 1.0
    assert figures["tokens_identical"] is True
    assert figures["switches"] == 2


def test_the_interval_is_that_of_the_calls_both_runs_have() -> None:
    def switches(ttfts: list[float]) -> list[Call]:
        return [Call("a", number, "s", True, answer(ttft)) for number, ttft in enumerate(ttfts)]

    cold = switches([1.0] * 12)
    low, high = report.reduction_interval(cold, switches([0.2] * 6 + [0.6] * 6)) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.4), pytest.approx(0.8))
    assert report.reduction_interval(cold, switches([0.2] * 3)) == [pytest.approx(0.8), pytest.approx(0.8)]
    assert report.reduction_interval([], []) is None


def test_what_has_no_meaning_in_a_mode_is_left_out_with_the_reason() -> None:
    cold, shadow = run(1.0, 0, received=None, handed_off=0), run(0.25, 7600, received=None, handed_off=0)
    figures = report.build(cold, shadow, seed=4, specs=(SMALL, LARGE), config={}, mode=Mode.COLOCATED)
    figures = json.loads(json.dumps(figures))
    everything = build(cold, shadow)
    gone = {"handed_off", "recomputed", "d_received_tokens_at_switch", "kv_transfer"}
    assert everything.keys() - figures.keys() == gone
    assert figures["ledger"] == {"prefilled": 10, "hit": 8, "wasted": 1, "resident": 0}
    assert figures["left_out"].keys() == gone | {"ledger.pushed"}
    assert all("no KV moves" in reason for reason in figures["left_out"].values())
    assert (figures["mode"], everything["mode"], everything["left_out"]) == ("colocated", "disaggregated", {})


@pytest.mark.parametrize("mode", list(Mode))
def test_the_table_shows_every_row_that_has_a_meaning(mode: Mode) -> None:
    out = io.StringIO()
    figures = report.build(run(1.0, 0), run(0.25, 7600), seed=4, specs=(SMALL, LARGE), config={}, mode=mode)
    report.render(figures, Console(file=out, width=120))
    text = out.getvalue()
    assert "switch TTFT p50" in text
    assert "Generated tokens: identical" in text
    for moved in ("tokens D received", "handed off", "pushed", "NIXL"):
        assert (moved in text) is (mode is Mode.DISAGGREGATED)


def test_a_different_token_or_a_missing_call_is_not_identical() -> None:
    cold, shadow = run(1.0, 0), run(0.25, 7600)
    shadow.calls[2] = replace(shadow.calls[2], answer=answer(0.25, ids=(1, 3)))
    assert not report.tokens_identical(cold, shadow)
    shadow.calls.pop()
    assert not report.tokens_identical(cold, shadow)


def routed(run_: Run, *steps: tuple[str, str, Reason]) -> Run:
    """The run with these (model, preferred model, reason) for its calls."""
    run_.calls = [
        replace(call, model=model, preferred=preferred, reason=reason, is_switch=bool(number) and model != steps[0][0])
        for number, (call, (model, preferred, reason)) in enumerate(zip(run_.calls, steps, strict=True))
    ]
    return run_


def test_a_router_s_runs_are_compared_until_they_part() -> None:
    free, held, warm = Reason.FREE_CHOICE, Reason.GATE_HELD, Reason.SWITCHED_WARM
    cold = routed(run(1.0, 0), ("s", "s", free), ("s", "l", held), ("s", "l", held))
    shadow = routed(run(0.25, 7600), ("s", "s", free), ("l", "l", warm), ("l", "l", Reason.KEPT))
    shadow.calls[2] = replace(shadow.calls[2], answer=answer(0.25, ids=(7, 8, 9)))
    figures = report.build(cold, shadow, seed=4, specs=(SMALL, LARGE), config={}, router=Router.GATE)
    # The first call of the session and one normal request.
    assert (figures["tokens_identical"], figures["tokens_compared"]) == (True, 4)
    routing = figures["router"]
    assert (routing["policy"], routing["cold"]["switches_held"], routing["cold"]["switches_made"]) == ("gate", 2, 0)
    assert routing["shadow"]["reasons"] == {"free_choice": 1, "kept": 1, "switched_warm": 1}
    assert (routing["cold"]["preferred_share"], routing["shadow"]["preferred_share"]) == (round(1 / 3, 4), 1.0)
    assert routing["shadow"]["ttft_s"]["n"] == 3
    assert figures["caveats"][-1] == report.ROUTER_CAVEAT
    assert json.loads(json.dumps(figures)) == figures
    out = io.StringIO()
    report.render(figures, Console(file=out, width=140))
    assert "router gate: switches held" in out.getvalue()
    # Before they part, a different token is a different token.
    shadow.calls[0] = replace(shadow.calls[0], answer=answer(0.3, ids=(1, 9)))
    assert not report.tokens_identical(cold, shadow)


def test_without_a_router_nothing_is_said_about_one() -> None:
    figures = build(run(1.0, 0), run(0.25, 7600))
    assert figures["router"] is None
    out = io.StringIO()
    report.render(figures, Console(file=out, width=140))
    assert "router" not in out.getvalue()


def test_a_failed_call_is_counted_and_left_out_of_the_figures() -> None:
    cold, shadow = run(1.0, 0), run(0.25, 7600)
    shadow.calls[2] = replace(shadow.calls[2], answer=Answer(error="HTTP 502: no"))
    figures = build(cold, shadow)
    assert figures["failed"] == 1
    assert figures["tokens_identical"] is False
    assert figures["switch_ttft_reduction"] is None


def test_the_table_says_what_is_missing_instead_of_failing() -> None:
    empty = Run()
    out = io.StringIO()
    report.render(build(empty, empty), Console(file=out, width=120))
    assert "cannot show" in out.getvalue()
