"""The drafter's context: right keys in the right slots, and no trace of rejected rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from sglang_dflash.kernels.append_context import ContextCache, append_context, valid_rows

from tests.kernels import oracles
from tests.kernels.cases import SENTINEL, ContextCase, context_case
from tests.kernels.parity import TOLERANCE
from tests.kernels.strategies import PROPERTY, context_cases


def appended(case: ContextCase) -> ContextCache:
    cache = case.cache()
    append_context(
        case.kv,
        cache,
        positions=case.positions,
        slots=case.slots,
        commit_lengths=case.commit_lengths,
        rows_per_request=case.rows_per_request,
    )
    return cache


@PROPERTY
@given(context_cases())
def test_committed_rows_are_written_and_nothing_else_is(case):
    cache = appended(case)
    committed = oracles.committed_rows(case)
    written = case.slots[committed].long()
    untouched = torch.ones(case.cache_slots, dtype=torch.bool)
    untouched[written] = False
    tolerance = max(TOLERANCE[d] for d in (case.kv.dtype, case.cache_dtype))
    for layer, (k_cache, v_cache) in enumerate(zip(cache.k_cache, cache.v_cache, strict=True)):
        assert (k_cache[untouched] == SENTINEL).all()
        assert (v_cache[untouched] == SENTINEL).all()
        assert torch.equal(v_cache[written], case.kv[committed, layer, 1].to(case.cache_dtype))
        for row in committed[:2]:
            for head in range(case.kv.shape[3]):
                wanted = torch.tensor(oracles.context_key(case, row, layer, head))
                torch.testing.assert_close(
                    k_cache[int(case.slots[row]), head].float(),
                    wanted,
                    rtol=tolerance,
                    atol=tolerance,
                )


def test_an_empty_step_writes_nothing():
    case = context_case(0, 3, 4)
    cache = appended(case._replace(commit_lengths=torch.zeros(3, dtype=torch.int32)))
    assert all((tensor == SENTINEL).all() for tensor in cache.caches.tensors)


def test_valid_rows_are_each_requests_prefix():
    assert valid_rows(torch.tensor([2, 0, 3]), 3).tolist() == [0, 1, 6, 7, 8]
    assert valid_rows(torch.tensor([], dtype=torch.int32), 3).tolist() == []


def test_writing_valid_rows_alone_is_the_same():
    case = context_case(8, 5, 6)
    keep = valid_rows(case.commit_lengths, case.rows_per_request)
    compressed = case._replace(
        kv=case.kv[keep],
        positions=case.positions[keep],
        slots=case.slots[keep],
        commit_lengths=None,
        rows_per_request=1,
    )
    for actual, wanted in zip(
        appended(compressed).caches.tensors, appended(case).caches.tensors, strict=True
    ):
        assert torch.equal(actual, wanted)


def layer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_cache": []}, "1 K caches but 0 V caches"),
        ({"v_cache": [layer(8, 2, 32)]}, r"cache 1 has shape .*8, 2, 32"),
        ({"v_cache": [layer(8, 2, 64, dtype=torch.float16)]}, "cache 1 has dtype torch.float16"),
        ({"k_norm_weight": layer(2, 64)}, r"k_norm_weight is \(2, 64\)"),
        ({"cos_sin_cache": layer(9, 66)}, "66 columns.*head_dim 64"),
        ({"cos_sin_cache": layer(9, 31)}, "31 columns.*even"),
        ({"k_cache": [layer(8, 64)], "v_cache": [layer(8, 64)]}, "must be .slots, heads"),
    ],
)
def test_refuses_what_does_not_fit_together(change, message):
    fitting = {
        "k_cache": [layer(8, 2, 64)],
        "v_cache": [layer(8, 2, 64)],
        "k_norm_weight": layer(1, 64),
        "eps": 1e-6,
        "cos_sin_cache": layer(9, 64),
    }
    ContextCache(**fitting)
    with pytest.raises(ValueError, match=message):
        ContextCache(**{**fitting, **change})


def test_refuses_projections_of_another_shape():
    case = context_case(0, 2, 3)
    with pytest.raises(ValueError, match=r"kv is \(6, 2, 2, 1, 64\)"):
        append_context(
            case.kv[:, :, :, :1].contiguous(),
            case.cache(),
            positions=case.positions,
            slots=case.slots,
        )
    with pytest.raises(ValueError, match="6 rows, not 2 requests of 4 rows"):
        appended(case._replace(rows_per_request=4))
