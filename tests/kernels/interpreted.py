"""Kernels against references under Triton's interpreter; run by test_interpreted.py.

Triton decides at import whether it interprets, and another test or SGLang may have imported it
long before, so this file runs in a process of its own with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given, settings

from tests.kernels import parity, strategies
from tests.kernels.cases import accept_case, logits_case, mask_case, move_case, tree_case

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.fail("run with TRITON_INTERPRET=1 in the environment", pytrace=False)


@strategies.INTERPRETED
@given(strategies.block_cases())
def test_prepare_block(case):
    parity.check_prepare_block(case, "cpu")


@strategies.INTERPRETED
@given(strategies.accept_cases())
@example(accept_case(0, 3, 128, agreement=1.0))
@example(accept_case(1, 3, 64, agreement=1.0))
@example(accept_case(2, 2, 128, agreement=1.0, branching=0.05, dead=0.1))
def test_accept(case):
    parity.check_accept(case, "cpu")


@strategies.INTERPRETED
@given(strategies.context_cases())
def test_append_context(case):
    parity.check_append_context(case, "cpu")


@strategies.INTERPRETED
@given(strategies.move_cases())
@example(move_case(0, 3, 33, 32, dense=True))
def test_move_rows(case):
    parity.check_move_rows(case, "cpu")


@settings(strategies.INTERPRETED, max_examples=25)
@given(strategies.mask_cases())
@example(mask_case(0, 3, 65, longest=2500))
def test_tree_mask(case):
    parity.check_tree_mask(case, "cpu")


@settings(strategies.INTERPRETED, max_examples=25)
@given(strategies.tree_cases())
@example(tree_case(0, 2, 15, 8, 128))
@example(tree_case(1, 2, 15, 8, 128, keep_spine=True, spine_discount=0.3))
@example(tree_case(2, 3, 31, 16, 100, sharpness=0.0))
@example(tree_case(3, 2, 4, 3, 128, support=2))
def test_grow_tree(case):
    parity.check_tree(case, "cpu")


@strategies.INTERPRETED
@given(strategies.logits_cases())
@example(logits_case(0, 2, 9000, 8, 3, grain=1.0))
def test_topk(case):
    parity.check_topk(case, "cpu")


@strategies.INTERPRETED
@given(strategies.logits_cases())
@example(logits_case(0, 2, 9000, 16, 37))
def test_merge_topk(case):
    parity.check_merge_topk(case, "cpu")
