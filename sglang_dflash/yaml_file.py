"""Read a YAML file into a pydantic model; every mistake is one message that says how to mend it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, key, value and remedy."""


def read(
    model: type[Model],
    path: str | os.PathLike[str],
    *,
    where: str,
    remedy: str,
    fallbacks: Mapping[str, str] | None = None,
) -> Model:
    """Read a file and validate it; see :func:`content` and :func:`parse`."""
    found = content(path, model, where=where, remedy=remedy)
    return parse(model, found, where=where, fallbacks=fallbacks)


def content(
    path: str | os.PathLike[str], model: type[BaseModel], *, where: str, remedy: str
) -> dict[Any, Any]:
    """The mapping a file holds, not yet validated.

    Args:
        path: the YAML file.
        model: what it may say, for messages.
        where: how messages name the file: the flag or variable, and the path.
        remedy: what to do instead where the file is empty.

    Raises:
        ConfigError: the file is missing, or is not a YAML mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{where}: cannot read the file ({reason}). Name a readable YAML file in UTF-8."
        ) from error
    try:
        found = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{where}: not valid YAML ({' '.join(str(error).split())}). "
            "Write one 'key: value' per line."
        ) from error
    if found is None:
        raise ConfigError(
            f"{where}: the file is empty. Set at least one of {known_keys(model)}, or {remedy}."
        )
    if not isinstance(found, dict):
        raise ConfigError(
            f"{where}: expected 'key: value' lines, found a {type(found).__name__}: "
            f"{_shortened(found)}. Known keys: {known_keys(model)}."
        )
    return found


def parse(
    model: type[Model],
    found: Mapping[Any, Any],
    *,
    where: str,
    fallbacks: Mapping[str, str] | None = None,
) -> Model:
    """Validate a mapping of keys to values.

    Args:
        model: what it may say.
        found: the mapping; sections are mappings too.
        where: how messages name its source.
        fallbacks: what applies without a key whose default is None.

    Raises:
        ConfigError: naming the first wrong key, its value, the reason and the remedy.
    """
    _refuse_unknown_keys(model, found, where)
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        location = [part for part in first["loc"] if isinstance(part, str)]
        key = ".".join(location)
        if first["type"] == "missing":
            raise ConfigError(f"{where}: {key} is missing. Add it; it has no default.") from error
        reason = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise ConfigError(
            f"{where}: {key}={_shortened(first['input'])} is not usable: it {reason}. "
            f"Correct {key!r}{_without(model, location, fallbacks or {})}."
        ) from error


def known_keys(model: type[BaseModel]) -> str:
    """The keys of a model, for a message."""
    return ", ".join(model.model_fields)


def _refuse_unknown_keys(
    model: type[BaseModel], found: Mapping[Any, Any], where: str, prefix: str = ""
) -> None:
    for key, value in found.items():
        if key not in model.model_fields:
            close = difflib.get_close_matches(str(key).lower(), model.model_fields, n=1)
            hint = f" Did you mean {prefix + close[0]!r}?" if close else ""
            shown = repr(prefix + key if prefix else key)
            section = f" of {prefix[:-1]!r}" if prefix else ""
            raise ConfigError(
                f"{where}: unknown key {shown}.{hint} Known keys{section}: {known_keys(model)}."
            )
        section_model = model.model_fields[key].annotation
        if isinstance(section_model, type) and issubclass(section_model, BaseModel):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}: {prefix}{key} is a section of keys "
                    f"({known_keys(section_model)}), found {_shortened(value)}."
                )
            _refuse_unknown_keys(section_model, value, where, f"{prefix}{key}.")


def _without(model: type[BaseModel], location: list[str], fallbacks: Mapping[str, str]) -> str:
    """What applies if the key is removed."""
    field: Any = None
    for part in location:
        field = model.model_fields.get(part)
        if field is None:
            return ""
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    if field is None or field.is_required():
        return ""
    key = ".".join(location)
    default = field.get_default(call_default_factory=True)
    text = fallbacks.get(key) if default is None else f"the default, {default!r}"
    return f", or remove it to use {text or 'no value'}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which by itself would silently keep the last of two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep)
