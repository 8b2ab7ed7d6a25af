"""Target/drafter pairs: what fits, and what every misfit is answered with before loading."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drafter_files import drafter_tensors, write_drafter
from safetensors.numpy import save_file

from sglang_dflash import checkpoint
from sglang_dflash.checkpoint import CheckpointError, Drafter, Target
from sglang_dflash.weights import check_weights

TARGET = Target(
    path="my/target",
    hidden_size=64,
    vocab_size=320,
    num_layers=6,
    context_length=512,
    special_ids={302: "eos_token_id", 304: "pad_token_id"},
)


def read(folder: Path, **options: Any) -> Drafter:
    drafter = checkpoint.read_drafter(str(folder), **options)
    assert drafter is not None
    return drafter


def refused(folder: Path, *parts: str) -> None:
    """The folder is refused in one line that names it and holds every part."""

    def check() -> None:
        drafter = read(folder)
        checkpoint.check_pair(drafter, TARGET)
        checkpoint.trained_block_size(drafter)
        check_weights(drafter)

    with pytest.raises(CheckpointError) as caught:
        check()
    message = str(caught.value)
    assert message.startswith(f"--speculative-draft-model-path={folder}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_fitting_pair_passes(tmp_path: Path) -> None:
    drafter = read(write_drafter(tmp_path))
    checkpoint.check_pair(drafter, TARGET)
    check_weights(drafter)
    assert checkpoint.trained_block_size(drafter) == 8
    assert drafter.served_by_sglang is None


# Keys as the published checkpoints have them; SGLang reads all of these.
PUBLISHED: dict[str, dict[str, Any]] = {
    "block size at the top": {},
    "block size in the section": {
        "block_size": None,
        "dflash_config": {"block_size": 8, "mask_token_id": 310, "target_layer_ids": [1, 2, 4]},
    },
    "keys at the top": {
        "dflash_config": None,
        "mask_token_id": 310,
        "target_layer_ids": [1, 2, 4],
    },
    "mask twice": {"mask_token_id": 310},
    "vocabulary of the target": {"vocab_size": None},
    "layers of the target unnamed": {"num_target_layers": None},
    "sliding layers": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "use_sliding_window": True,
        "is_causal": False,
    },
    "taps unlike layers": {
        "dflash_config": {"mask_token_id": 310, "target_layer_ids": [0, 3, 5], "mask_token": "<m>"}
    },
}


@pytest.mark.parametrize("changes", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_layouts_pass(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = read(write_drafter(tmp_path, **changes))
    checkpoint.check_pair(drafter, TARGET)
    check_weights(drafter)
    assert checkpoint.trained_block_size(drafter) == 8


KINDS = {
    "Domino": ({"section": {"projector_type": "domino"}}, "a Domino head"),
    "selector": (
        {"architectures": ["DFlash2DraftModel"], "section": {"selector_top_k": 16}},
        "a DFlash 2 candidate selector",
    ),
    "LiLiCorr": ({"architectures": ["LiLiCorrDraftModel"]}, "a LiLiCorr head"),
}


@pytest.mark.parametrize(("changes", "reason"), KINDS.values(), ids=KINDS.keys())
def test_drafters_with_dependent_positions_stay_with_sglang(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    drafter = read(write_drafter(tmp_path, **changes))
    checkpoint.check_pair(drafter, TARGET)
    assert reason in (drafter.served_by_sglang or "")


MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another model": (
        {"architectures": ["Qwen3ForCausalLM"]},
        ["architectures=['Qwen3ForCausalLM']", "DFlashDraftModel", "Name a DFlash drafter"],
    ),
    "no architecture": ({"architectures": None}, ["architectures=None"]),
    "DSpark": (
        {"architectures": ["DSparkDraftModel"]},
        ["DSparkDraftModel", "--speculative-algorithm DSPARK"],
    ),
    "hidden size": (
        {"hidden_size": 128},
        ["hidden_size=128", "my/target has 64", "trained for this target"],
    ),
    "no hidden size": ({"hidden_size": None}, ["hidden_size=None", "has 64"]),
    "vocabulary": (
        {"vocab_size": 300},
        ["vocab_size=300", "my/target has 320", "only extended", '{"vocab_size": 320}'],
    ),
    "layers": ({"num_target_layers": 36}, ["num_target_layers=36", "my/target has 6"]),
    "taps missing": (
        {"section": {"target_layer_ids": None}},
        ["dflash_config.target_layer_ids is missing", "must not be guessed"],
    ),
    "taps empty": ({"section": {"target_layer_ids": []}}, ["target_layer_ids=[]", "is empty"]),
    "taps past the end": (
        {"section": {"target_layer_ids": [1, 2, 6]}},
        ["target_layer_ids=[1, 2, 6]", "it has 0 to 5"],
    ),
    "tap of the embedding": (
        {"section": {"target_layer_ids": [-1, 2, 4]}},
        ["target_layer_ids=[-1, 2, 4]", "it has 0 to 5"],
    ),
    "taps twice": (
        {"section": {"target_layer_ids": [1, 1, 4]}},
        ["target_layer_ids=[1, 1, 4]", "does not increase strictly"],
    ),
    "taps unordered": (
        {"section": {"target_layer_ids": [4, 2, 1]}},
        ["target_layer_ids=[4, 2, 1]", "does not increase strictly"],
    ),
    "taps no list": ({"section": {"target_layer_ids": 3}}, ["=3 is not a list of integers"]),
    "taps no integers": (
        {"section": {"target_layer_ids": [1, True, 4]}},
        ["is not a list of integers"],
    ),
    "mask missing": (
        {"section": {"mask_token_id": None}},
        ["dflash_config.mask_token_id is missing", "published", "must not be invented"],
    ),
    "mask out of range": (
        {"section": {"mask_token_id": 320}},
        ["mask_token_id=320", "outside the vocabulary of my/target (0 to 319)", "not be invented"],
    ),
    "mask negative": ({"section": {"mask_token_id": -1}}, ["mask_token_id=-1", "0 to 319"]),
    "mask no integer": ({"section": {"mask_token_id": True}}, ["=True is not an integer"]),
    "mask is eos": (
        {"section": {"mask_token_id": 302}},
        ["mask_token_id=302", "eos_token_id of my/target", "not be invented"],
    ),
    "mask is pad": ({"section": {"mask_token_id": 304}}, ["=304", "pad_token_id of my/target"]),
    "block of one": ({"block_size": 1}, ["block_size=1 is not usable", "at least one drafted"]),
    "block no integer": ({"block_size": True}, ["block_size=True is not usable"]),
    "fewer taps than weights": (
        {"section": {"target_layer_ids": [1, 4]}},
        ["fc.weight has shape [64, 192]", "implies [64, 128]"],
    ),
    "more layers than weights": (
        {"num_hidden_layers": 3},
        ["no tensor layers.2.", "config.json implies"],
    ),
    "other heads": ({"head_dim": 32}, ["self_attn.q_proj.weight", "[64, 64]", "[128, 64]"]),
    "no feed-forward size": ({"drop": ("intermediate_size",)}, ["intermediate_size=None"]),
}


@pytest.mark.parametrize(("changes", "parts"), MISFITS.values(), ids=MISFITS.keys())
def test_a_misfit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    refused(write_drafter(tmp_path, **changes), *parts)


def test_no_drafter_named() -> None:
    with pytest.raises(CheckpointError, match="--speculative-draft-model-path is missing"):
        checkpoint.read_drafter(None)


def test_a_missing_folder_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "there is no such folder")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path)
    refused(folder / "model.safetensors", "is a file, not a folder")


def test_an_unknown_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_drafter("no-such-owner/no-such-drafter", revision="main")
    message = str(caught.value)
    assert "--speculative-draft-model-path=no-such-owner/no-such-drafter" in message
    assert "neither a local folder nor a hub checkpoint" in message


def test_a_url_is_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sglang_dflash"):
        assert checkpoint.read_drafter("s3://bucket/drafter") is None
    assert "not checked before it loads" in caplog.text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "cannot read config.json (No such file"),
        ("{", "config.json is not valid JSON"),
        ("[1]", "config.json holds a list"),
    ],
)
def test_a_broken_config(tmp_path: Path, content: str | None, part: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    refused(tmp_path, part)


def test_overrides_replace_top_level_keys(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, num_target_layers=36)
    checkpoint.check_pair(read(folder, overrides={"num_target_layers": 6}), TARGET)


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "only pytorch_model.bin", "safetensors only", "can run any code")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path)
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no weights")


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    file = write_drafter(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors is not a whole safetensors file")


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    file = write_drafter(tmp_path) / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(tmp_path, "git lfs pull")


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path)
    tensors = drafter_tensors()
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[:9], "model-2-of-2.safetensors": names[9:]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_weights(read(folder))

    (folder / "model-2-of-2.safetensors").unlink()
    refused(folder, "model-2-of-2.safetensors named by model.safetensors.index.json is not there")


@pytest.mark.parametrize(
    "renamed",
    [
        {name: f"model.{name}" for name in drafter_tensors()},
        {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"},
    ],
    ids=["prefixed", "native export"],
)
def test_names_sglang_resolves_are_found(tmp_path: Path, renamed: dict[str, str]) -> None:
    tensors = {renamed.get(name, name): value for name, value in drafter_tensors().items()}
    check_weights(read(write_drafter(tmp_path, tensors=tensors)))


def test_fused_projections_are_found(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    for layer in range(2):
        prefix = f"layers.{layer}"
        for fused, parts in (
            ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            rows = [tensors.pop(f"{prefix}.{part}.weight") for part in parts]
            tensors[f"{prefix}.{fused}.weight"] = np.concatenate(rows)
    check_weights(read(write_drafter(tmp_path, tensors=tensors)))


def test_packed_weights_are_left_to_the_loader(tmp_path: Path) -> None:
    tensors = {"fc.weight": np.zeros((64, 24), np.uint8), "fc.weight_scale": np.zeros(64, "f4")}
    check_weights(read(write_drafter(tmp_path, tensors=tensors)))


def test_the_target_is_read_from_sglangs_model_config() -> None:
    text = SimpleNamespace(num_hidden_layers=3, num_loops=2, pad_token_id=None)
    target = Target.of(
        "my/target",
        SimpleNamespace(
            hf_config=SimpleNamespace(pad_token_id=7),
            hf_text_config=text,
            hf_generation_config=SimpleNamespace(pad_token_id=9),
            hf_eos_token_id={7, 8},
            hidden_size=64,
            vocab_size=320,
            context_len=512,
        ),
    )
    assert target.num_layers == 6
    assert target.special_ids == {7: "eos_token_id", 8: "eos_token_id", 9: "pad_token_id"}
