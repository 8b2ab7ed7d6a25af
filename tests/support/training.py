"""A tiny target and training files for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dflash.train import config as training_file
from sglang_dflash.train.config import TrainConfig
from tests.support.pairs import BOS, EOS, MASK, PAD, VOCABULARY, save_tokenizer


def random_llama(
    folder: Path, *, layers: int = 4, tied: bool = False, spread: float = 0.05, seed: int = 0
) -> Path:
    """A randomly initialised Llama.

    Untied and with a small spread its greedy text can be learnt: the residual stream is mostly the
    last token's embedding, so that a token nearly decides the next, and texts fall into loops.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            tie_word_embeddings=tied,
            initializer_range=spread,
        )
    )
    with torch.no_grad():
        # Only bytes are said: rows of control tokens are short, so the head never prefers them.
        model.get_input_embeddings().weight[EOS:] *= 0.01
        model.get_output_embeddings().weight[EOS:] *= 0.01 if not tied else 1.0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def write_records(file: Path, count: int, *, length: int = 40, seed: int = 0) -> Path:
    """Answered prompts: each answer counts up from a random byte."""
    rng = random.Random(seed)
    with file.open("w", encoding="utf-8") as output:
        for _ in range(count):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(3, 12))]
            answer = [(prompt[-1] + 1 + i) % 200 for i in range(rng.randrange(10, length))]
            output.write(json.dumps({"prompt_ids": prompt, "output_ids": answer}) + "\n")
    return file


def training_config(folder: Path, target: Path, data: Path, /, **sections: Any) -> TrainConfig:
    """A training file for tiny targets; sections update its own."""
    return training_file.load(training_yaml(folder, target, data, **sections))


def training_yaml(folder: Path, target: Path, data: Path, /, **sections: Any) -> Path:
    """The file of :func:`training_config`."""
    content: dict[str, Any] = {
        "target": str(target),
        "output": str(folder / "run"),
        "data": {"files": [str(data)], "held_out": 0.2},
        "drafter": {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": MASK},
        "fit": {
            "steps": 6,
            "sequences": 4,
            "anchors": 8,
            "learning_rate": 0.003,
            "dtype": "float32",
            "log_every": 1,
            "save_every": 3,
        },
    }
    for section, keys in sections.items():
        if isinstance(keys, dict):
            content[section] = {**content.get(section, {}), **keys}
        else:
            content[section] = keys
    file = folder / "train.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file
