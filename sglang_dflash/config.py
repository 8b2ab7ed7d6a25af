"""What ``--speculative-dflash-config FILE`` may say, and how it is read.

A value comes from a flag if one was given, else from the file, else from the drafter's
config.json, else from the default below. Where each effective value came from is kept beside
it. A new setting is one field of :class:`Settings`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

FLAG = "--speculative-dflash-config"
ENVIRONMENT = "SGLANG_DFLASH_CONFIG"
"""Names the file where there is no command line, as with SGLang's offline ``Engine``."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, key, value and remedy."""


class Settings(BaseModel):
    """Everything a configuration file can say. Frozen; unknown keys are refused."""

    # Strict: YAML has types of its own, and "yes" is no number of steps.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    block_size: Annotated[int, Field(ge=2)] | None = None
    """Rows of the block, anchor included. None takes the drafter's trained size."""
    worker: Literal["dflash", "builtin"] = "dflash"
    """``builtin`` runs SGLang's own worker class, for comparison and for what only it serves."""
    log_every: Annotated[int, Field(ge=0)] = 500
    """Steps between accept-length log lines; 0 logs none."""


@dataclass(frozen=True)
class Loaded:
    """Settings as read, before flags and the drafter have their say."""

    settings: Settings = field(default_factory=Settings)
    source: str = "default"
    """The flag or variable and the file, or ``default``."""

    @property
    def origins(self) -> dict[str, str]:
        """Where every value came from, key by key."""
        given = self.settings.model_fields_set
        return {key: self.source if key in given else "default" for key in Settings.model_fields}


def find(path: str | None, environment: Mapping[str, str] = os.environ) -> Loaded:
    """Settings from the flag's file, else from the variable's file, else the defaults.

    Raises:
        ConfigError: the file cannot be used.
    """
    if path is not None:
        return Loaded(load(path), f"{FLAG}={path}")
    if named := environment.get(ENVIRONMENT):
        return Loaded(load(named, source=ENVIRONMENT), f"{ENVIRONMENT}={named}")
    return Loaded()


def load(path: str | os.PathLike[str], *, source: str = FLAG) -> Settings:
    """Read a configuration file.

    Args:
        path: the YAML file.
        source: the flag or variable that named it, for messages.

    Raises:
        ConfigError: the file is missing, is not a YAML mapping, or holds a wrong key or value.
    """
    where = f"{source}={os.fspath(path)}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{where}: cannot read the file ({reason}). Name a readable YAML file in UTF-8."
        ) from error
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{where}: not valid YAML ({' '.join(str(error).split())}). "
            "Write one 'key: value' per line."
        ) from error
    if content is None:
        raise ConfigError(
            f"{where}: the file is empty. Set at least one of {_known_keys()}, or drop {source}."
        )
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where}: expected 'key: value' lines, found a {type(content).__name__}: "
            f"{_shortened(content)}. Known keys: {_known_keys()}."
        )
    return parse(content, where=where)


def parse(content: dict[Any, Any], *, where: str = FLAG) -> Settings:
    """Validate a mapping of keys to values.

    Raises:
        ConfigError: naming the first wrong key, its value, the reason and the remedy.
    """
    for key in content:
        if key not in Settings.model_fields:
            close = difflib.get_close_matches(str(key).lower(), Settings.model_fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{where}: unknown key {key!r}.{hint} Known keys: {_known_keys()}.")
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        reason = first["msg"].removeprefix("Input ")
        raise ConfigError(
            f"{where}: {key}={_shortened(first['input'])} is not usable: it {reason}. "
            f"Correct {key!r}, or remove it to use {_default(key)}."
        ) from error


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


def _known_keys() -> str:
    return ", ".join(Settings.model_fields)


def _default(key: str) -> str:
    default = Settings.model_fields[key].default
    return "the drafter's own" if default is None else f"the default, {default!r}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
