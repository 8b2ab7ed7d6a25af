"""Every row sees the context and its ancestors, wherever its request begins in the buffer."""

from __future__ import annotations

import torch
from hypothesis import example, given
from sglang_dflash.kernels.tree_mask import tree_mask

from tests.kernels import oracles
from tests.kernels.cases import mask_case
from tests.kernels.strategies import PROPERTY, mask_cases


@PROPERTY
@given(mask_cases())
@example(mask_case(0, 3, 128, longest=200))
def test_equals_the_definition_element_by_element(case):
    found = tree_mask(case.ancestors, case.lengths, case.mask.clone())
    assert found.tolist() == oracles.tree_mask(case)


def test_a_tree_of_three_drawn_out():
    # The root, its two children; two tokens of context.
    ancestors = torch.tensor([[[0b001], [0b011], [0b101]]])
    mask = tree_mask(ancestors, torch.tensor([2]), torch.zeros(15, dtype=torch.bool))
    assert mask.view(3, 5).int().tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 0, 1],
    ]
