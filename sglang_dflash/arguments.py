"""Resolve the launch: configuration, block size, and refusals before any weight is loaded.

Runs inside SGLang's own argument resolution, around its step for speculative decoding. What it
decides travels to the scheduler processes on the pickled ``ServerArgs``, as an attribute
beside its fields.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_dflash import checkpoint, compat, config, platforms
from sglang_dflash.checkpoint import Drafter, Target
from sglang_dflash.config import (
    MAX_CANDIDATES,
    MAX_DEPTH,
    MAX_ROWS,
    ConfigError,
    Loaded,
    Settings,
)
from sglang_dflash.weights import check_weights

logger = logging.getLogger("sglang_dflash")

SOURCE = "sglang_dflash"
LAUNCH_ATTRIBUTE = "_dflash_launch"
CONFIG_ATTRIBUTE = "_dflash_config_path"
BLOCK_FLAGS = {
    "speculative_dflash_block_size": "--speculative-dflash-block-size",
    "speculative_num_draft_tokens": "--speculative-num-draft-tokens",
}
TREE_FLAGS = {
    "tree_rows": "--speculative-num-draft-tokens",
    "candidates": "--speculative-eagle-topk",
}
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
CHECKED_FORMATS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache")
"""Load formats whose files lie in the checkpoint's folder in the Hugging Face layout."""


@dataclass(frozen=True)
class Launch:
    """What a launch runs with, and where each value came from."""

    settings: Settings
    """``block_size`` holds the effective size."""
    origins: dict[str, str] = field(default_factory=dict)
    """Setting -> the flag, file or checkpoint it came from, or ``default``."""
    builtin_reason: str | None = None
    """Why SGLang's own worker class serves this launch, or None where ours does."""

    def __str__(self) -> str:
        values = self.settings.model_dump().items()
        return ", ".join(f"{key}={value} ({self.origins[key]})" for key, value in values)


class Refusal(NamedTuple):
    """A mode that is refused at launch."""

    field: str
    """Of ``ServerArgs``; the flag is its name in dashes."""
    when: str
    """The refused values, in words."""
    applies: Callable[[Any, Any], bool]
    """Whether a value, among all arguments, is refused."""
    reason: str
    remedy: str
    builtin_serves: bool = False
    """Whether SGLang's own worker, chosen with ``worker: builtin``, is let through."""

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.field.replace("_", "-")

    @property
    def instead(self) -> str:
        """What to do, as one sentence's end."""
        builtin = f", or serve it on SGLang's own worker with worker: builtin in {config.FLAG}"
        return self.remedy + (builtin if self.builtin_serves else "")


def _above(limit: float) -> Callable[[Any, Any], bool]:
    return lambda value, args: value is not None and value > limit


def _other_than(*ordinary: Any) -> Callable[[Any, Any], bool]:
    return lambda value, args: value is not None and value not in ordinary


def _untested_device(device: Any, args: Any) -> bool:
    kind = str(device).partition(":")[0]
    return kind != "cuda" and not (kind == "cpu" and platforms.selected())


_LOSSLESS = "this worker accepts a token exactly where the target itself would emit it"

UNSUPPORTED: tuple[Refusal, ...] = (
    Refusal(
        "pp_size",
        "above 1",
        _above(1),
        "the drafter reads features of layers that pipeline parallelism puts on other ranks",
        "use --tp-size",
    ),
    Refusal(
        "device",
        f"other than cuda, or cpu with SGLANG_PLATFORM={platforms.NAME}",
        _untested_device,
        "this worker's kernels are written for CUDA and for this package's CPU platform",
        f"on a machine without a GPU set SGLANG_PLATFORM={platforms.NAME}",
        builtin_serves=True,
    ),
    Refusal(
        "use_ray",
        "set",
        _other_than(False),
        "SGLang loads no plugins in Ray actors, so its own worker would run instead",
        "launch without Ray",
        builtin_serves=True,
    ),
    Refusal(
        "disaggregation_mode",
        "prefill or decode",
        _other_than("null"),
        "the transfer of the drafter's context between prefill and decode servers is not tested "
        "with this worker",
        "serve prefill and decode in one server",
        builtin_serves=True,
    ),
    Refusal(
        "speculative_adaptive",
        "set",
        _other_than(False),
        "it adapts the number of EAGLE steps, and a DFlash block is drafted in one",
        "drop the flag",
    ),
    Refusal(
        "speculative_num_steps",
        "above 1",
        _above(1),
        "a DFlash block is drafted in one step",
        f"drop the flag; {BLOCK_FLAGS['speculative_dflash_block_size']} sets how far to draft",
    ),
    Refusal(
        "speculative_accept_threshold_single",
        "other than 1.0",
        _other_than(1.0),
        f"a threshold accepts tokens the target would not emit, and {_LOSSLESS}",
        "drop the flag",
        builtin_serves=True,
    ),
    Refusal(
        "speculative_accept_threshold_acc",
        "other than 1.0",
        _other_than(1.0),
        f"a threshold accepts tokens the target would not emit, and {_LOSSLESS}",
        "drop the flag",
        builtin_serves=True,
    ),
    Refusal(
        "speculative_draft_sink_size",
        "set",
        _other_than(0),
        "SGLang reads it for EAGLE drafters only, so it would do nothing",
        "drop the flag; --speculative-draft-window-size works without it",
    ),
)
"""Every mode this package refuses; docs/compatibility.md shows the same rows."""


