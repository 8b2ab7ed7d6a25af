"""The context's keys against SGLang's own; run by test_children.py.

SGLang settles its platform when it is imported, and these modules need the CPU platform, so this
file runs in a process of its own with ``SGLANG_PLATFORM=dflash_cpu``.
"""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from tests.kernels.cases import context_case
from tests.kernels.test_append_context import appended


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (80, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_equal_those_sglang_makes_for_the_block(is_neox, head_dim, rotary_dim, dtype):
    case = context_case(
        4, 2, 5, layers=1, heads=3, head_dim=head_dim, dtype=dtype, prefill=True, is_neox=is_neox
    )
    rope = RotaryEmbedding(head_dim, rotary_dim, 64, 10_000, is_neox, torch.float32)
    norm = RMSNorm(head_dim, eps=case.eps, weight_dtype=dtype)
    norm.weight.data.copy_(case.k_norm_weight[0])
    case = case._replace(cos_sin=rope.cos_sin_cache)
    with torch.inference_mode():
        normed = norm.forward_native(case.kv[:, 0, 0])
        # SGLang's CUDA path rotates in float32, its torch path in the model's dtype.
        _, wanted = rope.forward_native(case.positions, normed.float(), normed.float())
        (k_cache,) = appended(case).k_cache
    assert torch.equal(k_cache[case.slots], wanted.to(dtype))
