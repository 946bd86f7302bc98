"""Strict configuration: one typed model per process, unknown keys fail with their path and the nearest valid key.

Settings come from a file, from the environment and from the command line; the later ones win. A variable is named
PREFIX__KEY, or PREFIX__SECTION__KEY, with two underscores: what a platform makes up by itself never looks like that.
"""

import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from pd_shadow.common.suggestion import nearest


class Config(BaseModel):
    """Base of every configuration model: frozen, unknown keys are errors, docstrings below fields describe them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ConfigError(Exception):
    """The configuration cannot be used; the message names each field and the fix, one per line."""


C = TypeVar("C", bound=Config)


def load(
    model: type[C],
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    prefix: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> C:
    """Read a YAML file (or nothing) into `model`, variables named `prefix`__… on top, then `overrides`.

    Raises ConfigError for a file that cannot be read, is not YAML, or does not fit the model.
    """
    data: dict[str, Any] = _file(path) if path is not None else {}
    variables = _variables(model, prefix, environ) if prefix else {}
    for keys, variable in variables.items():
        _put(data, keys, _value(variable, environ[variable]), variable)
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    origins = {".".join(keys): variable for keys, variable in variables.items() if keys[0] not in given}
    return _parse(model, {**data, **given}, str(path) if path else "configuration", origins)


def parse(model: type[C], data: Mapping[str, Any], source: str = "configuration") -> C:
    """Validate a mapping; raises ConfigError with one line per problem."""
    return _parse(model, data, source, {})


def _parse(model: type[C], data: Mapping[str, Any], source: str, origins: Mapping[str, str]) -> C:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {_explain(model, problem, origins)}" for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings at the top, got {type(data).__name__}")
    return data


def _variables(model: type[BaseModel], prefix: str, environ: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """The variables that are settings, by the path of their key, outer ones first; raises ConfigError."""
    found: dict[tuple[str, ...], str] = {}
    for variable in sorted(environ):
        if not variable.startswith(f"{prefix}__"):
            continue
        keys = tuple(variable.removeprefix(f"{prefix}__").lower().split("__"))
        within: type[BaseModel] | None = model
        for key in keys:
            known = list(within.model_fields) if within is not None else []
            if key not in known:
                raise ConfigError(f"{variable}: {_unknown(key, known)}")
            within = _section(within, key) if within is not None else None
        found[keys] = variable
    return dict(sorted(found.items(), key=lambda item: len(item[0])))


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The model that a key holds; None for a value, a list or a mapping."""
    annotation = model.model_fields[key].annotation
    return None if typing.get_origin(annotation) in (list, tuple, dict) else inner_model(annotation)


def _value(variable: str, text: str) -> Any:
    """Lists and mappings are YAML, null unsets; anything else is taken as it is, for the model to convert."""
    if text != "null" and not text.startswith(("[", "{")):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{variable}: not YAML: {' '.join(str(error).split())}") from error


def _put(data: dict[str, Any], keys: tuple[str, ...], value: Any, variable: str) -> None:
    for key in keys[:-1]:
        inner = data.get(key)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"{variable}: {key} is not a section in the file")
        data[key] = data = dict(inner or {})
    data[keys[-1]] = value


def _explain(model: type[BaseModel], problem: Any, origins: Mapping[str, str]) -> str:
    loc = problem["loc"]
    if problem["type"] == "extra_forbidden":
        path = ".".join(str(part) for part in loc)
        return f"{path}: {_unknown(str(loc[-1]), list(_model_at(model, loc[:-1]).model_fields))}"
    message = problem["msg"]
    if problem["type"] == "value_error":
        # What a validator of ours says; one of a whole section says which of its fields it is about.
        message = str(problem["ctx"]["error"])
        field, colon, rest = message.partition(": ")
        if colon and field in _model_at(model, loc).model_fields:
            loc, message = (*loc, field), rest
    path = ".".join(str(part) for part in loc)
    origin = f" (from {origins[path]})" if path in origins else ""
    return f"{path}: {message}{origin}" if path else message


def _unknown(key: str, known: list[str]) -> str:
    # A key that is like no other is better told with all there are.
    near = nearest(key, known, cutoff=0.6)
    if near is not None:
        return f"unknown key; did you mean {near!r}?"
    return f"unknown key; valid keys here: {', '.join(sorted(known)) or 'none'}"


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """The model a location points into; list and mapping keys are stepped over."""
    for part in loc:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        inner = inner_model(field.annotation) if field else None
        if inner is not None:
            model = inner
    return model


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, by itself or in a list, a mapping or an option; None for anything else."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, tuple, dict, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            found = inner_model(argument)
            if found is not None:
                return found
    return None
