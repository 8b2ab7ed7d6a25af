"""Fitting: it learns, resumes exactly, is the same on two processes, and loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sglang_dflash.train import blocks, stages
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.features import FrozenTarget
from sglang_dflash.train.fit import Report
from sglang_dflash.train.objective import likeliest
from tests.support.training import random_llama, training_config, training_yaml, write_records


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny products are no faster on two cores, and much slower where others use them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_records(tmp_path / "data.jsonl", 24)


def fit(config: Any, *, until: int | None = None) -> tuple[list[Report], dict[str, torch.Tensor]]:
    reports: list[Report] = []
    run = stages.Run(config)
    stages.fit(run, reports.append, lambda: until is not None and len(reports) >= until)
    return reports, load_file(config.folder / "state" / "weights.safetensors")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls_and_blocks_get_longer(
    tmp_path: Path, target: Path, data: Path, optimizer: str, dtype: str
) -> None:
    keys = {"steps": 80, "optimizer": optimizer, "dtype": dtype, "learning_rate": 0.01}
    reports, _ = fit(training_config(tmp_path, target, data, fit=keys))
    first, last = reports[:10], reports[-10:]
    assert sum(r.loss for r in last) < 0.9 * sum(r.loss for r in first)
    assert sum(r.accept_length for r in last) > sum(r.accept_length for r in first) + 0.3


def test_a_fit_goes_on_from_an_exported_drafter(tmp_path: Path, target: Path, data: Path) -> None:
    keys = {"steps": 80, "dtype": "float32", "learning_rate": 0.01}
    config = training_config(tmp_path / "first", target, data, fit=keys)
    first, _ = fit(config)
    drafter = stages.export(stages.Run(config))
    keys |= {"steps": 10, "start_from": str(drafter), "muon_learning_rate": 0.001}
    config = training_config(tmp_path / "second", target, data, fit=keys)
    second, _ = fit(config)
    assert second[0].loss == pytest.approx(first[-1].loss, rel=0.2)
    written = json.loads((stages.export(stages.Run(config)) / "config.json").read_text())
    assert written["training"]["started_from"] == drafter.name
    other = training_config(
        tmp_path / "other", target, data, fit=keys, drafter={"intermediate_size": 96}
    )
    with pytest.raises(TrainError, match=r"fit\.start_from=.*size mismatch"):
        fit(other)
    empty = training_config(
        tmp_path / "empty", target, data, fit=keys | {"start_from": str(tmp_path)}
    )
    with pytest.raises(TrainError, match=r"fit\.start_from=.*holds no \*\.safetensors"):
        fit(empty)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, target: Path, data: Path, optimizer: str
) -> None:
    keys = {"optimizer": optimizer}
    _, whole = fit(training_config(tmp_path / "whole", target, data, fit=keys))
    config = training_config(tmp_path / "parts", target, data, fit=keys)
    first, _ = fit(config, until=2)
    assert len(first) == 2
    _, resumed = fit(config)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("distillation", [0.0, 0.5])
def test_what_the_cache_holds_gives_the_same_run(
    tmp_path: Path, target: Path, data: Path, distillation: float
) -> None:
    runs = []
    aim = {"distillation": distillation}
    for name, size in (("none", 0.0), ("part", 1e-4), ("all", 1.0)):
        keys = {"feature_cache_gib": size, "dtype": "bfloat16", "steps": 12}
        config = training_config(tmp_path / name, target, data, fit=keys, objective=aim)
        runs.append(fit(config)[1])
    for name in runs[0]:
        # Batches are padded to other lengths when features come from the cache.
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=0, atol=5e-3)
        torch.testing.assert_close(runs[0][name], runs[2][name], rtol=0, atol=5e-3)


def test_soft_labels_are_what_the_target_expected_where_the_labels_came(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    frozen = FrozenTarget(str(target), [0, 2], torch.float32, torch.device("cpu"), whole=True)
    tokens = torch.arange(30).view(2, 15) * 5
    features, hidden = frozen.read(tokens)
    soft = likeliest(hidden, frozen.head, 4)
    anchors = torch.tensor([[0, 6], [3, 9]])
    before = blocks.before_labels(anchors, 4, 15)
    with torch.no_grad():
        logits = model(tokens).logits
    for sequence in range(2):
        for number, anchor in enumerate(anchors[sequence].tolist()):
            for k in range(1, 4):
                # The label of row k is the token at anchor + k.
                want = logits[sequence, anchor + k - 1].topk(4)
                at = before[sequence, number, k - 1]
                assert soft.ids[sequence, at].tolist() == want.indices.tolist()
                torch.testing.assert_close(
                    soft.probabilities[sequence, at], want.values.softmax(-1)
                )
    cut = FrozenTarget(str(target), [0, 2], torch.float32, torch.device("cpu"))
    torch.testing.assert_close(cut.features(tokens), features)


def test_a_drafter_distilled_alone_learns_the_target_and_not_the_text(
    tmp_path: Path, target: Path, data: Path
) -> None:
    # Counted-up bytes are not what this target says, so the labels stay unlearnt.
    keys = {"steps": 40, "learning_rate": 0.01}
    hard, _ = fit(training_config(tmp_path / "hard", target, data, fit=keys))
    aim = {"distillation": 1.0}
    soft, _ = fit(training_config(tmp_path / "soft", target, data, fit=keys, objective=aim))
    assert soft[-1].loss < soft[0].loss
    assert soft[-1].accept_length < 1.2 < hard[-1].accept_length


def test_two_processes_compute_what_one_does(tmp_path: Path, target: Path, data: Path) -> None:
    # Muon orthogonalises in bfloat16, which makes a last bit's difference visible.
    keys = {"optimizer": "adamw"}
    one, _ = fit(training_config(tmp_path / "one", target, data, fit=keys))
    file = training_yaml(tmp_path / "two", target, data, fit=keys)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--standalone", "-m", "sglang_dflash.cli", "train", "fit"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    curve = (tmp_path / "two" / "run" / "curve.jsonl").read_text().splitlines()
    two = [json.loads(line) for line in curve]
    assert [report["step"] for report in two] == [report.step for report in one]
    for mine, theirs in zip(one, two, strict=True):
        assert mine.loss == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine.gradient_norm == pytest.approx(theirs["gradient_norm"], rel=1e-3)


def test_another_configuration_is_not_resumed(tmp_path: Path, target: Path, data: Path) -> None:
    fit(training_config(tmp_path, target, data))
    with pytest.raises(TrainError, match=r"fit\.learning_rate was 0\.003, is 0\.01") as caught:
        fit(training_config(tmp_path, target, data, fit={"learning_rate": 0.01}))
    assert "Set output to a new folder" in str(caught.value)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_state(
    tmp_path: Path, target: Path, data: Path
) -> None:
    config = training_config(tmp_path, target, data)
    fit(config, until=3)
    weights = config.folder / "state" / "weights.safetensors"
    good = load_file(weights)
    save_file({**good, "fc.weight": torch.full_like(good["fc.weight"], float("nan"))}, weights)
    with pytest.raises(TrainError, match=r"the loss is nan at step 3 \(sequences \["):
        fit(config)
    assert json.loads((weights.parent / "progress.json").read_text())["step"] == 3


def test_a_damaged_state_is_named(tmp_path: Path, target: Path, data: Path) -> None:
    config = training_config(tmp_path, target, data)
    fit(config, until=3)
    (config.folder / "state" / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(TrainError, match="cannot be read"):
        fit(config)


def test_a_fit_that_does_not_fit_is_refused_before_it_starts(
    tmp_path: Path, target: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = training_config(tmp_path, target, data)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(TrainError, match=r"GiB of disk in .* Lower fit\.feature_cache_gib"):
        fit(config)
    monkeypatch.undo()
    memory = type("Memory", (), {"available": 1000})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(TrainError, match=r"GiB of memory.* Lower fit\.micro_batch_tokens"):
        fit(config)


def test_peak_memory_does_not_grow_with_the_number_of_sequences(
    tmp_path: Path, target: Path
) -> None:
    peaks = {}
    for count in (20, 300):
        folder = tmp_path / str(count)
        folder.mkdir()
        data = write_records(folder / "data.jsonl", count)
        file = training_yaml(folder, target, data, fit={"steps": None, "epochs": 1})
        script = (
            "import resource, sys; from sglang_dflash.train import config, stages\n"
            "run = stages.Run(config.load(sys.argv[1]))\n"
            "stages.fit(run, lambda report: None, lambda: False)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        command = [sys.executable, "-c", script, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        peaks[count] = int(done.stdout.split()[-1])
    assert peaks[300] < peaks[20] + 40_000, peaks  # KiB; features alone would be 10 MB


def test_a_smaller_head_vocabulary_trains_on_the_frequent_tokens(
    tmp_path: Path, target: Path, data: Path
) -> None:
    whole, _ = fit(training_config(tmp_path / "whole", target, data, fit={"steps": 20}))
    keys = {"steps": 20, "head_vocabulary": 256}
    part, _ = fit(training_config(tmp_path / "part", target, data, fit=keys))
    # The answers hold 200 different tokens, so none is lost, and fewer compete.
    assert part[-1].accept_length == pytest.approx(whole[-1].accept_length, abs=0.3)
    assert part[0].loss < whole[0].loss
