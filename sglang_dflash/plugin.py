"""The entry point SGLang loads, and the hooks it installs.

SGLang logs and swallows whatever goes wrong while a plugin loads or a hook is applied, and then
runs its own worker. So :func:`register` imports little, catches everything, and on failure
leaves one hook behind that refuses a DFLASH launch with the stored reason; and the hook that
chooses the worker checks that all the others are live. Every hook is idle for other algorithms.
"""

from __future__ import annotations

import argparse
import logging
import traceback
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("sglang_dflash")

RESOLUTION_STEP = "handle_speculative_decoding"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
TABLE_HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
VALIDATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
STOCK_WORKER = ("sglang.srt.speculative.dflash_worker_v2", "DFlashWorkerV2")


def register() -> None:
    """Entry point of ``sglang.srt.plugins``; never raises."""
    try:
        _install()
    except Exception:
        _refuse_every_launch(traceback.format_exc())


def _install() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash import arguments

    register_resolution_hook(RESOLUTION_STEP)(arguments.resolve)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _refuse_every_launch(reason: str) -> None:
    logger.error("sglang-dflash failed to load:\n%s", reason)
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook(RESOLUTION_STEP)
    def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
        algorithm = resolving_view(server_args).speculative_algorithm
        if str(algorithm or "").upper() == "DFLASH":
            raise RuntimeError(
                "--speculative-algorithm DFLASH: sglang-dflash is installed but failed to load, "
                "and SGLang's own worker would run in its place. Mend the cause below, or "
                f"uninstall sglang-dflash to use SGLang's worker.\n{reason}"
            )
        previous(server_args)


def _add_cli_args(original: Callable[..., Any], parser: argparse.ArgumentParser) -> None:
    from sglang_dflash import config

    original(parser)
    parser.add_argument(
        config.FLAG,
        type=str,
        default=None,
        metavar="FILE",
        help="DFLASH only. YAML file of settings; flags given beside it win over its keys.",
    )


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    from sglang_dflash import arguments, config

    server_args = original(cls, args)
    path = getattr(args, config.FLAG.lstrip("-").replace("-", "_"), None)
    if path is not None:
        # Not one of SGLang's fields, but pickled with them.
        setattr(server_args, arguments.CONFIG_ATTRIBUTE, path)
    return server_args


def _create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """Choose the class that serves DFLASH; runs in every scheduler process."""
    stock = original(algorithm, server_args)
    if not algorithm.is_dflash():
        return stock
    from sglang_dflash import arguments, compat

    compat.check()
    _check_hooks_are_live()
    launch = arguments.launch_of(server_args)
    logger.info("DFLASH settings: %s", launch)
    reason = launch.builtin_reason
    if (stock.__module__, stock.__name__) != STOCK_WORKER:
        reason = "the platform or another plugin brings its own worker"
    if reason is not None:
        logger.warning(
            "DFLASH worker: %s.%s, not sglang-dflash's (%s).",
            stock.__module__,
            stock.__name__,
            reason,
        )
        return stock
    from sglang_dflash.worker import DFlashWorker

    logger.info("DFLASH worker: %s.%s.", DFlashWorker.__module__, DFlashWorker.__name__)
    return DFlashWorker


def _table_headroom(original: Callable[[], int]) -> int:
    """Entries of a request-table row past the context length.

    A decode step maps two verify windows past the committed length, page-aligned. On pages of
    one token SGLang makes room for one window and four entries, so that a row near the end of
    its context would spill into the next request's.
    """
    entries = original()
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_page_size,
        get_alloc_reserve_per_decode,
    )
    from sglang.srt.runtime_context import get_spec

    if str(get_spec().speculative_algorithm or "").upper() != "DFLASH":
        return entries
    return max(entries, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def _validate_request(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: list[int] | None
) -> None:
    """Refuse token ids no embedding has a row for, and a text without tokens.

    SGLang's scheduler would stop, and every other request with it.
    """
    from sglang_dflash import platforms

    algorithm = str(manager.server_args.speculative_algorithm or "").upper()
    text_only = getattr(obj, "input_embeds", None) is None and not obj.contains_mm_input()
    if input_ids is not None and text_only and (algorithm == "DFLASH" or platforms.selected()):
        if not input_ids:
            raise ValueError("the prompt is empty: it has no tokens. Send at least one.")
        vocab_size = manager.model_config.vocab_size
        wrong = next((token for token in input_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"input_ids holds {wrong}, outside the model's vocabulary (0 to "
                f"{vocab_size - 1}). Tokenize with the model's own tokenizer."
            )
    original(manager, obj, input_ids)


HOOKS: dict[str, Callable[..., Any]] = {
    CREATE_WORKER: _create_worker,
    ADD_CLI_ARGS: _add_cli_args,
    FROM_CLI_ARGS: _from_cli_args,
    TABLE_HEADROOM: _table_headroom,
    VALIDATE_REQUEST: _validate_request,
}
"""Target -> AROUND hook; SGLang imports the target's module to apply it."""


def _check_hooks_are_live() -> None:
    """Raise if SGLang failed to apply one of our hooks, which it only logs."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(HOOKS) - HookRegistry._patched)
    if missing:
        raise RuntimeError(
            f"DFLASH: SGLang did not apply these hooks of sglang-dflash: {', '.join(missing)}. "
            "Its log above says why ('Failed to apply hooks'). Install a certified SGLang "
            "release (docs/compatibility.md), or uninstall sglang-dflash to use SGLang's own "
            "worker."
        )
