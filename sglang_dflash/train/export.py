"""Write a trained drafter in the published checkpoint format, with what made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.model import default_target_layer_ids

FOLDER = "drafter"


def drafter_config(config: TrainConfig, target: Any) -> dict[str, Any]:
    """A drafter's config.json.

    Args:
        config: the training file.
        target: the target's Hugging Face config.

    Raises:
        TrainError: a key does not fit the target.
    """
    text = target.get_text_config()
    wanted = config.drafter
    layers = wanted.num_hidden_layers
    heads: int = wanted.num_attention_heads or text.num_attention_heads
    kv_heads: int = wanted.num_key_value_heads or text.num_key_value_heads or heads
    head_dim = wanted.head_dim or getattr(text, "head_dim", None)
    head_dim = head_dim or text.hidden_size // text.num_attention_heads
    if heads % kv_heads:
        raise TrainError(
            f"drafter.num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}."
        )
    taps = wanted.target_layer_ids
    if taps is None:
        taps = default_target_layer_ids(text.num_hidden_layers, layers)
    sliding = wanted.sliding_window
    made: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": wanted.block_size,
        "num_hidden_layers": layers,
        "num_target_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": wanted.intermediate_size or text.intermediate_size,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * layers,
        "tie_word_embeddings": bool(text.tie_word_embeddings),
        "dtype": "bfloat16",
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": wanted.mask_token_id},
    }
    if sliding:
        made |= {"sliding_window": sliding, "use_sliding_window": True}
    return made | _rope(text)


def _rope(text: Any) -> dict[str, Any]:
    """The target's rotary embedding, under the keys both transformers and SGLang read."""
    parameters = dict(getattr(text, "rope_parameters", None) or {})
    theta = parameters.pop("rope_theta", None) or getattr(text, "rope_theta", 10_000.0)
    scaling = getattr(text, "rope_scaling", None) or parameters
    kind = (scaling or {}).get("rope_type", "default")
    keys: dict[str, Any] = {"rope_theta": theta}
    if kind != "default":
        keys["rope_scaling"] = {k: v for k, v in scaling.items() if k != "rope_theta"}
    return keys


def export(
    folder: Path,
    shape: dict[str, Any],
    weights: dict[str, torch.Tensor],
    provenance: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and a model card.

    Args:
        folder: created; files of an earlier export are replaced.
        shape: the drafter's config.json.
        weights: under the published names.
        provenance: what made it: target, data, scores; kept under ``training`` in config.json.
        dtype: of the written weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**shape, "dtype": str(dtype).removeprefix("torch."), "training": provenance}
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(shape, provenance), encoding="utf-8")


def model_card(shape: dict[str, Any], provenance: dict[str, Any]) -> str:
    """The README of an exported drafter."""
    section = shape["dflash_config"]
    scores = provenance.get("scores") or {}
    rows = "\n".join(
        f"| {source} | {score['accept_length']:.2f} | {score['tokens']} |"
        for source, score in scores.items()
    )
    table = (
        f"\n| held-out prompts | accept length | tokens |\n|---|---|---|\n{rows}\n" if rows else ""
    )
    return f"""# DFlash drafter for {provenance["target"]}

Drafts blocks of {shape["block_size"]} tokens for `{provenance["target"]}`
([DFlash](https://arxiv.org/abs/2602.06036)), for SGLang with sglang-dflash:

    python -m sglang.launch_server --model-path {provenance["target"]} \\
        --speculative-algorithm DFLASH --speculative-draft-model-path THIS_FOLDER

{shape["num_hidden_layers"]} layers, target layers {section["target_layer_ids"]}, MASK id
{section["mask_token_id"]}. Trained on {provenance["sequences"]} answers of the target
({provenance["response_tokens"]} tokens) for {provenance["steps"]} steps.
{table}
Accept length is committed tokens per target pass at temperature 0. It holds for the target above,
with the chat template it was trained with (SHA-256 `{provenance["chat_template_sha256"]}`).
"""
