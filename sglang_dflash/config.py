"""The YAML behind ``--speculative-dflash-config``: keys, loading and precedence.

A value comes from the flag if one was given, else from the file, else from the drafter's
config.json. Where each effective value came from is kept beside it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

FLAG = "--speculative-dflash-config"
ENVIRONMENT = "SGLANG_DFLASH_CONFIG"

Count = Annotated[int, Field(strict=True)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, key and remedy."""


class Settings(BaseModel):
    """Everything a configuration file can say. Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Rows of the block, anchor included. None takes the drafter's trained size."""
    worker: Literal["dflash", "builtin"] = "dflash"
    """``builtin`` runs SGLang's own worker class, for comparison."""
    log_every: Annotated[int, Field(strict=True, ge=0)] = 500
    """Steps between accept-length log lines; 0 logs none."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which would silently keep the last of two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


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
        raise ConfigError(f"{where}: cannot read the file ({reason}). Check the path.") from error
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{where}: not valid YAML ({' '.join(str(error).split())}). "
            "Write one 'key: value' per line."
        ) from error
    if content is None:
        raise ConfigError(
            f"{where}: the file is empty. Give at least one key ({_known_keys()}), or drop {source}."
        )
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where}: expected a mapping of keys to values, found {type(content).__name__}. "
            f"Known keys: {_known_keys()}."
        )
    return parse(content, where=where)


def parse(content: dict[Any, Any], *, where: str = FLAG) -> Settings:
    """Validate a mapping of keys to values.

    Raises:
        ConfigError: naming the first wrong key, its value, the reason and the remedy.
    """
    for key in content:
        if key not in Settings.model_fields:
            close = difflib.get_close_matches(str(key), Settings.model_fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"{where}: unknown key {key!r}.{hint} Known keys: {_known_keys()}."
            )
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        reason = first["msg"].removeprefix("Input ").rstrip(".")
        raise ConfigError(
            f"{where}: {key}: {first['input']!r} is not usable: it {reason}. "
            f"Correct {key!r} or remove it to use the default ({_default(key)})."
        ) from error


def from_environment() -> Settings | None:
    """Settings from the file named by ``SGLANG_DFLASH_CONFIG``, or None where it is unset."""
    path = os.environ.get(ENVIRONMENT)
    return load(path, source=ENVIRONMENT) if path else None


def _known_keys() -> str:
    return ", ".join(Settings.model_fields)


def _default(key: str) -> str:
    default = Settings.model_fields[key].default
    return "the drafter's own" if default is None else repr(default)
