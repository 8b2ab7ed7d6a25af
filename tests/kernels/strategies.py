"""Hypothesis strategies over the sizes of every operation's cases, and their settings."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tests.kernels.cases import (
    accept_case,
    block_case,
    context_case,
    logits_case,
    mask_case,
    move_case,
    tree_case,
)

PROPERTY = settings(deadline=None, max_examples=150, derandomize=True)
"""The same examples in every run: a failure here is never a flake."""
INTERPRETED = settings(deadline=None, max_examples=60, derandomize=True)
"""An interpreted launch takes milliseconds per program."""

SEEDS = st.integers(0, 2**31)
BATCHES = st.sampled_from([0, 1, 2, 3, 5, 7])
INTEGERS = st.sampled_from([torch.int32, torch.int64])
FLOATS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ROWS = st.sampled_from([1, 2, 3, 8, 16, 63, 64, 65, 127, 128]) | st.integers(1, 128)


@st.composite
def block_cases(draw):
    rows = draw(ROWS)
    return block_case(
        draw(SEEDS),
        draw(BATCHES),
        draw(st.integers(1, rows)),
        rows,
        length_dtype=draw(INTEGERS),
        index_dtype=draw(INTEGERS),
    )


@st.composite
def accept_cases(draw):
    return accept_case(
        draw(SEEDS),
        draw(BATCHES),
        draw(ROWS),
        agreement=draw(st.sampled_from([0.0, 0.6, 0.95, 1.0])),
        branching=draw(st.sampled_from([0.0, 0.2, 0.8])),
        dead=draw(st.sampled_from([0.0, 0.3])),
        length_dtype=draw(INTEGERS),
        spare_width=draw(st.sampled_from([0, 1, 5])),
    )


@st.composite
def context_cases(draw):
    head_dim = draw(st.sampled_from([64, 80, 96, 128, 256]))
    dtype = draw(FLOATS)
    return context_case(
        draw(SEEDS),
        draw(BATCHES),
        draw(st.integers(1, 6)),
        layers=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=head_dim,
        rotary_dim=draw(st.sampled_from([head_dim, head_dim // 2, 2])),
        is_neox=draw(st.booleans()),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from([dtype, torch.float32])),
        table_dtype=draw(st.sampled_from([dtype, torch.float32])),
        slot_dtype=draw(INTEGERS),
        prefill=draw(st.booleans()),
    )


@st.composite
def move_cases(draw):
    rows = draw(ROWS)
    return move_case(
        draw(SEEDS),
        draw(BATCHES),
        rows,
        draw(st.integers(1, min(rows, 33))),
        heads=draw(st.sampled_from([1, 3])),
        head_dim=draw(st.sampled_from([8, 72])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])),
        slot_dtype=draw(INTEGERS),
        dense=draw(st.booleans()),
    )


@st.composite
def mask_cases(draw):
    return mask_case(
        draw(SEEDS),
        draw(BATCHES),
        draw(ROWS),
        longest=draw(st.sampled_from([0, 1, 70])),
        length_dtype=draw(INTEGERS),
    )


@st.composite
def tree_cases(draw):
    candidates = draw(st.integers(1, 8) | st.just(16))
    return tree_case(
        draw(SEEDS),
        draw(BATCHES),
        draw(st.integers(1, 9) | st.sampled_from([15, 31])),
        candidates,
        draw(ROWS),
        keep_spine=draw(st.booleans()),
        spine_discount=draw(st.sampled_from([0.0, 0.25, 3.0])),
        grain=draw(st.sampled_from([0.0, 0.0, 0.5, 4.0])),
        support=draw(st.sampled_from([None, None, 1, candidates])),
        sharpness=draw(st.sampled_from([0.0, 0.5, 2.0, 6.0])),
        length_dtype=draw(INTEGERS),
    )


@st.composite
def logits_cases(draw):
    columns = draw(st.integers(1, 600))
    return logits_case(
        draw(SEEDS),
        draw(BATCHES),
        columns,
        draw(st.integers(1, 16)),
        draw(st.integers(1, 5)),
        first_id=draw(st.sampled_from([0, 1, 75_000])),
        grain=draw(st.sampled_from([0.0, 1.0, 8.0])),
        support=draw(st.sampled_from([None, None, 0, 1, 5])),
        dtype=draw(FLOATS),
    )
