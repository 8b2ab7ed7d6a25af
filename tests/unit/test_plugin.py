"""The plugin inside SGLang: real loading, real hooks, real argument resolution, real pickling.

Importing SGLang takes seconds and a plugin loads once per process, so the cases run in a few
processes of their own, started together; each test reads its part of what they report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafter_files import write_drafter, write_target

LABORATORY = Path(__file__).with_name("plugin_laboratory.py")
DFLASH = ["--speculative-algorithm", "DFLASH"]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if "SGLANG" not in key}
    return subprocess.Popen(
        [sys.executable, *command],
        env={**inherited, "SGLANG_PLATFORM": "dflash_cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Laboratory:
    """What SGLang made of a set of command lines."""

    def __init__(self, folder: Path):
        self.target = write_target(folder / "target")
        self.drafter = write_drafter(folder / "drafter")
        self.pair = [
            *("--model-path", str(self.target)),
            *("--speculative-draft-model-path", str(self.drafter)),
        ]
        self.file = folder / "dflash.yaml"
        self.file.write_text("block_size: 4\nlog_every: 7\n")
        builtin = folder / "builtin.yaml"
        builtin.write_text("worker: builtin\n")
        typo = folder / "typo.yaml"
        typo.write_text("blok_size: 4\n")
        tree = folder / "tree.yaml"
        tree.write_text("tree_rows: 16\n")
        launch = folder / "launch.yaml"
        launch.write_text(
            f"model-path: {self.target}\nspeculative-algorithm: DFLASH\n"
            f"speculative-draft-model-path: {self.drafter}\n"
            f"speculative-dflash-config: {self.file}\n"
        )
        ours = [*self.pair, *DFLASH]
        config = "--speculative-dflash-config"
        misfit = write_drafter(folder / "misfit", hidden_size=128)
        domino = write_drafter(folder / "domino", section={"projector_type": "domino"})
        short = write_drafter(folder / "short", max_position_embeddings=256)
        replace = ["--model-path", str(self.target), *DFLASH, "--speculative-draft-model-path"]
        self.cases: dict[str, dict[str, Any]] = {
            "plain": {"argv": [*ours]},
            "lower case": {"argv": [*self.pair, "--speculative-algorithm", "dflash"]},
            "flag": {"argv": [*ours, "--speculative-dflash-block-size", "6"]},
            "other flag": {"argv": [*ours, "--speculative-num-draft-tokens", "6"]},
            "file": {"argv": [*ours, config, str(self.file)]},
            "flag over file": {
                "argv": [*ours, config, str(self.file), "--speculative-dflash-block-size", "6"]
            },
            "launch file": {"argv": ["--config", str(launch)]},
            "variable": {
                "argv": [*ours],
                "environment": {"SGLANG_DFLASH_CONFIG": str(self.file)},
            },
            "builtin": {"argv": [*ours, config, str(builtin)]},
            "domino": {"argv": [*replace, str(domino)]},
            "no speculation": {"argv": ["--model-path", str(self.target)]},
            "file without DFLASH": {
                "argv": ["--model-path", str(self.target), config, str(self.file)]
            },
            "typo": {"argv": [*ours, config, str(typo)]},
            "pipeline": {"argv": [*ours, "--pp-size", "2"]},
            "tree": {
                "argv": [
                    *ours,
                    *("--speculative-dflash-block-size", "4"),
                    *("--speculative-num-draft-tokens", "8"),
                    *("--speculative-eagle-topk", "3"),
                ]
            },
            "tree in a file": {"argv": [*ours, config, str(tree)]},
            "tree below its block": {
                "argv": [
                    *ours,
                    *("--speculative-dflash-block-size", "8"),
                    *("--speculative-num-draft-tokens", "4"),
                ]
            },
            "tree as large as the pool": {
                "argv": [*ours, config, str(tree), "--max-total-tokens", "32"]
            },
            "misfit": {"argv": [*replace, str(misfit)]},
            "no drafter": {"argv": ["--model-path", str(self.target), *DFLASH]},
            "short drafter": {"argv": [*replace, str(short)]},
            "short context": {"argv": [*replace, str(short), "--context-length", "256"]},
            "block as large as the context": {
                "argv": [*ours, "--context-length", "8", "--max-total-tokens", "64"]
            },
            "block as large as the pool": {"argv": [*ours, "--max-total-tokens", "16"]},
        }

        self.case_file = folder / "cases.json"
        self.case_file.write_text(json.dumps(self.cases))


BROKEN = """
import runpy, sys
sys.modules["sglang_dflash.arguments"] = None  # as if it could not be imported
sys.argv = ["launch_server", *sys.argv[1:]]
runpy.run_module("sglang.launch_server", run_name="__main__")
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    laboratory = Laboratory(tmp_path_factory.mktemp("plugin"))
    healthy = start([str(LABORATORY), str(laboratory.case_file)])
    broken = start(["-c", BROKEN, *laboratory.pair, *DFLASH, "--port", "1"])
    try:
        output, log = healthy.communicate(timeout=300)
        assert healthy.returncode == 0, log[-4000:]
        _, broken_log = broken.communicate(timeout=300)
        yield {
            **json.loads(output.splitlines()[-1]),
            "broken": (broken.returncode, broken_log),
            "laboratory": laboratory,
        }
    finally:
        for process in (healthy, broken):
            if process.poll() is None:
                process.kill()
            process.wait()


