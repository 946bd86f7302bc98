"""Strict configuration: one typed model per process, unknown keys fail with their path and the nearest valid key."""

import difflib
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class Config(BaseModel):
    """Base of every configuration model: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ConfigError(Exception):
    """The configuration cannot be used; the message names each field and the fix, one per line."""


C = TypeVar("C", bound=Config)


def load(model: type[C], path: Path | None, overrides: Mapping[str, Any] | None = None) -> C:
    """Read a YAML file (or nothing) into `model`, `overrides` on top; values from the command line win.

    Raises ConfigError for a file that cannot be read, is not YAML, or does not fit the model.
    """
    data: Any = {}
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a mapping of settings at the top, got {type(data).__name__}")
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    return parse(model, {**data, **given}, source=str(path) if path else "configuration")


def parse(model: type[C], data: Mapping[str, Any], source: str = "configuration") -> C:
    """Validate a mapping; raises ConfigError with one line per problem."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {_explain(model, problem)}" for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _explain(model: type[BaseModel], problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{path or 'top level'}: {problem['msg']}"
    keys = list(_model_at(model, problem["loc"][:-1]).model_fields)
    near = difflib.get_close_matches(str(problem["loc"][-1]), keys, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"valid keys here: {', '.join(sorted(keys))}"
    return f"{path}: unknown key; {fix}"


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """The model a location points into; list and mapping keys are stepped over."""
    for part in loc:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        inner = _inner_model(field.annotation) if field else None
        if inner is not None:
            model = inner
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, tuple, dict, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            found = _inner_model(argument)
            if found is not None:
                return found
    return None