def unsupported_table() -> str:
    """:data:`UNSUPPORTED` as a Markdown table."""
    rows = [
        f"| `{refusal.flag}` | {refusal.when} | {refusal.reason} | {refusal.instead} |"
        for refusal in UNSUPPORTED
    ]
    return "\n".join(("| flag | refused | because | instead |", "|---|---|---|---|", *rows))


def launch_of(server_args: Any) -> Launch:
    """The launch resolved for these arguments.

    Raises:
        RuntimeError: they were resolved before the plugin was loaded, so nothing was checked.
    """
    launch = getattr(server_args, LAUNCH_ATTRIBUTE, None)
    if launch is None:
        raise RuntimeError(
            "DFLASH: these ServerArgs were resolved before SGLang loaded its plugins, so neither "
            "the drafter nor the flags were checked. Call sglang.srt.plugins.load_plugins() "
            "before ServerArgs.resolve_once(), or pass the arguments to Engine(...) itself."
        )
    return launch


def is_dflash(args: Any) -> bool:
    """Whether a view of the arguments asks for DFLASH."""
    return str(args.speculative_algorithm or "").upper() == "DFLASH"


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's resolution step for speculative decoding, with ours around it.

    Args:
        server_args: the arguments under resolution.
        previous: the step this one wraps.

    Raises:
        ValueError: a flag, key or checkpoint that cannot be served; nothing is loaded yet.
        IncompatibleError: the installed SGLang is not a certified one.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    args = resolving_view(server_args)
    config_path = getattr(server_args, CONFIG_ATTRIBUTE, None)
    if not is_dflash(args):
        if config_path is not None:
            raise ConfigError(
                f"{config.FLAG}={config_path}: only DFLASH reads this file, but "
                f"--speculative-algorithm is {args.speculative_algorithm}. Add "
                f"--speculative-algorithm DFLASH, or drop {config.FLAG}."
            )
        previous(server_args)
        return

    compat.check()
    loaded = config.find(config_path)
    drafter = checkpoint.read_drafter(
        args.speculative_draft_model_path,
        revision=args.speculative_draft_model_revision,
        config_file=(args.decrypted_draft_config_file or "").strip() or None,
        overrides=json.loads(args.json_model_override_args or "{}"),
    )
    builtin_reason = _builtin_reason(loaded, drafter)
    refuse_unsupported(args, builtin=builtin_reason is not None)
    block_size, origin = chosen_block_size(args, loaded)
    tree, tree_origins = chosen_tree(args, loaded)
    target = Target.of(args.model_path, model_config_of(server_args))
    if drafter is not None:
        check_drafter(args, drafter, target)
        block_size = _against_trained(drafter, block_size, origin)
    if block_size is not None:
        require_block_fits(block_size, target.context_length, f"the context of {target.path}")
        if args.max_total_tokens is not None:
            # The scheduler reserves two windows ahead of every request.
            require_block_fits(2 * block_size, args.max_total_tokens, "--max-total-tokens")
        # SGLang's own resolution knows chains only: it may see no width but the block's.
        declare_resolution(
            server_args,
            SOURCE,
            speculative_dflash_block_size=block_size,
            speculative_num_draft_tokens=block_size,
            speculative_eagle_topk=1,
        )
    previous(server_args)

    block_size = int(args.speculative_num_draft_tokens)
    settings = loaded.settings.model_copy(update={**tree, "block_size": block_size})
    origins = {**loaded.origins, **tree_origins, "block_size": origin}
    launch = Launch(settings, origins, builtin_reason)
    rows = verify_rows(args, launch)
    if rows != block_size:
        require_block_fits(rows, target.context_length, f"the context of {target.path}")
        if args.max_total_tokens is not None:
            require_block_fits(2 * rows, args.max_total_tokens, "--max-total-tokens")
        # Reservations, request-table head-room and results follow the width of the verify pass.
        declare_resolution(server_args, SOURCE, speculative_num_draft_tokens=rows)
    setattr(server_args, LAUNCH_ATTRIBUTE, launch)


