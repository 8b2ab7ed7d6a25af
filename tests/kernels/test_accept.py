"""Which rows are committed, what is emitted, and where the request stands afterwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from sglang_dflash.kernels.accept import Accepted, accept, chain_links, pack_bits

from tests.kernels import oracles
from tests.kernels.cases import AcceptCase, accept_case
from tests.kernels.strategies import PROPERTY, accept_cases


def run(case: AcceptCase, out: Accepted | None = None) -> Accepted:
    return accept(*case[:6], output_width=case.output_width, out=out)


def padded(values: list[int], width: int, filler: int) -> list[int]:
    return values + [filler] * (width - len(values))


@PROPERTY
@given(accept_cases())
@example(accept_case(0, 3, 64, agreement=1.0))
@example(accept_case(1, 3, 128, agreement=1.0, branching=0.05, dead=0.1))
def test_equals_walking_the_tree(case):
    found, width = run(case), case.output_width
    walked = oracles.accept(case)
    assert found.path.tolist() == [padded(path, width, -1) for path, _, _ in walked]
    assert found.output_tokens.tolist() == [padded(out, width, 0) for _, out, _ in walked]
    assert found.accept_lengths.tolist() == [len(emitted) for _, emitted, _ in walked]
    assert found.bonus.tolist() == [emitted[-1] for _, emitted, _ in walked]
    assert found.new_lengths.tolist() == [length for _, _, length in walked]
    assert found.new_lengths.dtype == case.lengths.dtype


def chain(tokens: list[int], choice: list[int]) -> Accepted:
    return accept(
        torch.tensor([tokens]),
        *chain_links(len(tokens), "cpu"),
        torch.tensor([choice]),
        torch.tensor([100], dtype=torch.int32),
        output_width=len(tokens),
    )


def test_nothing_agreed_emits_the_targets_own_token():
    found = chain([5, 6, 7], [9, 7, 8])
    assert found.accept_lengths.tolist() == [1]
    assert found.output_tokens.tolist() == [[9, 0, 0]]
    assert found.bonus.tolist() == [9]
    assert found.new_lengths.tolist() == [101]


def test_everything_agreed_emits_one_token_more_than_was_drafted():
    found = chain([5, 6, 7], [6, 7, 8])
    assert found.accept_lengths.tolist() == [3]
    assert found.output_tokens.tolist() == [[6, 7, 8]]
    assert found.path.tolist() == [[0, 1, 2]]


def test_agreement_after_a_rejected_row_does_not_count():
    found = chain([5, 6, 7, 8], [6, 1, 8, 2])
    assert found.output_tokens.tolist() == [[6, 1, 0, 0]]


def test_a_dead_row_is_not_accepted_whatever_its_token():
    #   0 -> 1, and a dead row 2 that carries the token the target chose.
    links = (torch.tensor([[-1, 0, -1]]).int(), torch.tensor([[0, 1, 0]]).int())
    ancestors = torch.tensor([[[0b001], [0b011], [0b100]]])
    found = accept(
        torch.tensor([[4, 5, 9]]),
        *links,
        ancestors,
        torch.tensor([[9, 1, 1]]),
        torch.tensor([10]),
        output_width=2,
    )
    assert found.path.tolist() == [[0, -1]]
    assert found.bonus.tolist() == [9]


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128])
def test_chain_links_are_one_path(rows):
    parents, depths, ancestors = chain_links(rows, "cpu")
    assert parents.tolist() == [list(range(-1, rows - 1))]
    assert depths.tolist() == [list(range(rows))]
    for row, words in enumerate(ancestors[0].tolist()):
        bits = sum((word & (2**64 - 1)) << (64 * index) for index, word in enumerate(words))
        assert bits == 2 ** (row + 1) - 1


def test_bit_63_is_a_row_like_any_other():
    members = torch.zeros(128, dtype=torch.bool)
    members[[0, 63, 127]] = True
    assert pack_bits(members).tolist() == [1 - 2**63, -(2**63)]


def test_writes_into_the_outputs_it_is_given():
    case = accept_case(5, 4, 16, agreement=0.9, branching=0.3)
    static = Accepted.empty(9, case.output_width, case.lengths.dtype, "cpu")
    for tensor in static:
        tensor.fill_(-9)
    found = run(case, out=Accepted(*(tensor[:4] for tensor in static)))
    for view, tensor, wanted in zip(found, static, run(case), strict=True):
        assert view.data_ptr() == tensor.data_ptr()
        assert torch.equal(tensor[:4], wanted)
        assert (tensor[4:] == -9).all()


def test_leaves_its_inputs_alone():
    case = accept_case(6, 3, 16, agreement=0.9, branching=0.3)
    before = [tensor.clone() for tensor in case[:6]]
    run(case)
    assert all(map(torch.equal, before, case[:6]))
