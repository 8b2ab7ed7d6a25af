"""A randomly initialised drafter for the demo target, in the published checkpoint format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.assets.cache import once, progress

if TYPE_CHECKING:
    import torch

NAME = "smollm2-135m-instruct-random-drafter"
SEED = 0
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 8,
    "num_hidden_layers": 3,
    "num_target_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": ["full_attention"] * 3,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    # No row of the vocabulary is spare; id 16, <empty_output>, was never trained.
    "dflash_config": {"target_layer_ids": [1, 8, 14, 20, 27], "mask_token_id": 16},
}


def prepare() -> Path:
    """The drafter's folder, made on first use.

    Raises:
        AssetError: see :func:`sglang_dflash.assets.cache.once`.
    """
    return once(NAME, f"seed {SEED} {json.dumps(CONFIG)}", _build)


def _build(folder: Path) -> None:
    from safetensors.torch import save_file

    progress("Making a randomly initialised drafter: the package carries no trained one")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    weights = random_weights(CONFIG, SEED)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Weights of a drafter of this configuration, bfloat16, the same for the same seed.

    Norms are one and matrices normal with standard deviation 0.02. There is no embedding and no
    head: a drafter uses its target's.
    """
    import torch  # seconds, which only the first use should pay

    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim
    inner = config["intermediate_size"]
    taps = len(config["dflash_config"]["target_layer_ids"])
    matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": head_dim,
        "self_attn.k_norm": head_dim,
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"layers.{layer}.{name}.weight": (size,) for name, size in norms.items()}
    return {
        name: (
            torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        ).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
