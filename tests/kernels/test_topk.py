"""The likeliest tokens of a row of logits, whole or in slices: against sorting all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from sglang_dflash.kernels.merge_topk import Candidates, merge_topk
from sglang_dflash.kernels.topk import SLICE, TopK, slice_width, slices_of, topk

from tests.kernels import oracles, parity
from tests.kernels.cases import LogitsCase, logits_case
from tests.kernels.strategies import PROPERTY, logits_cases


def run(case: LogitsCase) -> Candidates:
    best = topk(case.logits, case.candidates, first_id=case.first_id, out=parity.topk_outputs(case))
    return merge_topk(best, case.candidates)


@PROPERTY
@given(logits_cases())
@example(logits_case(0, 3, 20_000, 8, 1, dtype=torch.bfloat16))
@example(logits_case(1, 3, 20_000, 16, 5, grain=1.0))
def test_equals_sorting(case: LogitsCase) -> None:
    found = run(case)
    for row in range(len(case.logits)):
        wanted = oracles.likeliest(case, row)
        missing = case.candidates - len(wanted)
        assert found.ids[row].tolist() == [token for token, _ in wanted] + [0] * missing
        log_q = [value for _, value in wanted] + [-float("inf")] * missing
        assert found.log_q[row].tolist() == pytest.approx(log_q, abs=2e-5)


@PROPERTY
@given(logits_cases())
def test_ranks_that_merge_their_shards_find_what_one_rank_finds(case: LogitsCase) -> None:
    whole = merge_topk(topk(case.logits, case.candidates), case.candidates)
    shards = [
        merge_topk(topk(shard, case.candidates, first_id=first), case.candidates)
        for first, shard in zip(
            range(0, case.logits.shape[1], 37), case.logits.split(37, dim=1), strict=True
        )
    ]
    gathered = TopK(
        torch.stack([shard.keys for shard in shards], 1),
        torch.stack([shard.lse for shard in shards], 1),
    )
    merged = merge_topk(gathered, case.candidates)
    assert torch.equal(merged.ids, whole.ids)
    torch.testing.assert_close(merged.log_q, whole.log_q, rtol=1e-6, atol=1e-5)


def test_the_likeliest_token_is_argmaxs_even_among_equals() -> None:
    case = logits_case(3, 64, 5000, 4, 1, grain=2.0, dtype=torch.bfloat16)
    assert torch.equal(run(case).ids[:, 0], case.logits.max(-1).indices)


@pytest.mark.parametrize("columns", [1, 4095, 4096, 4097, 8193, 49_152, 128_256, 151_936, 262_144])
def test_the_slices_of_a_gpu_cover_the_vocabulary(columns: int) -> None:
    slices = slices_of(columns)
    width = slice_width(columns, slices)
    assert width <= SLICE
    assert slices * width >= columns
