"""The demo on emulated engines, from start to figures, on a workload small enough for a test."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from pd_shadow.demo import demo, report
from pd_shadow.demo.cluster import Engines

# Of a session of three calls, two of them switches.
SEED = 4


@pytest.mark.timeout(120)
async def test_the_emulated_demo_says_the_same_cold_and_warm_and_that_it_is_emulated(tmp_path: Path) -> None:
    plan = demo.Plan(sessions=1, seed=SEED, speed=10.0)
    console = Console(record=True, width=200)
    figures = await demo.run(plan, tmp_path, tmp_path, console)
    assert figures["failed"] == 0
    assert figures["tokens_identical"] is True
    assert figures["tokens_compared"] > 0
    assert figures["recomputed"] == 0
    ledger = figures["ledger"]
    assert ledger["prefilled"] == ledger["hit"] + ledger["wasted"] + ledger["resident"] > 0
    assert figures["hit_rate"]["switch"]["shadow"] > figures["hit_rate"]["switch"]["cold"]
    assert (figures["engine"], figures["kv_transfer"]) == (Engines.EMULATED, "timed link model")
    assert json.loads(json.dumps(figures)) == figures
    report.render(figures, console)
    text = console.export_text()
    assert "Engines are EMULATED" in text
    assert "timed link model" in text
