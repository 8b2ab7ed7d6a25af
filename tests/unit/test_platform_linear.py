"""Projections in blocked layout: the same numbers, for few distinct shapes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sglang_dflash.platforms import linear


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 129, 513, 4097])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_projection_equals_the_plain_one(rows: int, biased: bool) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 64, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if biased else None
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    got = linear.PackedLinearMethod(weight).apply(torch.nn.Module(), x, bias)
    want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert got.shape == want.shape
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-1)


def test_prompts_of_every_length_need_few_shapes() -> None:
    padded = [linear.padded_rows(rows) for rows in range(1, 4097)]
    assert all(got >= rows for rows, got in enumerate(padded, 1))
    assert len(set(padded)) < 120
    # The rows of a verify step are not padded: blocks of 4 and 8 at any concurrency up to 16.
    assert all(linear.padded_rows(8 * requests) == 8 * requests for requests in range(1, 17))
