"""The reference of a configuration model in Markdown: every key with its unit, default and bounds."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pd_shadow.common.config import inner_model

# Units by the end of a key; a model whose fields are all of one unit says so in `json_schema_extra`.
_UNITS = {
    "seconds": "seconds",
    "tokens": "tokens",
    "bytes": "bytes",
    "probability": "share, 0 to 1",
    "block_size": "tokens",
}
_BOUNDS = {
    "exclusiveMinimum": "> {}",
    "minimum": "≥ {}",
    "exclusiveMaximum": "< {}",
    "maximum": "≤ {}",
    "minLength": "{} characters or more",
    "maxLength": "{} characters or fewer",
    "pattern": "`{}`",
}


class Key(NamedTuple):
    """One key of a model."""

    path: str
    kind: str
    unit: str
    default: str
    bounds: str
    description: str


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key, sections opened up; `[]` and `<name>` stand for an entry of a list or a mapping."""
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        path = prefix + name
        inner = inner_model(field.annotation)
        if inner is None:
            schema = _plain(properties[name])
            yield Key(path, _kind(schema), _unit(name, schema), _default(field), _bounds(schema), _text(field))
            continue
        origin = typing.get_origin(field.annotation)
        if origin in (list, tuple):
            yield Key(path, "list", "", "empty", "", _text(field))
            path += "[]"
        elif origin is dict:
            yield Key(path, "mapping", "", "empty", "", _text(field))
            path += ".<name>"
        elif origin is not None:
            yield Key(path, "section", "", "unset", "", _text(field))
        yield from keys(inner, f"{path}.")


def table(model: type[BaseModel]) -> str:
    """A Markdown table of the model's keys."""
    lines = ["| key | type | unit | default | bounds | meaning |", "|---|---|---|---|---|---|"]
    for key in keys(model):
        cells = (f"`{key.path}`", key.kind, key.unit, key.default, key.bounds, key.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of what is there, for a value that may be absent."""
    given = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    return {**schema, **given[0]}


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"]).replace("\\|", "or")
    kind: str = {"number": "number", "integer": "integer", "boolean": "true or false", "array": "list"}.get(
        schema.get("type", ""), "string"
    )
    return "path" if schema.get("format") == "path" else kind


def _unit(name: str, schema: dict[str, Any]) -> str:
    given: str = schema.get("unit", "")
    return given or next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "unset"
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def _bounds(schema: dict[str, Any]) -> str:
    return ", ".join(text.format(schema[bound]) for bound, text in _BOUNDS.items() if bound in schema)


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())
