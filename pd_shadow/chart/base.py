"""What the models of chart values have in common."""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

from pd_shadow.common.config import Config, ConfigError, parse


class Values(Config):
    """One mapping of the values: camelCase, strict, described by the docstrings of its fields."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, use_attribute_docstrings=True)


class DocumentPart:
    """Marks a mapping as part of a process's own configuration document.

    Its schema is that of `model`, less the keys in `owned`, which the chart writes itself, and with nothing required.
    """

    def __init__(self, model: type[Config], *owned: str, stand_ins: Mapping[str, Any] | None = None) -> None:
        """`stand_ins`: values for required keys among `owned`, to check the rest with."""
        self.model = model
        self.owned = frozenset(owned)
        self._stand_ins = dict(stand_ins or {})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler.resolve_ref_schema(handler(TypeAdapter(self.model).core_schema))
        part = {key: value for key, value in whole.items() if key not in ("required", "title", "description")}
        part["properties"] = {key: value for key, value in whole["properties"].items() if key not in self.owned}
        return part

    def _check(self, given: dict[str, Any]) -> dict[str, Any]:
        mine = sorted(self.owned & given.keys())
        if mine:
            raise ValueError(f"{', '.join(mine)}: set by the chart itself; leave out")
        try:
            parse(self.model, {**given, **self._stand_ins}, source=self.model.__name__)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return given
