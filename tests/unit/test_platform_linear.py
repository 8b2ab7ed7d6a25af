"""Projections in blocked layout: the same numbers, for few distinct shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from torch.nn import functional as F

from sglang_dflash.platforms import linear

TOLERANCE = {
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-1},
    torch.float32: {"rtol": 1e-4, "atol": 1e-3},
}


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 129, 513, 4097])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_projection_equals_the_plain_one(rows: int, biased: bool) -> None:
    dtype = linear.packed_dtype()
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    got = linear.PackedLinearMethod(weight).apply(torch.nn.Module(), x, bias)
    want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert got.shape == want.shape
    torch.testing.assert_close(got.float(), want, **TOLERANCE[dtype])


def test_prompts_of_every_length_need_few_shapes() -> None:
    padded = [linear.padded_rows(rows) for rows in range(1, 4097)]
    assert all(got >= rows for rows, got in enumerate(padded, 1))
    assert len(set(padded)) < 120
    # The rows of a verify step are not padded: blocks of 4 and 8 at any concurrency up to 16.
    assert all(linear.padded_rows(8 * requests) == 8 * requests for requests in range(1, 17))


def test_a_packed_head_gives_the_same_logits_and_the_same_likeliest_tokens() -> None:
    head = Head()
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).to(head.weight.dtype)
    assert linear.greedy_tokens(head, hidden) is None
    model = Model(head)
    assert linear.pack_weights(model) == 1
    want = hidden.float() @ head.weight.float().T
    got = head.quant_method.apply(head, hidden)
    torch.testing.assert_close(got.float(), want, **TOLERANCE[head.weight.dtype])
    chosen = linear.greedy_tokens(head, hidden)
    assert chosen is not None
    # Padding rows of the vocabulary are nobody's token.
    assert torch.equal(chosen, got[:, :300].argmax(-1))
    ids = torch.tensor([3, 299])
    assert torch.equal(head.quant_method.embedding(head, ids), head.weight[ids])


@pytest.mark.parametrize(
    "flags", [{"use_fp32_lm_head": True}, {"rl_on_policy_target": "fsdp"}], ids=str
)
def test_a_head_of_other_precision_is_left_alone(flags: dict[str, object]) -> None:
    model = Model(Head(), **flags)
    assert linear.pack_weights(model) == 0
    assert type(model.lm_head.quant_method) is UnquantizedEmbeddingMethod


def test_a_part_of_a_head_names_no_tokens() -> None:
    model = Model(Head())
    linear.pack_weights(model)
    model.lm_head.tp_size = 2
    assert linear.greedy_tokens(model.lm_head, torch.randn(7, 64)) is None


class Head(torch.nn.Module):
    """300 tokens, padded to 320 rows, as SGLang keeps a head."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
        weight[300:] = 100 * weight[:20].abs()
        self.weight = torch.nn.Parameter(weight.to(linear.packed_dtype()), requires_grad=False)
        self.quant_method: Any = UnquantizedEmbeddingMethod()
        self.tp_size = 1
        self.shard_indices = SimpleNamespace(num_org_elements=300, num_added_elements=0)


class Model(torch.nn.Module):
    """What of an SGLang model is looked at."""

    def __init__(self, head: Head, **flags: object) -> None:
        super().__init__()
        self.lm_head = head
        plain = {"use_fp32_lm_head": False, "use_fp32_lm_head_output": False}
        self.logits_processor = SimpleNamespace(
            **{**plain, "rl_on_policy_target": None, **flags}  # type: ignore[arg-type]
        )
