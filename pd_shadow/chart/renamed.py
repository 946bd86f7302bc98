"""Values of earlier releases that have another name now: `helm/pd-shadow/renamed.yaml`, read here and by templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY = "*"
"""In a path: every key of a mapping whose keys are the user's, such as models."""


def allow_old_keys(schema: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Add each old key to the schema, deprecated, with the schema of the new one.

    `renamed`: old path, such as models.*.prefill.cache, to the new path from the mapping that the old key stands in.
    Raises ValueError for a path that leads nowhere, and for an old key that is in use.
    """
    for old, new in renamed.items():
        *above, key = old.split(".")
        mapping = _at(schema, schema, above, old)
        if key in mapping["properties"]:
            raise ValueError(f"renamed.yaml: {old}: this key is in use; a key that has a meaning cannot have another")
        *between, last = new.split(".")
        target = _at(schema, mapping, between, f"{old}: {new}")["properties"].get(last)
        if target is None:
            raise ValueError(f"renamed.yaml: {old}: {new}: there is no such key")
        mapping["properties"][key] = {**target, "deprecated": True, "description": f"Renamed: use {new}."}


def _at(root: dict[str, Any], schema: dict[str, Any], path: list[str], source: str) -> dict[str, Any]:
    found = _resolved(root, schema)
    for key in path:
        inner = next(iter(found.get("patternProperties", {}).values()), None) if key == ANY else None
        inner = inner if key == ANY else found.get("properties", {}).get(key)
        if inner is None:
            raise ValueError(f"renamed.yaml: {source}: {key} leads nowhere")
        found = _resolved(root, inner)
    if "properties" not in found:
        raise ValueError(f"renamed.yaml: {source}: not in a mapping of known keys")
    return found


def _resolved(root: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for choice in (schema, *schema.get("anyOf", ())):
        if "$ref" in choice:
            resolved: dict[str, Any] = root["$defs"][choice["$ref"].rsplit("/", 1)[1]]
            return resolved
    return schema
