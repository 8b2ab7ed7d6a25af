"""A run's saved state: weights, optimiser and step, as safetensors, written so that a crash while
writing leaves the previous one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.train.errors import TrainError

FOLDER = "state"


def save(
    run: Path,
    weights: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    progress: dict[str, Any],
) -> None:
    """Replace the saved state.

    Args:
        run: the run's folder.
        weights: float32 master weights.
        optimizer: from :meth:`Optimizer.state`.
        progress: the step, the run's identity and the curve; JSON.
    """
    fresh, last = run / f".{FOLDER}.partial", run / FOLDER
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(
        {n: t.detach().contiguous() for n, t in weights.items()}, fresh / "weights.safetensors"
    )
    save_file(
        {n: t.detach().contiguous() for n, t in optimizer.items()}, fresh / "optimizer.safetensors"
    )
    (fresh / "progress.json").write_text(json.dumps(progress, indent=1), encoding="utf-8")
    previous = run / f".{FOLDER}.previous"
    shutil.rmtree(previous, ignore_errors=True)
    if last.exists():
        os.rename(last, previous)
    os.rename(fresh, last)
    shutil.rmtree(previous, ignore_errors=True)


def load(
    run: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]] | None:
    """The saved state, or None where there is none.

    Raises:
        TrainError: it is damaged.
    """
    folder = run / FOLDER
    previous = run / f".{FOLDER}.previous"
    if not folder.exists() and previous.exists():
        os.rename(previous, folder)
    if not folder.exists():
        return None
    try:
        progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "weights.safetensors")
        return weights, load_file(folder / "optimizer.safetensors"), progress
    except Exception as error:
        raise TrainError(
            f"{folder} cannot be read ({error}). Delete it to start over, or restore a copy."
        ) from error
