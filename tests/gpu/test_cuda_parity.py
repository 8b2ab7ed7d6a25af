"""Every kernel on the GPU equals its reference: the properties of tests/kernels, on a grid.

The grid replaces hypothesis, which a GPU machine need not have.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels import parity
from tests.kernels.cases import (
    accept_case,
    block_case,
    context_case,
    logits_case,
    mask_case,
    move_case,
    tree_case,
)

DEVICE = "cuda"
BATCHES = (0, 1, 3, 17)
INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROWS = (1, 2, 8, 16, 63, 64, 65, 128)


@pytest.mark.parametrize("bs", BATCHES)
@pytest.mark.parametrize("rows", ROWS)
def test_prepare_block(bs, rows):
    for seed, (length, index) in enumerate(itertools.product(INTEGERS, INTEGERS)):
        case = block_case(seed, bs, (rows + 1) // 2, rows, length_dtype=length, index_dtype=index)
        parity.check_prepare_block(case, DEVICE)


@pytest.mark.parametrize("bs", BATCHES)
@pytest.mark.parametrize("rows", ROWS)
def test_accept(bs, rows):
    sweep = itertools.product((0.0, 0.6, 1.0), (0.0, 0.2, 0.8), (0.0, 0.3), INTEGERS)
    for seed, (agreement, branching, dead, length) in enumerate(sweep):
        case = accept_case(
            seed,
            bs,
            rows,
            agreement=agreement,
            branching=branching,
            dead=dead,
            length_dtype=length,
            spare_width=seed % 3,
        )
        parity.check_accept(case, DEVICE)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("columns", "slices"), [(7, 1), (600, 5), (49_152, 12), (151_936, 38)])
def test_topk_and_merge_topk(dtype, columns, slices):
    sweep = itertools.product(BATCHES, (1, 8, 16), (0.0, 1.0), (None, 5))
    for seed, (rows, candidates, grain, support) in enumerate(sweep):
        case = logits_case(
            seed,
            rows,
            columns,
            candidates,
            slices,
            first_id=(0, 75_000)[seed % 2],
            grain=grain,
            support=support,
            dtype=dtype,
        )
        parity.check_topk(case, DEVICE)
        parity.check_merge_topk(case, DEVICE)


@pytest.mark.parametrize("bs", BATCHES)
@pytest.mark.parametrize("rows", ROWS)
def test_grow_tree(bs, rows):
    sweep = itertools.product(((7, 8), (15, 16), (31, 3)), (False, True), (0.0, 0.3), (0.0, 0.5))
    for seed, ((depths, candidates), keep_spine, discount, grain) in enumerate(sweep):
        case = tree_case(
            seed,
            bs,
            depths,
            candidates,
            rows,
            keep_spine=keep_spine,
            spine_discount=discount,
            grain=grain,
            support=candidates if seed % 3 == 0 else None,
            length_dtype=INTEGERS[seed % 2],
        )
        parity.check_tree(case, DEVICE)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [(8, 128, 128), (3, 64, 64), (2, 80, 32), (5, 96, 48), (1, 256, 64), (32, 128, 2)],
)
def test_append_context(dtype, is_neox, heads, head_dim, rotary_dim):
    sweep = itertools.product(BATCHES, (1, 16), (False, True), INTEGERS)
    for seed, (bs, rows, prefill, slot) in enumerate(sweep):
        case = context_case(
            seed,
            bs,
            rows,
            heads=heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            is_neox=is_neox,
            dtype=dtype,
            cache_dtype=(dtype, torch.float32)[seed % 2],
            table_dtype=(torch.float32, dtype)[seed // 2 % 2],
            slot_dtype=slot,
            prefill=prefill,
        )
        parity.check_append_context(case, DEVICE)


@pytest.mark.parametrize("rows", ROWS)
def test_tree_mask(rows):
    for seed, (bs, length) in enumerate(itertools.product(BATCHES, INTEGERS)):
        parity.check_tree_mask(mask_case(seed, bs, rows, longest=3000, length_dtype=length), DEVICE)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
@pytest.mark.parametrize("rows", ROWS)
def test_move_rows(dtype, rows):
    sweep = itertools.product(BATCHES, (8, 72, 1024), (False, True), INTEGERS)
    for seed, (bs, head_dim, dense, slot) in enumerate(sweep):
        case = move_case(
            seed,
            bs,
            rows,
            min(rows, (1, 8, 33)[seed % 3]),
            head_dim=head_dim,
            dtype=dtype,
            slot_dtype=slot,
            dense=dense,
        )
        parity.check_move_rows(case, DEVICE)


def test_move_rows_orders_loads_before_stores_under_load():
    """Every target is another depth's source, in rows far wider than a warp, many times over."""
    for seed in range(20):
        case = move_case(
            seed, 64, 33, 32, caches=8, heads=8, head_dim=128, dtype=torch.bfloat16, dense=True
        )
        parity.check_move_rows(case, DEVICE)