def launch(reports: dict[str, Any], case: str) -> dict[str, Any]:
    result = reports["cases"][case]
    assert "error" not in result, result["error"]
    return result


def error(reports: dict[str, Any], case: str) -> str:
    result = reports["cases"][case]
    assert "error" in result, result
    return result["error"]


# ---- loading ----------------------------------------------------------------------------------


def test_every_hook_is_live(reports: dict[str, Any]) -> None:
    from sglang_dflash import plugin

    assert set(plugin.HOOKS) <= set(reports["patched"])
    assert reports["resolution_hooks"] == ["sglang_dflash.arguments.resolve"]


def test_the_plugin_itself_imports_nothing_heavy(reports: dict[str, Any]) -> None:
    """Every SGLang process loads it, whatever the algorithm."""
    assert reports["heavy_modules_imported"] == []


def test_a_plugin_that_fails_to_load_refuses_the_launch(reports: dict[str, Any]) -> None:
    status, errors = reports["broken"]
    assert status != 0
    assert "sglang-dflash is installed but failed to load" in errors
    assert "sglang_dflash.arguments" in errors
    assert "uninstall sglang-dflash" in errors


def test_the_flag_is_in_the_help(reports: dict[str, Any]) -> None:
    assert "--speculative-dflash-config FILE" in reports["help"]


def test_all_refusals_are_about_flags_sglang_has(reports: dict[str, Any]) -> None:
    assert reports["unknown_refusal_fields"] == []
    assert reports["refusal_flags_not_in_help"] == []


# ---- resolution -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "size", "origin"),
    [
        ("plain", 8, "the drafter's config.json"),
        ("lower case", 8, "the drafter's config.json"),
        ("flag", 6, "--speculative-dflash-block-size"),
        ("other flag", 6, "--speculative-num-draft-tokens"),
        ("file", 4, "--speculative-dflash-config={file}"),
        ("flag over file", 6, "--speculative-dflash-block-size"),
        ("launch file", 4, "--speculative-dflash-config={file}"),
        ("variable", 4, "SGLANG_DFLASH_CONFIG={file}"),
    ],
)
def test_the_block_size_reaches_sglang_with_its_origin(
    reports: dict[str, Any], case: str, size: int, origin: str
) -> None:
    result = launch(reports, case)
    assert result["settings"]["block_size"] == size
    assert result["origins"]["block_size"] == origin.format(file=reports["laboratory"].file)
    assert result["fields"] == {
        "speculative_num_draft_tokens": size,
        "speculative_dflash_block_size": size,
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 1,
    }


@pytest.mark.parametrize(
    ("case", "block_size", "rows", "candidates"), [("tree", 4, 8, 3), ("tree in a file", 8, 16, 8)]
)
def test_sglang_reserves_for_a_trees_rows_and_drafts_its_block(
    reports: dict[str, Any], case: str, block_size: int, rows: int, candidates: int
) -> None:
    result = launch(reports, case)
    assert result["fields"]["speculative_num_draft_tokens"] == rows
    assert result["fields"]["speculative_eagle_topk"] == 1
    settings = result["settings"]
    assert (settings["block_size"], settings["tree_rows"]) == (block_size, rows)
    assert settings["candidates"] == candidates


