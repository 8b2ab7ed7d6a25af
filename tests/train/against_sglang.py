"""An exported drafter in SGLang's own DFlashDraftModel; run by test_export.py.

SGLang settles its platform when it is imported, so this file runs in a process of its own with
``SGLANG_PLATFORM=dflash_cpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import prepare_server_args
from torch import nn
from transformers import AutoConfig

from sglang_dflash.bench.server import free_port
from sglang_dflash.train.export import drafter_config, export
from sglang_dflash.train.model import DraftModel
from tests.support.training import random_llama, training_config, write_records

CONTEXT, SIZE = 40, 8


class ContextAttention(nn.Module):
    """Stands for SGLang's paged attention: the context's K/V are at hand."""

    def __init__(self, attention: Any, context: torch.Tensor):
        super().__init__()
        positions = torch.arange(len(context))
        k, self.v = attention.kv_proj_only(context)
        self.k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
        self.owner, self.causal = [attention], attention.attn_type != AttentionType.ENCODER_ONLY

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> Any:
        """``[rows, heads * D]`` attention over context and block."""
        (owner,) = self.owner
        heads, kv_heads, size = owner.num_heads, owner.num_kv_heads, owner.head_dim
        keys = torch.cat((self.k.view(-1, kv_heads, size), k.view(-1, kv_heads, size)))
        values = torch.cat((self.v.view(-1, kv_heads, size), v.view(-1, kv_heads, size)))
        rows = torch.arange(len(self.k), len(keys)).unsqueeze(1)
        columns = torch.arange(len(keys))
        seen = torch.ones(len(rows), len(keys), dtype=torch.bool)
        if self.causal:
            seen &= columns <= rows
        if owner.sliding_window_size >= 0:
            seen &= columns >= rows - owner.sliding_window_size
        out = nn.functional.scaled_dot_product_attention(
            q.view(-1, heads, size).transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=seen,
            scale=owner.scaling,
            enable_gqa=True,
        )
        return out.transpose(0, 1).flatten(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load_plugins()
    folder = random_llama(tmp_path_factory.mktemp("target"))
    args = prepare_server_args(["--model-path", str(folder), "--dtype", "float32"])
    args.resolve_once()
    get_context().set_server_args(args)
    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
    )
    initialize_model_parallel()
    current_platform.init_backend()
    return folder


@pytest.mark.parametrize("window", [None, 16])
def test_sglang_drafts_what_was_trained(target: Path, tmp_path: Path, window: int | None) -> None:
    data = write_records(tmp_path / "data.jsonl", 4)
    drafter = {"block_size": SIZE, "sliding_window": window, "target_layer_ids": [0, 2]}
    config = training_config(tmp_path, target, data, drafter=drafter)
    shape = drafter_config(config, AutoConfig.from_pretrained(target))
    torch.manual_seed(0)
    ours = DraftModel(shape).eval()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.2, mean=float(parameter.dim() == 1))
    provenance = {
        "target": str(target),
        "sequences": 0,
        "response_tokens": 0,
        "steps": 0,
        "chat_template_sha256": None,
    }
    export(tmp_path / "drafter", shape, ours.state_dict(), provenance, torch.float32)

    theirs = DFlashDraftModel(AutoConfig.from_pretrained(tmp_path / "drafter")).eval()
    theirs.load_weights(load_file(tmp_path / "drafter" / "model.safetensors").items())
    embedded = torch.randn(SIZE, shape["hidden_size"])
    features = torch.randn(CONTEXT, 2 * shape["hidden_size"])
    with torch.no_grad():
        current_platform.post_load_model(theirs)
        context = theirs.project_target_hidden(features)
        for layer in theirs.layers:
            layer.self_attn.attn = ContextAttention(layer.self_attn, context)
        positions = torch.arange(CONTEXT, CONTEXT + SIZE)
        got = theirs(torch.zeros(SIZE, dtype=torch.long), positions, None, input_embeds=embedded)
        anchors = torch.tensor([[CONTEXT]])
        want = ours(embedded[None, None], features[None], anchors)[0, 0]
    got = getattr(got, "hidden_states", got)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
