"""Run by test_plugin.py in a process of its own: loads SGLang with the plugin, tries cases.

Reads the cases from the JSON file it is given, writes what happened to stdout as one line.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

FIELDS = (
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_eagle_topk",
    "speculative_num_steps",
)


class Lines(logging.Handler):
    """Collects the plugin's log messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def child(pickled: bytes, results: Any) -> None:
    """A scheduler process, as far as arguments go."""
    from sglang_dflash import arguments

    results.put({k: str(arguments.launch_of(v)) for k, v in pickle.loads(pickled).items()})


def resolve(case: dict[str, Any]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    with mock.patch.dict(os.environ, case.get("environment", {})):
        server_args = prepare_server_args(case["argv"])
        server_args.resolve_once()
    return server_args


def described(server_args: Any) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolving_view

    launch = getattr(server_args, "_dflash_launch", None)
    view = resolving_view(server_args)
    return {
        "launch": launch and str(launch),
        "settings": launch and launch.settings.model_dump(),
        "origins": launch and launch.origins,
        "fields": {name: getattr(view, name) for name in FIELDS},
    }


def attempt(function: Any, *args: Any) -> str | None:
    try:
        function(*args)
    except Exception as error:
        return str(error)
    return None


def create_worker(server_args: Any) -> dict[str, Any]:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    handler = Lines()
    logger = logging.getLogger("sglang_dflash")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        worker = SpeculativeAlgorithm.DFLASH.create_worker(server_args)
    finally:
        logger.removeHandler(handler)
    return {"class": f"{worker.__module__}.{worker.__name__}", "log": handler.lines}


def headroom() -> dict[str, dict[str, int]]:
    """Entries past the context, for page sizes 1 and 16, with DFLASH and without."""
    from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator
    from sglang.srt.runtime_context import get_context

    context, found = get_context(), {}
    speculation = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8}
    function = allocation_sizing.get_req_to_token_extra_context_len
    for page_size in (1, 16):
        context.override("test", page_size=page_size, **speculation)
        entries = {
            "DFLASH": function(),
            "by name": kv_cache_configurator.get_req_to_token_extra_context_len(),
        }
        context.override("test", **dict.fromkeys(speculation))
        found[str(page_size)] = {**entries, "none": function()}
    return found


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    report: dict[str, Any] = {}

    before = set(sys.modules)
    from sglang_dflash import arguments, compat, plugin

    heavy = {"torch", "triton", "transformers", "sglang"}
    report["heavy_modules_imported"] = sorted(heavy & (set(sys.modules) - before))

    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    from sglang.srt.arg_groups import resolution_hooks

    report["patched"] = sorted(HookRegistry._patched)
    report["resolution_hooks"] = [
        f"{hook.__module__}.{hook.__qualname__}"
        for hook in resolution_hooks._HOOKS["handle_speculative_decoding"]
        if hook.__module__.startswith("sglang_dflash.")
    ]

    resolved: dict[str, Any] = {}
    report["cases"] = {}
    for name, case in cases.items():
        try:
            resolved[name] = resolve(case)
            report["cases"][name] = described(resolved[name])
        except Exception as error:
            report["cases"][name] = {"error": str(error)}

    import argparse

    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="server", conflict_handler="resolve")
    ServerArgs.add_cli_args(parser)
    text = parser.format_help()
    report["help"] = text[text.index("--speculative-dflash-config") :][:200]
    names = field_names(ServerArgs)
    report["unknown_refusal_fields"] = [
        r.field for r in arguments.UNSUPPORTED if r.field not in names
    ]
    report["refusal_flags_not_in_help"] = [
        r.flag for r in arguments.UNSUPPORTED if r.flag not in text
    ]

    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    travellers = {name: resolved[name] for name in ("plain", "file", "builtin")}
    process = spawn.Process(target=child, args=(pickle.dumps(travellers), results))
    process.start()

    report["workers"] = {
        name: create_worker(resolved[name]) for name in ("plain", "builtin", "domino")
    }
    with mock.patch.object(HookRegistry, "_patched", set(plugin.HOOKS) - {plugin.TABLE_HEADROOM}):
        report["worker_without_a_hook"] = attempt(create_worker, resolved["plain"])
    report["worker_without_launch"] = attempt(create_worker, resolved["no speculation"])
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    with mock.patch.object(SpeculativeAlgorithm, "get_platform_worker_cls", return_value=dict):
        report["foreign_worker"] = create_worker(resolved["plain"])

    compat.check.cache_clear()
    version = importlib.metadata.version
    with mock.patch.object(
        importlib.metadata, "version", lambda name: "9.9.9" if name == "sglang" else version(name)
    ):
        report["uncertified"] = attempt(resolve, cases["plain"])
        report["uncertified worker"] = attempt(create_worker, resolved["plain"])
        report["uncertified without DFLASH"] = attempt(resolve, cases["no speculation"])

    report["spawned"] = results.get(timeout=120)
    process.join(60)

    from sglang.srt.runtime_context import publish

    publish(resolved["plain"], role="scheduler")
    report["headroom"] = headroom()
    print()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
