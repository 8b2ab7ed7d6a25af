"""The block, the window and its slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from sglang_dflash.kernels.prepare_block import DraftBlock, prepare_block

from tests.kernels import oracles
from tests.kernels.cases import BlockCase, block_case
from tests.kernels.strategies import PROPERTY, block_cases


def run(case: BlockCase, out: DraftBlock | None = None) -> DraftBlock:
    return prepare_block(
        *case[:4],
        mask_token_id=case.mask_token_id,
        block_size=case.block_size,
        verify_rows=case.verify_rows,
        out=out,
    )


@PROPERTY
@given(block_cases())
def test_ids_positions_and_slots(case):
    ids, positions, slots = oracles.block(case)
    found = run(case)
    assert found.ids.tolist() == ids
    assert found.positions.tolist() == positions
    assert found.slots.tolist() == slots
    assert {tensor.dtype for tensor in found} == {torch.int64}


def test_writes_into_the_rows_it_is_given():
    case = block_case(3, bs=3, block_size=4, verify_rows=6)
    static = DraftBlock.empty(8, 4, 6, "cpu")
    for tensor in static:
        tensor.fill_(-1)
    found = run(case, out=DraftBlock(*(tensor[:3] for tensor in static)))
    for view, tensor, wanted in zip(found, static, run(case), strict=True):
        assert view.data_ptr() == tensor.data_ptr()
        assert torch.equal(tensor[:3], wanted)
        assert (tensor[3:] == -1).all()


@pytest.mark.parametrize(("block_size", "verify_rows"), [(5, 4), (0, 4)])
def test_refuses_rows_that_nobody_would_verify(block_size, verify_rows):
    case = block_case(0, 1, 4, 4)._replace(block_size=block_size, verify_rows=verify_rows)
    with pytest.raises(ValueError, match=f"block_size={block_size}.*verify_rows={verify_rows}"):
        run(case)
