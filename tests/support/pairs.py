"""Tiny random target/drafter pairs that accept some drafts and reject others.

The target's residual stream is dominated by the embedding, so its greedy text repeats a token for
a while and is then pushed elsewhere by its layers. The drafter copies the anchor to every row
(the MASK embedding is almost zero, so what attention brings decides) and is disturbed by its
context. Accept lengths therefore spread over 1..B and depend on the context K/V being right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 384
EOS, BOS, PAD, MASK = 256, 257, 258, 259
HEAD_DIM = 32
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@dataclass(frozen=True)
class TinyPair:
    """Folders of a target and a drafter made for it."""

    target: Path
    drafter: Path


def tiny_pair(
    folder: Path,
    kind: str = "llama",
    *,
    layers: int = 3,
    hidden: int = 128,
    block_size: int = 8,
    draft_layers: int = 2,
    sliding: bool = False,
    context_noise: float = 0.03,
    layer_gain: float = 0.35,
    seed: int = 0,
) -> TinyPair:
    """Write a pair in the Hugging Face layout, float32.

    Args:
        folder: where ``target/`` and ``drafter/`` go.
        kind: ``llama`` or ``qwen3``.
        layers: of the target.
        hidden: of both.
        block_size: the drafter's, anchor included.
        draft_layers: of the drafter.
        sliding: make the drafter's first layer a sliding one.
        context_noise: how much the context disturbs the drafter.
        layer_gain: how much the target's layers disturb its repetition.
        seed: of all weights.
    """
    torch.manual_seed(seed)
    heads, kv_heads, inter = 4, 2, 2 * hidden
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "rms_norm_eps": 1e-6,
    }
    model = model_class(
        config_class(
            **shared,
            num_hidden_layers=layers,
            pad_token_id=PAD,
            tie_word_embeddings=kind == "llama",
            initializer_range=0.2,
        )
    )
    state = model.state_dict()
    embedding = torch.randn(VOCABULARY, hidden)
    embedding[MASK] *= 1e-3
    state["model.embed_tokens.weight"] = embedding
    state["lm_head.weight"] = embedding if kind == "llama" else embedding.clone()
    for name in state:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] = torch.randn_like(state[name]) * layer_gain / hidden**0.5
    # Control tokens would end or upset texts at random places; the head never prefers them.
    state["model.embed_tokens.weight"][EOS] *= 0.1
    model.load_state_dict(state)
    target, drafter = folder / "target", folder / "drafter"
    model.save_pretrained(target)
    save_tokenizer(target)

    taps = [0, layers - 2]
    drafter.mkdir(parents=True, exist_ok=True)
    config = {
        **shared,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": draft_layers,
        "num_target_layers": layers,
        "block_size": block_size,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": MASK},
    }
    if sliding:
        config["layer_types"] = ["sliding_attention"] + ["full_attention"] * (draft_layers - 1)
        config |= {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0}
    (drafter / "config.json").write_text(json.dumps(config, indent=1))

    copied = heads * HEAD_DIM
    value = torch.linalg.qr(torch.randn(hidden, kv_heads * HEAD_DIM))[0].T
    # Heads of one K/V group repeat its value; o_proj puts each group's back once.
    group = heads // kv_heads
    blocks = value.view(kv_heads, HEAD_DIM, hidden).repeat_interleave(group, 0) / group
    weights = {
        "fc.weight": torch.randn(hidden, len(taps) * hidden) / hidden**0.5,
        "hidden_norm.weight": torch.full((hidden,), context_noise),
        "norm.weight": torch.ones(hidden),
    }
    for index in range(draft_layers):
        prefix = f"layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        first = index == 0
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            attention + "q_proj.weight": torch.randn(copied, hidden) / hidden**0.5,
            attention + "k_proj.weight": torch.randn(kv_heads * HEAD_DIM, hidden) / hidden**0.5,
            attention + "v_proj.weight": value.clone(),
            attention + "o_proj.weight": blocks.reshape(copied, hidden).T * (1.0 if first else 0.2),
            attention + "q_norm.weight": torch.ones(HEAD_DIM),
            attention + "k_norm.weight": torch.ones(HEAD_DIM),
            mlp + "gate_proj.weight": torch.randn(inter, hidden) / hidden**0.5,
            mlp + "up_proj.weight": torch.randn(inter, hidden) / hidden**0.5,
            mlp + "down_proj.weight": torch.randn(hidden, inter) * 0.01 / inter**0.5,
        }
    save_file({name: t.contiguous() for name, t in weights.items()}, drafter / "model.safetensors")
    return TinyPair(target, drafter)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0..255 are bytes."""
    vocabulary = {b: i for i, b in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for index, name in enumerate(("<eos>", "<bos>", "<pad>", "<mask>")):
        vocabulary[name] = 256 + index
    for index in range(len(vocabulary), VOCABULARY):
        vocabulary[f"<u{index}>"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
