"""Launch resolution, piece by piece; tests/unit/test_plugin.py runs it inside SGLang."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafter_files import write_drafter

from sglang_dflash import arguments, checkpoint, config
from sglang_dflash.arguments import Launch
from sglang_dflash.config import Loaded, Settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"

ORDINARY: dict[str, Any] = {
    "pp_size": 1,
    "device": "cuda",
    "use_ray": False,
    "disaggregation_mode": "null",
    "speculative_adaptive": False,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "speculative_dflash_block_size": None,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_draft_sink_size": None,
    "speculative_draft_window_size": None,
}


def view(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**ORDINARY, **changes})


REFUSED = [
    ("pp_size", 2, "--pp-size=2", "use --tp-size", False),
    ("device", "npu", "--device=npu", "SGLANG_PLATFORM=dflash_cpu", True),
    ("device", "cpu", "--device=cpu", "SGLANG_PLATFORM=dflash_cpu", True),
    ("use_ray", True, "--use-ray=True", "without Ray", True),
    ("disaggregation_mode", "decode", "--disaggregation-mode=decode", "in one server", True),
    ("disaggregation_mode", "prefill", "--disaggregation-mode=prefill", "in one server", True),
    ("speculative_adaptive", True, "--speculative-adaptive=True", "drop the flag", False),
    ("speculative_num_steps", 3, "--speculative-num-steps=3", "dflash-block-size", False),
    ("speculative_accept_threshold_single", 0.9, "-threshold-single=0.9", "drop the flag", True),
    ("speculative_accept_threshold_acc", 0.5, "-threshold-acc=0.5", "drop the flag", True),
    ("speculative_draft_sink_size", 4, "--speculative-draft-sink-size=4", "drop the flag", False),
]


@pytest.mark.parametrize(("name", "value", "flag", "remedy", "builtin_serves"), REFUSED)
def test_a_mode_is_refused_with_flag_value_reason_and_remedy(
    name: str, value: Any, flag: str, remedy: str, builtin_serves: bool
) -> None:
    args = view(**{name: value})
    with pytest.raises(ValueError, match="is not supported: ") as caught:
        arguments.refuse_unsupported(args)
    message = str(caught.value)
    assert flag in message
    assert remedy in message.partition("Instead, ")[2]
    assert ("worker: builtin" in message) == builtin_serves
    if builtin_serves:
        arguments.refuse_unsupported(args, builtin=True)
    else:
        with pytest.raises(ValueError, match="is not supported: "):
            arguments.refuse_unsupported(args, builtin=True)


def test_every_refusal_has_a_case_here() -> None:
    assert {row[0] for row in REFUSED} == {refusal.field for refusal in arguments.UNSUPPORTED}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device": "cuda:1"},
        {"speculative_num_steps": 1, "speculative_eagle_topk": 1},
        {"speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 8},
    ],
)
def test_ordinary_arguments_pass(changes: dict[str, Any]) -> None:
    arguments.refuse_unsupported(view(**changes))


def test_the_cpu_passes_on_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "dflash_cpu")
    arguments.refuse_unsupported(view(device="cpu"))


FROM_FILE = Loaded(Settings(block_size=4), "--speculative-dflash-config=f.yaml")
TREE_FILE = Loaded(Settings(tree_rows=16, candidates=6), "--speculative-dflash-config=f.yaml")
CPU = {"device": "cpu"}
BOTH_FLAGS = {"speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 32}


def rows(flags: dict[str, Any], loaded: Loaded, block_size: int = 8, **launch: Any) -> int:
    """Verify rows of a launch, as :func:`arguments.resolve` puts it together."""
    args = view(**{**CPU, **flags})
    tree, origins = arguments.chosen_tree(args, loaded)
    settings = loaded.settings.model_copy(update={**tree, "block_size": block_size})
    return arguments.verify_rows(args, Launch(settings, {**loaded.origins, **origins}, **launch))


@pytest.mark.parametrize(
    ("flags", "loaded", "expected"),
    [
        ({}, Loaded(), 8),
        ({}, TREE_FILE, 16),
        (BOTH_FLAGS, Loaded(), 32),
        (BOTH_FLAGS, TREE_FILE, 32),
        ({**BOTH_FLAGS, "speculative_num_draft_tokens": 8}, TREE_FILE, 8),
        ({**BOTH_FLAGS, "speculative_eagle_topk": 4}, Loaded(), 32),
        ({"speculative_num_draft_tokens": 8}, Loaded(), 8),
        ({"speculative_num_draft_tokens": 8}, TREE_FILE, 16),
        ({"speculative_eagle_topk": 1}, Loaded(), 8),
        ({"speculative_eagle_topk": 2}, TREE_FILE, 16),
        ({}, Loaded(Settings(tree_rows=8, keep_spine=False), "f.yaml"), 8),
    ],
)
def test_the_rows_of_a_verify_pass_come_from_flag_then_file(
    flags: dict[str, Any], loaded: Loaded, expected: int
) -> None:
    assert rows(flags, loaded) == expected


def test_a_chain_may_be_longer_than_a_tree_is_wide() -> None:
    flags = {"speculative_dflash_block_size": 200, "speculative_num_draft_tokens": 200}
    assert rows(flags, Loaded(), block_size=200) == 200


@pytest.mark.parametrize(
    ("flags", "loaded", "parts"),
    [
        ({"speculative_eagle_topk": 4}, Loaded(), ["speculative-eagle-topk", "tree_rows"]),
        ({"speculative_eagle_topk": 17}, TREE_FILE, ["eagle-topk=17", "1 to 16"]),
        ({"speculative_eagle_topk": 0}, TREE_FILE, ["eagle-topk=0", "1 to 16"]),
        ({"speculative_eagle_topk": 1}, TREE_FILE, ["candidates=1", "8 rows of the chain"]),
        (
            {**BOTH_FLAGS, "speculative_num_draft_tokens": 129},
            Loaded(),
            ["num-draft-tokens=129", "2 to 128"],
        ),
        (
            {**BOTH_FLAGS, "speculative_num_draft_tokens": 4},
            Loaded(),
            ["tree_rows=4 (from --speculative-num-draft-tokens)", "at least the 8 rows"],
        ),
        ({"device": "cuda"}, TREE_FILE, ["tree_rows=16", "CPU platform only", "On cuda"]),
        ({"speculative_draft_window_size": 64}, TREE_FILE, ["draft-window-size", "not tested"]),
    ],
)
def test_a_tree_that_cannot_be_served_is_refused(
    flags: dict[str, Any], loaded: Loaded, parts: list[str]
) -> None:
    with pytest.raises(ValueError, match="DFLASH: ") as caught:
        rows(flags, loaded)
    for part in parts:
        assert part in str(caught.value)


def test_a_tree_is_refused_where_sglangs_own_worker_serves() -> None:
    with pytest.raises(ValueError, match="verifies chains only"):
        rows({}, TREE_FILE, builtin_reason="worker: builtin, from f.yaml")


def test_a_tree_of_a_block_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 31 deep"):
        rows({}, Loaded(Settings(tree_rows=64), "f.yaml"), block_size=33)


@pytest.mark.parametrize(
    ("flags", "loaded", "expected"),
    [
        (
            {"speculative_dflash_block_size": 6},
            FROM_FILE,
            (6, "--speculative-dflash-block-size"),
        ),
        (
            {"speculative_num_draft_tokens": 5},
            FROM_FILE,
            (5, "--speculative-num-draft-tokens"),
        ),
        ({}, FROM_FILE, (4, "--speculative-dflash-config=f.yaml")),
        ({}, Loaded(), (None, "the drafter's config.json")),
        (
            {},
            Loaded(Settings(log_every=1), "--speculative-dflash-config=f.yaml"),
            (None, "the drafter's config.json"),
        ),
    ],
)
def test_the_block_size_comes_from_flag_then_file_then_drafter(
    flags: dict[str, int], loaded: Loaded, expected: tuple[int | None, str]
) -> None:
    assert arguments.chosen_block_size(view(**flags), loaded) == expected


@pytest.mark.parametrize("name", arguments.BLOCK_FLAGS)
@pytest.mark.parametrize("value", [1, 0, -8])
def test_a_block_without_drafted_tokens_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{arguments.BLOCK_FLAGS[name]}={value} leaves nothing"):
        arguments.chosen_block_size(view(**{name: value}), Loaded())


def test_an_unpublished_block_size_must_be_given(tmp_path: Path) -> None:
    drafter = checkpoint.read_drafter(str(write_drafter(tmp_path, drop=("block_size",))))
    assert drafter is not None
    with pytest.raises(checkpoint.CheckpointError, match="block_size is missing") as caught:
        arguments._against_trained(drafter, None, "")
    assert "--speculative-dflash-block-size" in str(caught.value)
    assert arguments._against_trained(drafter, 8, "--speculative-dflash-block-size") == 8


def test_a_block_above_the_trained_one_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = checkpoint.read_drafter(str(write_drafter(tmp_path)))
    assert drafter is not None
    with caplog.at_level(logging.WARNING, "sglang_dflash"):
        assert arguments._against_trained(drafter, 8, "f.yaml") == 8
        assert arguments._against_trained(drafter, 4, "f.yaml") == 4
        assert not caplog.records
        assert arguments._against_trained(drafter, 16, "f.yaml") == 16
    assert "block size 16 (f.yaml) is larger than the 8" in caplog.text


def test_a_block_must_leave_room_for_text() -> None:
    arguments.require_block_fits(8, 9, "the pool")
    with pytest.raises(ValueError, match="the pool holds 8") as caught:
        arguments.require_block_fits(8, 8, "the pool")
    assert "--speculative-dflash-block-size" in str(caught.value)


def test_a_launch_travels_by_pickle() -> None:
    launch = Launch(Settings(block_size=4), FROM_FILE.origins, "the drafter has a Domino head")
    copy = pickle.loads(pickle.dumps(launch))
    assert copy == launch
    assert "block_size=4 (--speculative-dflash-config=f.yaml)" in str(copy)


def test_arguments_resolved_without_the_plugin_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"load_plugins\(\)"):
        arguments.launch_of(SimpleNamespace())


def test_the_document_shows_the_refused_modes() -> None:
    assert arguments.unsupported_table() in DOCUMENT.read_text()


def test_the_document_names_what_it_must() -> None:
    text = DOCUMENT.read_text()
    for name in (config.FLAG, config.ENVIRONMENT, "SGLANG_DFLASH_ALLOW_UNTESTED", "0.5.23"):
        assert name in text
