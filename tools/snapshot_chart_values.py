"""Write what users of this release may have in their values to tests/chart/releases/VERSION, for releases to come.

The examples as they are, and every-key.yaml with each key of the schema that the chart takes. Once a version is
released its folder stays as it is.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from controller.config import ControllerConfig  # noqa: E402
from pd_shadow.chart.values import CONTROLLER_OWNED, GATEWAY_OWNED, ChartValues, EnginePool  # noqa: E402
from pd_shadow.gateway.config import GatewayConfig  # noqa: E402

CHART = ROOT / "helm" / "pd-shadow"
RELEASES = ROOT / "tests" / "chart" / "releases"
DIGEST = "sha256:" + "0" * 64

# What null stands for in the defaults.
WORKLOAD: dict[str, Any] = {
    "resources": {"requests": {"memory": "4Gi"}, "limits": {"memory": "8Gi"}},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "priorityClassName": "serving",
    "podAnnotations": {"team": "llm"},
    "podLabels": {"team": "llm"},
    "extraEnv": [{"name": "A", "value": "1"}],
    "extraArgs": ["--log-level=info"],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "terminationGracePeriodSeconds": 600,
}


def every_key() -> dict[str, Any]:
    """Values in which every key of the chart stands, most with their default."""
    values = ChartValues().model_dump(mode="json", by_alias=True, exclude_none=True)
    values["image"]["digest"] = DIGEST
    pool = {**EnginePool().model_dump(mode="json", by_alias=True, exclude_none=True), **WORKLOAD, "extraArgs": []}
    emulated = {"enabled": False, "speed": 1.0}
    model = {"model": "org/model", "engine": {}, "emulated": emulated}
    for part in ("controller", "gateway", "engines"):
        values[part] = {**values[part], **WORKLOAD}
    values["controller"]["config"] = _document(ControllerConfig(), *CONTROLLER_OWNED)
    values["controller"]["config"]["discovery"].pop("kubernetes")
    values["gateway"]["config"] = _document(GatewayConfig(), *GATEWAY_OWNED)
    values["gateway"]["autoscaling"]["targetInFlightCalls"] = 100
    values["models"] = {
        "split": {**model, "servedName": "org/split", "prefill": pool, "decode": pool},
        "whole": {**model, "servedName": "org/whole", "colocated": pool},
    }
    return values


def _document(config: Any, *owned: str) -> dict[str, Any]:
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in owned}


def main() -> int:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    folder = RELEASES / version
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((CHART / "examples").glob("*.yaml")):
        (folder / path.name).write_text(path.read_text())
    # Through JSON: no anchors where one object stands at several places.
    values = json.loads(json.dumps(every_key()))
    (folder / "every-key.yaml").write_text(yaml.safe_dump(values, sort_keys=False, width=110))
    print(folder.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
