"""Resolve the launch: configuration, block size, and refusals before any weight is loaded.

Runs inside SGLang's own argument resolution, around its step for speculative decoding. What it
decides travels to the scheduler processes on the pickled ``ServerArgs``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_dflash import checkpoint, config
from sglang_dflash.config import ConfigError, Settings

logger = logging.getLogger("sglang_dflash")

ATTRIBUTE = "_dflash_launch"
"""Where the launch is kept on ``ServerArgs``: not one of its fields, but pickled with it."""
CONFIG_ATTRIBUTE = "_dflash_config_path"
SOURCE = "sglang_dflash"
BLOCK_FLAGS = {
    "speculative_dflash_block_size": "--speculative-dflash-block-size",
    "speculative_num_draft_tokens": "--speculative-num-draft-tokens",
}


@dataclass(frozen=True)
class Launch:
    """What this launch runs with, and where each value came from."""

    settings: Settings = field(default_factory=Settings)
    origins: dict[str, str] = field(default_factory=dict)
    """Effective key -> flag, file or checkpoint that set it."""


class Refusal(NamedTuple):
    """A mode that DFLASH cannot serve, refused at launch."""

    flag: str
    applies: Callable[[Any], bool]
    value: Callable[[Any], Any]
    reason: str
    remedy: str


def _set(name: str, ordinary: Any) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, ordinary) not in (None, ordinary)


def _value(name: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, name, None)


UNSUPPORTED: tuple[Refusal, ...] = (
    Refusal(
        "--pp-size",
        _set("pp_size", 1),
        _value("pp_size"),
        "the drafter reads features of layers that pipeline parallelism puts on other ranks",
        "use --tp-size instead",
    ),
    Refusal(
        "--use-ray",
        _set("use_ray", False),
        _value("use_ray"),
        "SGLang loads no plugins in Ray actors, so its own worker would run instead",
        "launch without Ray",
    ),
    Refusal(
        "--disaggregation-mode",
        _set("disaggregation_mode", "null"),
        _value("disaggregation_mode"),
        "the drafter's context K/V is not transferred between prefill and decode nodes",
        "serve prefill and decode in one server",
    ),
    Refusal(
        "--speculative-adaptive",
        _set("speculative_adaptive", False),
        _value("speculative_adaptive"),
        "SGLang adapts the steps of EAGLE chains, and a DFlash block is one step",
        "drop the flag",
    ),
    Refusal(
        "--speculative-eagle-topk",
        lambda args: (getattr(args, "speculative_eagle_topk", None) or 1) > 1,
        _value("speculative_eagle_topk"),
        "this version verifies chains, one candidate per position",
        "drop the flag or set it to 1",
    ),
)
"""Every mode refused at launch; docs/compatibility.md lists the same rows."""


def launch_of(server_args: Any) -> Launch:
    """The launch resolved for these arguments; defaults where resolution did not see them."""
    return getattr(server_args, ATTRIBUTE, None) or Launch()


def is_dflash(args: Any) -> bool:
    """Whether these arguments ask for DFLASH."""
    return str(getattr(args, "speculative_algorithm", None) or "").upper() == "DFLASH"


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's resolution step for speculative decoding, with ours around it.

    Args:
        server_args: the arguments under resolution.
        previous: the step this one wraps.

    Raises:
        ValueError: a flag, key or checkpoint that cannot be served; nothing is loaded yet.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    args = resolving_view(server_args)
    config_path = getattr(server_args, CONFIG_ATTRIBUTE, None)
    if not is_dflash(args):
        if config_path:
            raise ConfigError(
                f"{config.FLAG}={config_path}: only DFLASH reads this file, but "
                f"--speculative-algorithm is {args.speculative_algorithm!r}. Add "
                f"--speculative-algorithm DFLASH or drop {config.FLAG}."
            )
        previous(server_args)
        return

    settings, source = _load_settings(config_path)
    refuse_unsupported(args)
    block_size, origin = _block_size(args, settings, source)
    pair = checkpoint.inspect(args, block_size=block_size)
    if block_size is None:
        block_size, origin = pair.block_size, "the drafter's config.json"
    origins = {name: source for name in settings.model_fields_set}
    origins["block_size"] = origin
    declare_resolution(
        server_args,
        SOURCE,
        speculative_dflash_block_size=block_size,
        speculative_num_draft_tokens=block_size,
    )
    previous(server_args)
    setattr(
        server_args,
        ATTRIBUTE,
        Launch(settings.model_copy(update={"block_size": block_size}), origins),
    )


def refuse_unsupported(args: Any) -> None:
    """Raise for the first mode in :data:`UNSUPPORTED` that the arguments ask for."""
    for refusal in UNSUPPORTED:
        if refusal.applies(args):
            raise ValueError(
                f"DFLASH: {refusal.flag}={refusal.value(args)} is not supported: "
                f"{refusal.reason}. Instead, {refusal.remedy}."
            )


def _load_settings(config_path: str | None) -> tuple[Settings, str]:
    if config_path:
        return config.load(config_path), f"{config.FLAG}={config_path}"
    settings = config.from_environment()
    if settings is not None:
        return settings, f"the file in {config.ENVIRONMENT}"
    return Settings(), "default"


def _block_size(args: Any, settings: Settings, source: str) -> tuple[int | None, str]:
    """The block size the user chose and where, or None to take the drafter's."""
    given = {
        flag: int(value)
        for name, flag in BLOCK_FLAGS.items()
        if (value := getattr(args, name, None)) is not None
    }
    if len(set(given.values())) > 1:
        pairs = " and ".join(f"{flag}={value}" for flag, value in given.items())
        raise ValueError(
            f"DFLASH: {pairs} differ, but this version verifies chains, whose rows are the "
            "block itself. Give one of the two flags, or the same value to both."
        )
    for flag, value in given.items():
        if value < 2:
            raise ValueError(
                f"DFLASH: {flag}={value} leaves nothing to draft: a block holds the anchor and "
                "at least one drafted token. Use 2 or more, or drop the flag to take the "
                "drafter's trained block size."
            )
        return value, flag
    return settings.block_size, source
