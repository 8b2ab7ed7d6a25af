"""The entry point SGLang loads, and the hooks it installs.

SGLang logs and swallows whatever goes wrong while a plugin loads or a hook is applied, and then
runs its own worker. So :func:`register` imports little, catches everything, and on failure
leaves one hook behind that refuses a DFLASH launch with the stored reason; and the hook that
chooses the worker checks that all the others are live.
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


def register() -> None:
    """Entry point of ``sglang.srt.plugins``; never raises."""
    try:
        _install()
    except Exception:
        _refuse_every_launch(traceback.format_exc())


def _install() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_resolution_hook(RESOLUTION_STEP)(_resolve)
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


def _resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang_dflash import arguments, compat

    if arguments.is_dflash(server_args):
        compat.check()
    arguments.resolve(server_args, previous)


def _add_cli_args(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    from sglang_dflash import config

    result = original(parser)
    parser.add_argument(
        config.FLAG,
        type=str,
        default=None,
        metavar="FILE",
        help="YAML file that tunes DFLASH. Flags given beside it win over its keys.",
    )
    return result


def _from_cli_args(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from sglang_dflash import arguments, config

    server_args = original(*args, **kwargs)
    namespace = kwargs.get("args", args[-1] if args else None)
    path = getattr(namespace, config.FLAG.lstrip("-").replace("-", "_"), None)
    if path is not None:
        setattr(server_args, arguments.CONFIG_ATTRIBUTE, path)
    return server_args


def _create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """Choose the class that serves DFLASH; runs in every scheduler process."""
    stock = original(algorithm, server_args)
    if not algorithm.is_dflash():
        return stock
    from sglang_dflash import arguments, checkpoint, compat

    compat.check()
    _check_hooks_are_live()
    launch = arguments.launch_of(server_args)
    reason = checkpoint.served_by_sglang(server_args)
    if launch.settings.worker == "builtin":
        reason = f"worker: builtin in {launch.origins.get('worker', 'the configuration')}"
    if reason is not None:
        logger.warning("DFLASH runs on SGLang's own %s (%s)", stock.__name__, reason)
        return stock
    from sglang_dflash.worker import DFlashWorker

    logger.warning("DFLASH runs on %s.%s", DFlashWorker.__module__, DFlashWorker.__name__)
    return DFlashWorker


def _table_headroom(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Entries of a request-table row past the context length.

    A decode step maps up to two verify windows past the committed length, page-aligned;
    SGLang reserves four entries and one window, and a row that fills up would spill into the
    next request's.
    """
    entries = original(*args, **kwargs)
    from sglang.srt.runtime_context import get_schedule, get_spec

    spec = get_spec()
    if str(spec.speculative_algorithm or "").upper() != "DFLASH":
        return entries
    page_size = int(get_schedule().page_size or 1)
    return max(entries, 2 * int(spec.speculative_num_draft_tokens) + page_size - 1)


HOOKS: dict[str, Callable[..., Any]] = {
    CREATE_WORKER: _create_worker,
    ADD_CLI_ARGS: _add_cli_args,
    FROM_CLI_ARGS: _from_cli_args,
    TABLE_HEADROOM: _table_headroom,
}


def _check_hooks_are_live() -> None:
    """Raise if SGLang failed to apply one of our hooks, which it only logs."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(HOOKS) - HookRegistry._patched)
    if missing:
        raise RuntimeError(
            "DFLASH: SGLang could not apply these hooks of sglang-dflash: "
            f"{', '.join(missing)}. Its log above says why ('Failed to apply hooks'). Install "
            "the certified SGLang release (docs/compatibility.md)."
        )
