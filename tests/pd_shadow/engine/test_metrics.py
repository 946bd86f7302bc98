"""The plugin's own metrics page."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from pd_shadow.demo.cluster import free_ports
from pd_shadow.engine import metrics
from pd_shadow.engine.jobs import LegEnd
from pd_shadow.engine.snapshot import EngineSnapshot
from pd_shadow.engine.steps import StepLog, StepRecord
from pd_shadow.engine.tags import LegKind
from pd_shadow.policy.base import StepReason


def scrape(port: int) -> dict[tuple[str, ...], float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_the_page_shows_the_log_and_the_last_snapshot() -> None:
    log = StepLog()
    now = EngineSnapshot()
    (port,) = free_ports(1)
    close = metrics.serve(f"127.0.0.1:{port}", log, lambda: now)
    try:
        log.add(StepRecord(1.0, StepReason.WINDOW, 0.1, 256, 0, predicted=0.09, real=0.12))
        log.add(StepRecord(2.0, StepReason.WAITING, 0.0, 0, 512, predicted=0.2, real=0.2))
        log.legs[LegKind.PREFILL, LegEnd.NO_ROOM] += 1
        now = EngineSnapshot(shadow_blocks=7, shadow_cap_blocks=256, credit_seconds=0.5)
        seen = scrape(port)
    finally:
        close()
    prefix = "pd_shadow_engine_"
    assert seen[f"{prefix}steps_total", "window"] == seen[f"{prefix}steps_total", "waiting"] == 1
    assert seen[f"{prefix}legs_total", "no_room", "prefill"] == 1
    assert seen[f"{prefix}shadow_tokens_total",] == 256
    assert (seen[f"{prefix}predicted_seconds_total",], seen[f"{prefix}real_seconds_total",]) == (0.09, 0.12)
    assert seen[f"{prefix}over_budget_steps_total",] == 1
    assert (seen[f"{prefix}class_blocks",], seen[f"{prefix}class_cap_blocks",]) == (7, 256)
    assert seen[f"{prefix}credit_seconds",] == 0.5
