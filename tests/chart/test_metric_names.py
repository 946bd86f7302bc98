"""Metric names in alerts, dashboard, values and documents are names that the code exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.config import ControllerConfig
from controller.metrics import AccessMetrics, ClusterCollector
from controller.server.plane import Plane
from pd_shadow.engine.metrics import PluginCollector
from pd_shadow.engine.snapshot import EngineSnapshot
from pd_shadow.engine.steps import StepLog
from pd_shadow.engine.vllm import compat
from pd_shadow.gateway.metrics import Metrics
from tests.chart.support import CHART, ROOT

RULES = CHART / "rules" / "pd-shadow.yaml"
DASHBOARD = CHART / "dashboards" / "pd-shadow.json"
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", CHART / "README.md"]
NAME = re.compile(r"\bpd_?shadow_(?:controller|gateway|engine)_[a-z0-9_]*\*?")
SUFFIXES = {"counter": ("_total", "_created"), "histogram": ("_bucket", "_count", "_sum", "_created"), "gauge": ("",)}


def families() -> Iterator[Any]:
    """Every metric family of the three processes, with the names of its labels."""
    yield from ClusterCollector(Plane(ControllerConfig())).collect()
    yield from PluginCollector(StepLog(None), EngineSnapshot).collect()
    for collector in (*vars(Metrics()).values(), *vars(AccessMetrics()).values()):
        if hasattr(collector, "_labelnames"):
            (family,) = collector.collect()
            family._labelnames = collector._labelnames
            yield family


def exported() -> dict[str, set[str]]:
    """Names as a scrape shows them, and their labels."""
    return {
        f"{family.name}{suffix}": set(getattr(family, "_labelnames", ()))
        for family in families()
        for suffix in SUFFIXES[family.type]
    }


EXPORTED = exported()


def expressions() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
    yield from ((variable["name"], variable["query"]) for variable in dashboard["templating"]["list"][1:])


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_alerts_and_panels_use_exported_names_only(title: str, expression: str) -> None:
    found = set(NAME.findall(expression))
    assert found, f"{title} asks for nothing of ours"
    assert found <= EXPORTED.keys()


@pytest.mark.parametrize("path", [*DOCUMENTS, CHART / "values.yaml"], ids=lambda path: path.name)
def test_documents_use_exported_names_only(path: Path) -> None:
    known = EXPORTED.keys()
    # In prose a counter may stand without its suffix, and pd_shadow_engine_* for all of a process.
    families = known | {name.removesuffix("_total") for name in known}
    for name in NAME.findall(path.read_text()):
        assert name in families or (name.endswith("*") and any(one.startswith(name[:-1]) for one in known)), name


def test_labels_in_alerts_are_labels_of_the_metric() -> None:
    for title, expression in expressions():
        for name, matchers in re.findall(r"(pd_shadow_\w+)\{([^}]*)\}", expression):
            # Prometheus adds these when it scrapes.
            used = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", matchers)) - {"namespace", "pod", "job"}
            assert used <= EXPORTED[name], (title, name)


def test_the_version_alert_knows_the_tested_versions() -> None:
    (expression,) = (text for title, text in expressions() if title == "PdShadowEngineVersionUntested")
    pattern = re.search(r'vllm_version!~"(.*)"', expression)
    assert pattern is not None
    tested = re.compile(pattern.group(1).replace("\\\\", "\\"))
    for minor in compat.TESTED_MINORS:
        assert tested.fullmatch(f"{minor}.1+cu130")
    assert not tested.fullmatch("0.33.0")
    assert not tested.fullmatch("0.320.0")


def test_the_dashboard_answers_its_three_questions() -> None:
    rows = [panel["title"] for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] == "row"]
    assert rows == ["Is it helping?", "Is it hurting?", "Which link is slow?"]
