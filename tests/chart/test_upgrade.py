"""Values of earlier releases render with this chart, under their old names too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError

from pd_shadow.chart.renamed import allow_old_keys
from pd_shadow.chart.render import schema
from tests.chart.support import CHART, Manifest, at_path, chart, keys_of_schema, load_values, problems, render

RELEASES = Path(__file__).parent / "releases"
SNAPSHOTS = sorted(RELEASES.glob("*/*.yaml"))
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]


def upgraded(snapshot: str, values: Manifest) -> list[Manifest]:
    """The objects that a release's values make with this chart; AssertionError with the way out where they do not."""
    try:
        return render(values)
    except HelmError as error:
        raise AssertionError(
            f"values of release {snapshot} do not render any more: {error}\n"
            "A key that has another name now goes into helm/pd-shadow/renamed.yaml (docs/operations.md, 'Values that "
            "change their name'); a key of a version that nobody has yet: run tools/snapshot_chart_values.py."
        ) from error


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_values_of_every_release_render(path: Path) -> None:
    manifests = upgraded(f"{path.parent.name}/{path.stem}", load_values(path))
    assert [problem for manifest in manifests for problem in problems(manifest)] == []


def test_this_version_has_a_snapshot_of_every_key() -> None:
    values = load_values(RELEASES / VERSION / "every-key.yaml")
    missing = [".".join(path) for path in keys_of_schema() if not at_path(values, path)]
    assert missing == [], "run tools/snapshot_chart_values.py"


def test_a_key_that_vanished_without_an_alias_is_named_with_the_way_out() -> None:
    values = load_values(RELEASES / VERSION / "minimal.yaml")
    values["gateway"]["replicaCount"] = 3
    with pytest.raises(AssertionError, match=r"(?s)0\.1\.0/minimal .*replicaCount.*renamed\.yaml"):
        upgraded("0.1.0/minimal", values)


RENAMED = {
    "engines.gpuCount": "gpus",
    "gateway.replicaCount": "replicas",
    "gateway.budget": "podDisruptionBudget.enabled",
    "models.*.prefill.cacheClaim": "modelCache.claimName",
}


@pytest.fixture(scope="module")
def renaming(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """This chart, as if some of its values had had other names."""
    folder = tmp_path_factory.mktemp("chart") / "pd-shadow"
    shutil.copytree(CHART, folder)
    (folder / "renamed.yaml").write_text(yaml.safe_dump(RENAMED))
    (folder / "values.schema.json").write_text(schema(RENAMED))
    return Chart.load(str(folder))


def test_old_names_do_what_the_new_ones_do_and_notes_say_so(renaming: Chart) -> None:
    pools: dict[str, Any] = {"prefill": {"cacheClaim": "models"}, "decode": {}}
    old = {
        "engines": {"gpuCount": 0},
        "gateway": {"replicaCount": 3, "budget": False},
        "models": {"a": {"model": "m", **pools}},
    }
    new = {
        "engines": {"gpus": 0},
        "gateway": {"replicas": 3, "podDisruptionBudget": {"enabled": False}},
        "models": {"a": {"model": "m", "prefill": {"modelCache": {"claimName": "models"}}, "decode": {}}},
    }
    before, after = (renaming.render(values, name="pd-shadow", namespace="agents") for values in (old, new))
    notes = "pd-shadow/templates/NOTES.txt"
    for path in after:
        if path != notes:
            assert before[path] == after[path], path
    warnings = [line for line in before[notes].splitlines() if line.startswith("WARNING")]
    assert [line.partition(";")[0] for line in warnings] == [
        "WARNING: engines.gpuCount has another name now, engines.gpus",
        "WARNING: gateway.budget has another name now, gateway.podDisruptionBudget.enabled",
        "WARNING: gateway.replicaCount has another name now, gateway.replicas",
        "WARNING: models.a.prefill.cacheClaim has another name now, models.a.prefill.modelCache.claimName",
    ]
    assert "WARNING" not in after[notes]


def test_old_names_are_checked_as_the_new_ones_are(renaming: Chart) -> None:
    with pytest.raises(HelmError):
        renaming.validate_schema({"gateway": {"replicaCount": "three"}})
    with pytest.raises(HelmError):
        chart().validate_schema({"gateway": {"replicaCount": 3}})


@pytest.mark.parametrize(
    ("renamed", "says"),
    [
        ({"gateway.replicas": "service.port"}, "this key is in use"),
        ({"gatway.count": "replicas"}, "gatway leads nowhere"),
        ({"gateway.count": "replica"}, "there is no such key"),
        ({"gateway.service.annotations.a": "type"}, "not in a mapping of known keys"),
    ],
)
def test_a_renaming_that_cannot_be_is_refused(renamed: dict[str, str], says: str) -> None:
    made = yaml.safe_load(schema({}))
    with pytest.raises(ValueError, match=says):
        allow_old_keys(made, renamed)
