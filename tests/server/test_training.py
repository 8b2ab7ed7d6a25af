"""A newcomer's first drafter: trained by one command, served at the accept length it was scored."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ServerFactory

from sglang_dflash.bench.server import accept_length
from sglang_dflash.train import config as training_file
from sglang_dflash.train import stages
from sglang_dflash.train.fit import Trainer
from sglang_dflash.train.records import Record
from sglang_dflash.train.score import score
from tests.support.pairs import TinyPair
from tests.support.training import random_llama, training_yaml

TOKENS = 48


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(4, 24))] for _ in range(count)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The training file of a finished run, and the seconds the command took."""
    folder = tmp_path_factory.mktemp("newcomer")
    target = random_llama(folder / "target")
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt_ids": p}) + "\n" for p in prompts(200, 1)))
    file = training_yaml(
        folder,
        target,
        data,
        generate={
            "max_new_tokens": TOKENS,
            "server_arguments": ["--dtype", "float32", "--max-total-tokens", "16384"],
        },
        drafter={"block_size": 8},
        fit={"steps": 100, "sequences": 8, "anchors": 16, "log_every": 50, "save_every": 100},
    )
    started = time.monotonic()
    command = [sys.executable, "-m", "sglang_dflash.cli", "train", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return file, time.monotonic() - started


def test_one_command_trains_a_drafter_in_minutes(trained: tuple[Path, float]) -> None:
    file, seconds = trained
    assert seconds < 180
    run = stages.Run(training_file.load(file))
    training, held_out = run.answers()
    untrained = Trainer(run.config, run.shape, training, run.frozen_target())
    before = score(untrained.model, untrained.target, held_out, dtype="float32")["all"]
    scores = json.loads((run.config.folder / "scores.json").read_text())
    assert scores["all"]["accept_length"] > 1.3 * before.accept_length
    config = json.loads((run.config.folder / "drafter" / "config.json").read_text())
    assert config["training"]["scores"] == scores
    assert (run.config.folder / "drafter" / "README.md").exists()


def test_the_served_accept_length_is_the_scored_one(
    trained: tuple[Path, float], serve: ServerFactory, tmp_path: Path
) -> None:
    run = stages.Run(training_file.load(trained[0]))
    pair = TinyPair(Path(run.config.target), run.config.folder / "drafter")
    asked = prompts(64, seed=2)
    settings = tmp_path / "builtin.yaml"
    settings.write_text("worker: builtin\n")
    served = {}
    for worker, flags in (("ours", ()), ("sglang's", ("--speculative-dflash-config", settings))):
        server = serve(pair, *map(str, flags))
        responses = server.generate(asked, concurrency=8, max_new_tokens=TOKENS)
        served[worker] = accept_length(responses)
        assert "it was trained" not in server.log_tail(2000)
        server.stop()
    answers = [
        Record(prompt, response["output_ids"], "served")
        for prompt, response in zip(asked, responses, strict=True)
    ]
    model, _ = run.trained()
    with torch.no_grad():
        scored = score(model, run.frozen_target(), answers, dtype="float32")["all"].accept_length
    assert scored > 1.3
    assert served["ours"] == pytest.approx(scored, rel=0.03), served
    assert served["sglang's"] == pytest.approx(scored, rel=0.03), served


def test_a_drafter_of_another_target_and_template_is_named_at_the_start(
    trained: tuple[Path, float], serve: ServerFactory, tmp_path: Path
) -> None:
    run = stages.Run(training_file.load(trained[0]))
    drafter = shutil.copytree(run.config.folder / "drafter", tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    config["training"] |= {"target_fingerprint": "0", "chat_template_sha256": "0", "target": "T"}
    (drafter / "config.json").write_text(json.dumps(config))
    log = serve(TinyPair(Path(run.config.target), drafter)).log_tail(2000)
    named = f"--speculative-draft-model-path={drafter}: it was trained"
    assert f"{named} for another target (T;" in log
    assert f"{named} with another chat template" in log
