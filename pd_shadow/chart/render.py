"""What is generated from the typed values: schema, default values, README."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from pd_shadow.chart import values
from pd_shadow.chart.base import DocumentPart
from pd_shadow.chart.renamed import allow_old_keys
from pd_shadow.chart.values import ChartValues

NOTICE = "Generated from pd_shadow/chart/values.py by `make chart`; edit there."


class _Compact(GenerateJsonSchema):
    """Titles would repeat the names of fields, and defaults are in values.yaml."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def schema(renamed: Mapping[str, str]) -> str:
    """values.schema.json: every mapping whose keys are known refuses others. `renamed`: see chart/renamed.py."""
    made = ChartValues.model_json_schema(by_alias=True, schema_generator=_Compact)
    allow_old_keys(made, renamed)
    # Helm 3 knows draft 7 only, Helm 4 both.
    document = {"$schema": "http://json-schema.org/draft-07/schema#", "$comment": NOTICE, **made}
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def default_values() -> str:
    """values.yaml: every key with its default, under what it means."""
    lines = [f"# {NOTICE}", *_mapping(ChartValues(), "")]
    return "\n".join(lines) + "\n"


def defaults() -> str:
    """defaults.json: what templates put where a null took a default away, by path, sections before what is in them.

    Not for keys that may be null, unless their section went away with them.
    """
    return json.dumps(dict(_defaults(ChartValues(), ())), indent=1, sort_keys=True) + "\n"


def _defaults(model: BaseModel, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, field in type(model).model_fields.items():
        here, value = (*path, field.alias or name), getattr(model, name)
        if name == "global_" or type(None) in get_args(field.annotation):
            continue
        dumped = model.model_dump(mode="json", by_alias=True, include={name}, exclude_none=True)
        yield ".".join(here), dumped[here[-1]]
        if _ours(value):
            yield from _defaults(value, here)


def readme(template: str) -> str:
    """The chart's README: `template` with its line `<!-- values -->` replaced by tables of all keys."""
    tables: list[str] = []
    for title, model in _sections():
        tables += [f"### {title}", "", _sentence(model.__doc__), "", "| key | default | meaning |", "|---|---|---|"]
        for name, field in model.model_fields.items():
            if name != "global_":
                meaning = (field.description or "").replace("\n", " ").replace("|", "\\|")
                tables.append(f"| `{field.alias or name}` | {_default(field)} | {meaning} |")
        tables.append("")
    return template.replace("<!-- values -->", "\n".join(tables).rstrip())


def _mapping(model: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        if name == "global_":
            continue
        if field.description:
            yield from (f"{indent}# {line.strip()}" for line in field.description.splitlines())
        key, value = field.alias or name, getattr(model, name)
        if _ours(value):
            yield f"{indent}{key}:"
            yield from _mapping(value, indent + "  ")
        else:
            dumped = model.model_dump(mode="json", by_alias=True, include={name}, exclude_none=value is not None)
            text = yaml.safe_dump({key: dumped[key]}, sort_keys=False, width=110)
            yield from (indent + line for line in text.rstrip().splitlines())


def _ours(value: object) -> bool:
    return isinstance(value, BaseModel) and type(value).__module__ == values.__name__


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every model of the values once, under the path where it stands first."""
    waiting: list[tuple[str, type[BaseModel]]] = [("", ChartValues)]
    seen: set[type[BaseModel]] = set()
    while waiting:
        path, model = waiting.pop(0)
        if model in seen:
            continue
        seen.add(model)
        yield (f"`{path}`" if path else "Top level"), model
        for name, field in model.model_fields.items():
            inner = _inner(field.annotation)
            if inner is not None:
                step = f"{field.alias or name}{'.<name>' if 'dict' in str(field.annotation) else ''}"
                waiting.append((f"{path}.{step}" if path else step, inner))


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation if annotation.__module__ == values.__name__ else None
    return next((found for found in map(_inner, get_args(annotation)) if found is not None), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if any(isinstance(mark, DocumentPart) for mark in field.metadata):
        return "`{}`"
    if isinstance(value, BaseModel):
        if _ours(value):
            return "see below"
        value = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    if isinstance(value, list):
        value = [
            item.model_dump(mode="json", by_alias=True, exclude_none=True) if isinstance(item, BaseModel) else item
            for item in value
        ]
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def files(template: str, renamed: str) -> Mapping[str, str]:
    """Generated file names of the chart and their content, from the README's template and renamed.yaml.

    Raises ValueError for a renaming that cannot be.
    """
    return {
        "values.schema.json": schema(yaml.safe_load(renamed) or {}),
        "values.yaml": default_values(),
        "defaults.json": defaults(),
        "README.md": readme(template),
    }
