"""Accepted rows end up in position order, whatever they overwrite on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from sglang_dflash.kernels.layer_caches import LayerCaches
from sglang_dflash.kernels.move_rows import move_rows

from tests.kernels import oracles
from tests.kernels.cases import move_case
from tests.kernels.strategies import PROPERTY, move_cases


@PROPERTY
@given(move_cases())
@example(move_case(0, 3, 33, 32, dense=True))
def test_equals_copying_out_of_a_snapshot(case):
    caches = case.layers()
    move_rows(caches, case.slots, case.path, case.accept_lengths)
    assert torch.equal(torch.stack(caches.tensors), oracles.moved(case))


def test_a_chain_moves_nothing():
    case = move_case(1, 4, 16, 16, dense=True)
    assert (case.path == torch.arange(16)).all()
    caches = case.layers()
    move_rows(caches, case.slots, case.path, case.accept_lengths)
    assert torch.equal(torch.stack(caches.tensors), case.caches)


def test_layers_of_two_layouts_are_refused():
    wide, narrow = torch.zeros(4, 2, 64), torch.zeros(4, 2, 32)
    with pytest.raises(ValueError, match=r"cache 1 has shape .*LayerCaches of their own"):
        LayerCaches([wide, narrow])


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([], "at least one"),
        ([torch.zeros(4, 2, 64).transpose(1, 2)], "row must be contiguous"),
        ([torch.zeros(65)[1:].view(1, 1, 64)], "no multiple of 16"),
    ],
)
def test_caches_the_kernels_cannot_address_are_refused(caches, message):
    with pytest.raises(ValueError, match=message):
        LayerCaches(caches)
