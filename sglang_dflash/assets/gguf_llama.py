"""A Llama model in a GGUF file as a Hugging Face folder, bfloat16.

GGUF pairs the rows that a rotary embedding turns together: rows ``2i`` and ``2i + 1`` of each
head of the query and key projections. Hugging Face pairs rows ``i`` and ``i + head_dim / 2``, so
these rows are put back. An output head that is not in the file is tied to the embedding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from sglang_dflash.assets.tokenizer import write_tokenizer

_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face module of each GGUF tensor of a Llama with a tied head."""


def convert(file: Path, folder: Path) -> None:
    """Write config, generation config, weights and tokenizer of a GGUF file into a folder."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = llama_config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if part in heads:
            weight = restore_rotary_rows(weight, heads[part])
        weights[parameter_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {key: config[key] for key in ids})
    write_tokenizer(fields, folder)


def llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json from a GGUF file's metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: 1e-05 reads as 9.999999747378752e-06.
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def parameter_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor, for instance ``blk.3.attn_q.weight``."""
    *block, part, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_PARTS[part]}.{kind}"


def restore_rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection ``[heads * head_dim, hidden]`` in Hugging Face's order."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
