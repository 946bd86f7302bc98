"""docs/observability.md names metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path

from controller.config import ControllerConfig
from controller.metrics import AccessMetrics, registry_for
from controller.server.plane import Plane
from pd_shadow.gateway.metrics import Metrics

PAGE = Path(__file__).parent.parent / "docs" / "observability.md"


def test_every_metric_of_the_page_exists() -> None:
    named = set(re.findall(r"pd_shadow_(?:gateway|controller)_[a-z_]+", PAGE.read_text()))
    registries = (Metrics().registry, registry_for(Plane(ControllerConfig()), AccessMetrics()))
    known = {family.name for registry in registries for family in registry.collect()}
    assert len(named) > 8
    assert {name.removesuffix("_total") for name in named} <= known
