"""What ``--speculative-dflash-config FILE`` may say, and how it is read.

A value comes from a flag if one was given, else from the file, else from the drafter's
config.json, else from the default below. Where each effective value came from is kept beside
it. A new setting is one field of :class:`Settings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from sglang_dflash import yaml_file
from sglang_dflash.yaml_file import ConfigError

__all__ = ["ConfigError", "Loaded", "Settings", "TreeShape", "find", "load"]

FLAG = "--speculative-dflash-config"
ENVIRONMENT = "SGLANG_DFLASH_CONFIG"
"""Names the file where there is no command line, as with SGLang's offline ``Engine``."""


MAX_ROWS, MAX_CANDIDATES, MAX_DEPTH = 128, 16, 31
"""Of :mod:`sglang_dflash.kernels.grow_tree`, which is too heavy to import for a check."""


class TreeShape(NamedTuple):
    """How the tree of a block is grown; see :mod:`sglang_dflash.kernels.grow_tree`."""

    rows: int
    """Verify rows, root included."""
    candidates: int = 8
    """Tokens per position that may enter."""
    keep_spine: bool = True
    """Take the likeliest token of every position before anything else."""
    spine_discount: float = 0.0
    """Penalty in nats of every edge below a node that is off the spine."""


class Settings(BaseModel):
    """Everything a configuration file can say. Frozen; unknown keys are refused."""

    # Strict: YAML has types of its own, and "yes" is no number of steps.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    block_size: Annotated[int, Field(ge=2)] | None = None
    """Rows of the block, anchor included. None takes the drafter's trained size."""
    tree_rows: Annotated[int, Field(ge=2, le=MAX_ROWS)] | None = None
    """Rows of the tree that is verified of a block, anchor included. None verifies a chain."""
    candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 8
    """Tokens per position of the block that may enter a tree."""
    keep_spine: bool = True
    """Whether the likeliest token of every position is in the tree before anything else."""
    spine_discount: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Penalty in nats of every edge below a token that is not its position's likeliest."""
    worker: Literal["dflash", "builtin"] = "dflash"
    """``builtin`` runs SGLang's own worker class, for comparison and for what only it serves."""
    log_every: Annotated[int, Field(ge=0)] = 500
    """Steps between accept-length log lines; 0 logs none."""

    @property
    def tree_shape(self) -> TreeShape | None:
        """The tree of a block, or None where the block's chain is verified as it is."""
        if self.tree_rows is None or (self.keep_spine and self.tree_rows == self.block_size):
            return None
        return TreeShape(self.tree_rows, self.candidates, self.keep_spine, self.spine_discount)


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
    return yaml_file.read(
        Settings, path, where=where, remedy=f"drop {source}", fallbacks=_FALLBACKS
    )


_FALLBACKS = {"block_size": "the drafter's own", "tree_rows": "the block's chain"}
