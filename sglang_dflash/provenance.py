"""What a drafter says it was trained for, compared with what is being served.

A drafter of another target, or behind another chat template, loads and answers correctly, and is
only slow. ``sglang-dflash train`` records both under ``training`` in config.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

_ROWS = 64
"""Rows of embedding and head that are looked at."""


def template_hash(tokenizer: Any) -> str | None:
    """SHA-256 of a tokenizer's chat template; None without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()


def fingerprint(head: torch.Tensor, embedding: torch.Tensor) -> str:
    """A hash that tells two targets of one architecture apart.

    Args:
        head: ``[V, H]`` floating point; read in bfloat16, so that it does not depend on the dtype
            served in.
        embedding: ``[V, H]`` likewise.
    """
    digest = hashlib.sha256()
    for matrix in (embedding, head):
        rows = matrix[:: max(1, len(matrix) // _ROWS)].detach().to("cpu", torch.bfloat16)
        digest.update(rows.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def mismatches(
    training: Mapping[str, Any] | None, target_fingerprint: str | None, template: str | None
) -> list[str]:
    """What differs from the drafter's training, one sentence each.

    Args:
        training: that section of the drafter's config.json; None where it has none.
        target_fingerprint: of the served target, or None where it cannot be told.
        template: hash of the served chat template, likewise.
    """
    if not isinstance(training, Mapping):
        return []
    found = []
    recorded = training.get("target_fingerprint")
    if recorded and target_fingerprint and recorded != target_fingerprint:
        found.append(
            f"it was trained for another target ({training.get('target')}; embedding and head "
            "differ). Serve that target, or train a drafter for this one."
        )
    recorded = training.get("chat_template_sha256")
    if recorded and template and recorded != template:
        found.append(
            "it was trained with another chat template than this tokenizer's. Serve with the "
            "template of its training, or train it with this one."
        )
    return found