def _builtin_reason(loaded: Loaded, drafter: Drafter | None) -> str | None:
    if loaded.settings.worker == "builtin":
        return f"worker: builtin, from {loaded.source}"
    return drafter.served_by_sglang if drafter is not None else None


def refuse_unsupported(args: Any, *, builtin: bool = False) -> None:
    """Raise for the first mode in :data:`UNSUPPORTED` that a view of the arguments asks for.

    Args:
        args: the arguments.
        builtin: SGLang's own worker is to serve them.
    """
    for refusal in UNSUPPORTED:
        value = getattr(args, refusal.field)
        if refusal.applies(value, args) and not (builtin and refusal.builtin_serves):
            raise ValueError(
                f"DFLASH: {refusal.flag}={value} is not supported: {refusal.reason}. Instead, "
                f"{refusal.instead}."
            )


def chosen_block_size(args: Any, loaded: Loaded) -> tuple[int | None, str]:
    """The block size the user chose, and where; None to take the drafter's.

    Raises:
        ValueError: a flag leaves nothing to draft.
    """
    for name, flag in BLOCK_FLAGS.items():
        value = getattr(args, name)
        if value is None:
            continue
        if value < 2:
            raise ValueError(
                f"DFLASH: {flag}={value} leaves nothing to draft: a block is the anchor and at "
                "least one drafted token. Use 2 or more, or drop the flag to take the drafter's "
                "trained block size."
            )
        return int(value), flag
    if loaded.settings.block_size is not None:
        return loaded.settings.block_size, loaded.origins["block_size"]
    return None, "the drafter's config.json"


def chosen_tree(args: Any, loaded: Loaded) -> tuple[dict[str, int], dict[str, str]]:
    """The tree keys that SGLang's own flags set, and the flag of each.

    ``--speculative-num-draft-tokens`` is the block where it stands alone, and the tree's rows
    beside ``--speculative-dflash-block-size``.

    Raises:
        ValueError: a flag's value cannot be served.
    """
    found: dict[str, int] = {}
    if args.speculative_eagle_topk is not None:
        found["candidates"] = _within(args.speculative_eagle_topk, 1, MAX_CANDIDATES, "candidates")
    block_size, rows = args.speculative_dflash_block_size, args.speculative_num_draft_tokens
    if None not in (block_size, rows):
        widest = max(MAX_ROWS, block_size)  # a chain may be longer than a tree is wide
        found["tree_rows"] = _within(rows, 2, widest, "tree_rows")
    return found, {key: TREE_FLAGS[key] for key in found}


def _within(value: Any, low: int, high: int, key: str) -> int:
    if not low <= value <= high:
        raise ValueError(
            f"DFLASH: {TREE_FLAGS[key]}={value} is not usable: {key} of a draft tree goes from "
            f"{low} to {high}. Correct it, or drop the flag."
        )
    return int(value)