def test_a_flag_overrides_one_key_and_leaves_the_files_others(reports: dict[str, Any]) -> None:
    result = launch(reports, "flag over file")
    assert result["settings"]["log_every"] == 7
    assert result["origins"]["log_every"].startswith("--speculative-dflash-config=")


@pytest.mark.parametrize("case", ["plain", "file", "builtin"])
def test_the_launch_reaches_a_spawned_process(reports: dict[str, Any], case: str) -> None:
    assert reports["spawned"][case] == launch(reports, case)["launch"]


def test_other_launches_are_left_alone(reports: dict[str, Any]) -> None:
    assert launch(reports, "no speculation")["launch"] is None


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("file without DFLASH", ["--speculative-dflash-config=", "only DFLASH reads this file"]),
        ("typo", ["typo.yaml: unknown key 'blok_size'", "Did you mean 'block_size'?"]),
        ("pipeline", ["--pp-size=2 is not supported", "use --tp-size"]),
        ("tree below its block", ["--speculative-num-draft-tokens", "at least the 8 rows"]),
        ("tree as large as the pool", ["needs 32 positions", "--max-total-tokens holds 32"]),
        ("misfit", ["hidden_size=128", "has 64", "trained for this target"]),
        ("no drafter", ["--speculative-draft-model-path is missing"]),
        ("short drafter", ["context length is 256", "--context-length 256"]),
        ("block as large as the context", ["needs 8 positions", "the context of"]),
        ("block as large as the pool", ["needs 16 positions", "--max-total-tokens holds 16"]),
    ],
)
def test_bad_input_is_refused_while_arguments_are_resolved(
    reports: dict[str, Any], case: str, parts: list[str]
) -> None:
    message = error(reports, case)
    for part in parts:
        assert part in message


def test_a_drafter_with_a_shorter_context_is_served_within_it(reports: dict[str, Any]) -> None:
    assert launch(reports, "short context")["settings"]["block_size"] == 8


def test_an_uncertified_sglang_is_refused_for_dflash_alone(reports: dict[str, Any]) -> None:
    for case in ("uncertified", "uncertified worker"):
        assert "sglang 9.9.9 is not certified" in reports[case]
        assert "SGLANG_DFLASH_ALLOW_UNTESTED=1" in reports[case]
    assert reports["uncertified without DFLASH"] is None


# ---- the worker -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "worker", "reason"),
    [
        ("plain", "sglang_dflash.worker.DFlashWorker", None),
        ("builtin", "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2", "worker: builtin"),
        ("domino", "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2", "a Domino head"),
    ],
)
def test_sglang_creates_the_worker_and_the_log_names_it(
    reports: dict[str, Any], case: str, worker: str, reason: str | None
) -> None:
    chosen = reports["workers"][case]
    assert chosen["class"] == worker
    lines = [line for line in chosen["log"] if line.startswith("DFLASH worker: ")]
    assert len(lines) == 1
    assert worker in lines[0]
    assert reason is None or reason in lines[0]
    assert any(line.startswith("DFLASH settings: block_size=8") for line in chosen["log"])


def test_a_hook_that_is_not_live_stops_the_scheduler(reports: dict[str, Any]) -> None:
    message = reports["worker_without_a_hook"]
    assert "did not apply these hooks" in message
    assert "get_req_to_token_extra_context_len" in message


def test_unresolved_arguments_stop_the_scheduler(reports: dict[str, Any]) -> None:
    assert "resolved before SGLang loaded its plugins" in reports["worker_without_launch"]


def test_a_worker_of_another_platform_is_kept(reports: dict[str, Any]) -> None:
    assert reports["foreign_worker"]["class"] == "builtins.dict"
    assert any("brings its own worker" in line for line in reports["foreign_worker"]["log"])


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_table_row_holds_two_windows_past_the_context(
    reports: dict[str, Any], page_size: int
) -> None:
    entries = reports["headroom"][str(page_size)]
    assert entries["DFLASH"] >= 2 * 8 + page_size - 1
    # A module that imported the function by name sees the hook as well.
    assert entries["by name"] == entries["DFLASH"]
    assert entries["none"] < 2 * 8
