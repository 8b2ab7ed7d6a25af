"""The exported checkpoint: the published format, served as it was trained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash import checkpoint, weights
from sglang_dflash.provenance import template_hash
from sglang_dflash.train import stages
from sglang_dflash.train.errors import TrainError
from tests.support.pairs import BOS, EOS, MASK, PAD, VOCABULARY
from tests.support.training import random_llama, training_config, write_records

ROOT = Path(__file__).parents[2]


def test_sglangs_draft_model_computes_what_was_trained() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("against_sglang.py"))],
        cwd=ROOT,
        env={**os.environ, "SGLANG_PLATFORM": "dflash_cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.search(r"^2 passed", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_an_export_is_a_checkpoint_a_server_accepts(tmp_path: Path) -> None:
    target = random_llama(tmp_path / "target")
    data = write_records(tmp_path / "data.jsonl", 30)
    config = training_config(tmp_path, target, data, fit={"steps": 2})
    run = stages.Run(config)
    stages.fit(run, lambda report: None, lambda: False)
    scores = stages.score_held_out(run, None, lambda done, total: None)
    folder = stages.export(run)

    drafter = checkpoint.read_drafter(str(folder))
    assert drafter is not None
    described = checkpoint.Target(
        str(target), 64, VOCABULARY, 4, 1024, {EOS: "eos_token_id", PAD: "pad_token_id"}
    )
    checkpoint.check_pair(drafter, described)
    weights.check_weights(drafter)
    assert checkpoint.trained_block_size(drafter) == 4
    written = json.loads((folder / "config.json").read_text())["training"]
    assert written["chat_template_sha256"] == template_hash(run.tokenizer)
    assert written["scores"]["all"]["accept_length"] == round(scores["all"].accept_length, 4)
    assert written["sequences"] + written["held_out_sequences"] == 30
    card = (folder / "README.md").read_text()
    assert "--speculative-algorithm DFLASH" in card
    # What is published names the target, not the folders of the machine that trained.
    assert f"--model-path {target.name} " in card
    assert str(tmp_path) not in card + (folder / "config.json").read_text()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask_token_id": None}, "drafter.mask_token_id is missing"),
        ({"mask_token_id": EOS}, f"mask_token_id={EOS} is the eos_token_id"),
        ({"mask_token_id": PAD}, f"mask_token_id={PAD} is the pad_token_id"),
        ({"mask_token_id": BOS}, f"mask_token_id={BOS} is the bos_token_id"),
        ({"mask_token_id": VOCABULARY}, "outside the vocabulary"),
        ({"target_layer_ids": [2, 1]}, r"target_layer_ids=\[2, 1\] is no increasing list"),
        ({"target_layer_ids": [4]}, "0 to 3"),
        ({"num_attention_heads": 3}, "no multiple of num_key_value_heads"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    target = random_llama(tmp_path / "target")
    data = write_records(tmp_path / "data.jsonl", 4)
    config = training_config(tmp_path, target, data, drafter=keys)
    with pytest.raises(TrainError, match=message):
        stages.Run(config)


def test_text_a_drafter_cannot_learn_from_is_refused(tmp_path: Path) -> None:
    target = random_llama(tmp_path / "target")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt_ids": [1, 2], "output_ids": [3]}) + "\n")
    with pytest.raises(TrainError, match="none of 1 records has an answer"):
        stages.Run(training_config(tmp_path, target, data)).answers()
    data.write_text(json.dumps({"prompt_ids": [1, MASK], "output_ids": [3, 4, 5]}) + "\n")
    with pytest.raises(TrainError, match=f"mask_token_id={MASK} occurs in the training text"):
        stages.Run(training_config(tmp_path, target, data)).answers()


def test_a_target_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    data = write_records(tmp_path / "data.jsonl", 4)
    with pytest.raises(TrainError, match=r"target: .*absent has no config that can be read"):
        stages.Run(training_config(tmp_path, tmp_path / "absent", data))


def test_stages_out_of_order_say_which_is_missing(tmp_path: Path) -> None:
    target = random_llama(tmp_path / "target")
    data = write_records(tmp_path / "data.jsonl", 4)
    run = stages.Run(training_config(tmp_path, target, data))
    with pytest.raises(TrainError, match="Run the fit stage"):
        stages.export(run)
