"""values.schema.json: what it takes, and that no misspelt key gets past it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import HelmError
from pydantic import ValidationError

from pd_shadow.chart.values import ChartValues
from tests.chart.support import CHART, EXAMPLES, MATRIX, ROOT, Manifest, chart

SCHEMA: Manifest = json.loads((CHART / "values.schema.json").read_text())


def strict_objects() -> Iterator[tuple[tuple[str, ...], Manifest]]:
    """(path, schema) of every mapping with known keys, each definition at the first place where it stands."""
    seen: set[str] = set()

    def walk(schema: Manifest, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Manifest]]:
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            if name in seen:
                return
            seen.add(name)
            schema = SCHEMA["$defs"][name]
        for choice in schema.get("anyOf", ()):
            yield from walk(choice, path)
        if "items" in schema:
            yield from walk(schema["items"], (*path, "[]"))
        for choice in schema.get("patternProperties", {}).values():
            yield from walk(choice, (*path, "small"))
        if isinstance(schema.get("additionalProperties"), dict):
            yield from walk(schema["additionalProperties"], (*path, "key"))
        if "properties" in schema:
            yield path, schema
            for key, value in schema["properties"].items():
                yield from walk(value, (*path, key))

    return walk(SCHEMA, ())


OBJECTS = dict(strict_objects())


def at(path: tuple[str, ...], content: Any) -> Any:
    for part in reversed(path):
        content = [content] if part == "[]" else {part: content}
    return content


def test_the_schema_goes_deep() -> None:
    """As deep as values go: a field of a field of the plugin's settings, an expression of a pod's affinity."""
    assert len(OBJECTS) > 80
    assert max(len(path) for path in OBJECTS) >= 6


def test_every_mapping_with_known_keys_refuses_others() -> None:
    assert [path for path, schema in OBJECTS.items() if schema["additionalProperties"] is not False] == []


def merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return one | {key: merged(one[key], value) if key in one else value for key, value in other.items()}
    return [merged(one[0], other[0])] if isinstance(one, list) else other


def test_helm_rejects_misspelt_keys_at_any_depth() -> None:
    values: Any = {}
    for number, path in enumerate(OBJECTS):
        values = merged(values, at(path, {f"misspelt{number}": None}))
    with pytest.raises(HelmError) as refused:
        chart().validate_schema(values)
    accepted = [path for number, path in enumerate(OBJECTS) if f"'misspelt{number}'" not in str(refused.value)]
    assert accepted == []


@pytest.mark.parametrize(
    "values",
    [
        {"controler": {}},
        {"models": {"small": {"model": "m", "prefil": {}}}},
        {"models": {"small": {"model": "m", "prefill": {"engine": {"host_tier": {"size_gb": 4}}}}}},
        {"models": {"Small": {"model": "m", "colocated": {}}}},
        {"controller": {"config": {"shadow": {"gate_probabilty": 0.1}}}},
        {"controller": {"config": {"listen": "0.0.0.0:1"}}},
        {"controller": {"config": {"shadow": {"approach": "eagre"}}}},
        {"gateway": {"config": {"caps": {"sessions": 0}}}},
        {"gateway": {"tolerations": [{"efect": "NoSchedule"}]}},
        {"controller": {"replicas": "two"}},
    ],
)
def test_mistakes_that_are_easily_made_are_refused(values: Manifest) -> None:
    with pytest.raises(HelmError):
        chart().validate_schema(values)
    with pytest.raises(ValidationError):
        ChartValues.model_validate(values)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_fit_the_typed_model(path: Any) -> None:
    ChartValues.model_validate(yaml.safe_load(path.read_text()))


def test_the_matrix_fits_the_typed_model() -> None:
    for values in MATRIX.values():
        ChartValues.model_validate(values)


def test_values_yaml_says_what_the_model_says() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert ChartValues.model_validate(values) == ChartValues()


def test_generated_files_are_those_the_code_makes() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_chart.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