def verify_rows(args: Any, launch: Launch) -> int:
    """Rows of a request in one verify pass.

    Raises:
        ValueError: the tree asked for cannot be served.
    """
    settings, origins = launch.settings, launch.origins
    block_size, tree = int(settings.block_size or 0), settings.tree_shape
    if tree is None:
        if settings.tree_rows is None and origins["candidates"] in TREE_FLAGS.values():
            _refuse_tree(
                origins,
                {"candidates": settings.candidates} if settings.candidates > 1 else {},
                "it is a tree's, and no tree is asked for",
                "Set tree_rows too, or drop it",
            )
        return block_size
    rows = {"tree_rows": tree.rows}
    chain = "remove it to verify the block's chain"
    if launch.builtin_reason is not None:
        reason = f"SGLang's own worker serves this launch ({launch.builtin_reason})"
        _refuse_tree(origins, rows, f"{reason}, and verifies chains only", f"Instead, {chain}")
    if str(args.device).partition(":")[0] != "cpu":
        reason = "trees are verified by this package's CPU platform only in this version"
        _refuse_tree(origins, rows, reason, f"On {args.device}, {chain}")
    if args.speculative_draft_window_size is not None:
        reason = "--speculative-draft-window-size is not tested with trees"
        _refuse_tree(origins, rows, reason, f"Drop one of the two: {chain}")
    if tree.rows < block_size:
        reason = f"a tree has at least the {block_size} rows of its block"
        remedy = f"Set {block_size} or more, or a smaller block_size, or {chain}"
        _refuse_tree(origins, rows, reason, remedy)
    if block_size > MAX_DEPTH + 1:
        reason = f"a tree is at most {MAX_DEPTH} deep, and the block drafts {block_size - 1} tokens"
        _refuse_tree(origins, rows, reason, f"Set a smaller block_size, or {chain}")
    if tree.candidates == 1 and tree.rows > block_size:
        reason = f"one token per position fills only the {block_size} rows of the chain"
        one = {"candidates": 1, **rows}
        _refuse_tree(origins, one, reason, f"Set more candidates, or {chain}")
    return tree.rows


def _refuse_tree(origins: dict[str, str], values: dict[str, int], reason: str, remedy: str) -> None:
    for key, value in values.items():
        raise ValueError(
            f"DFLASH: {key}={value} (from {origins[key]}) cannot be served: {reason}. {remedy}."
        )


def check_drafter(args: Any, drafter: Drafter, target: Target) -> None:
    """Check everything about the drafter that needs no weights.

    Raises:
        CheckpointError: it cannot be used with this target.
    """
    checkpoint.check_pair(drafter, target)
    if (args.speculative_draft_load_format or args.load_format) in CHECKED_FORMATS:
        check_weights(drafter)
    _check_context_length(args, drafter, target)


def _check_context_length(args: Any, drafter: Drafter, target: Target) -> None:
    """What SGLang would refuse only once the target's weights are loaded."""
    from sglang.srt.environ import envs
    from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length

    if getattr(envs, LONGER_CONTEXT).get():
        return
    draft_config = get_config(
        drafter.path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args or "{}"),
    )
    length = get_context_length(draft_config.get_text_config())
    if length < target.context_length:
        raise drafter.error(
            f"the drafter's context length is {length}, but {target.path} is served with "
            f"{target.context_length}, and it drafts at the target's positions. Add "
            f"--context-length {length}, or set {LONGER_CONTEXT}=1 to draft past what it was "
            "trained for, where accept lengths may fall."
        )


def _against_trained(drafter: Drafter, block_size: int | None, origin: str) -> int:
    """The block size to run, given the one the drafter was trained for."""
    trained = checkpoint.trained_block_size(drafter)
    if block_size is None:
        if trained is None:
            raise drafter.error(
                "block_size is missing, and without it the drafter's trained block is unknown. "
                f"Set {BLOCK_FLAGS['speculative_dflash_block_size']} to the size it was trained "
                "with."
            )
        return trained
    if trained is not None and block_size > trained:
        logger.warning(
            "DFLASH: block size %d (%s) is larger than the %d that %s was trained for. Positions "
            "past it were never trained and are rarely accepted, but cost the target as much.",
            block_size,
            origin,
            trained,
            drafter.path,
        )
    return block_size


def require_block_fits(needed: int, available: int, where: str) -> None:
    """Refuse a block that its pool or context cannot hold beside one token of text.

    Args:
        needed: positions the block takes.
        available: positions there are.
        where: what holds them, for the message.

    Raises:
        ValueError: it does not fit.
    """
    if needed >= available:
        raise ValueError(
            f"DFLASH: the block needs {needed} positions beside the text, but {where} holds "
            f"{available}. Set a smaller {BLOCK_FLAGS['speculative_dflash_block_size']}, or "
            "enlarge it."
        )
