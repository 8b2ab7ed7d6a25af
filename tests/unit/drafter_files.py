"""Tiny target and drafter folders, written from scratch: configs, and headers that fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 301,
    "eos_token_id": [302, 303],
    "pad_token_id": 304,
    "dtype": "float32",
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "num_target_layers": 6,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 310, "target_layer_ids": [1, 2, 4]},
    "dtype": "float32",
}


def write_target(folder: Path, **changes: Any) -> Path:
    """A target's config.json; resolving arguments needs no more."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    return folder


def drafter_tensors() -> dict[str, np.ndarray]:
    """Weights that fit :data:`DRAFTER`."""
    hidden, inner, heads = 64, 80, 4 * 16
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (heads, hidden),
                "self_attn.k_proj": (heads // 2, hidden),
                "self_attn.v_proj": (heads // 2, hidden),
                "self_attn.o_proj": (hidden, heads),
                "self_attn.q_norm": (16,),
                "self_attn.k_norm": (16,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def write_drafter(
    folder: Path,
    *,
    section: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """A drafter folder.

    Args:
        folder: created if need be.
        section: keys that replace those of ``dflash_config``.
        tensors: instead of those that fit.
        drop: top-level keys to leave out.
        changes: top-level keys to replace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**DRAFTER, "dflash_config": {**DRAFTER["dflash_config"], **(section or {})}}  # type: ignore[dict-item]
    config |= changes
    kept = {key: value for key, value in config.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(drafter_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder
