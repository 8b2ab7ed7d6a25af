"""The ledger finds each way in which the drafter's context can part from the committed text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.invariants import EMPTY, ContextLedger, InvariantError

TABLE = torch.arange(40, dtype=torch.int32).view(2, 20)


def step(length: int = 6, anchor: int = 9, *, outputs: tuple[int, ...] = (8, 9)) -> tuple:
    """A batch of one request with prompt of 5 tokens, and its window of 4 rows."""
    request = SimpleNamespace(rid="r", origin_input_ids=[1] * 5, output_ids=list(outputs))
    batch = SimpleNamespace(reqs=[request], req_pool_indices=torch.tensor([1]))
    window = SimpleNamespace(
        anchors=torch.tensor([anchor]),
        lengths=torch.tensor([length]),
        slots=TABLE[1:2, length : length + 4].long(),
    )
    return batch, window


@pytest.fixture
def ledger() -> ContextLedger:
    ledger = ContextLedger(40, TABLE, "cpu")
    ledger.record(TABLE[1, :6], torch.arange(6), None)
    return ledger


def test_committed_text_passes_and_empties_the_window(ledger: ContextLedger) -> None:
    ledger.record(TABLE[1, 6:10], torch.arange(6, 10), torch.tensor([4], dtype=torch.int32))
    batch, window = step()
    ledger.check(batch, window)
    assert ledger.positions[window.slots].eq(EMPTY).all()


def test_prefix_of_a_block_is_recorded(ledger: ContextLedger) -> None:
    ledger.record(TABLE[1, 6:10], torch.arange(6, 10), torch.tensor([2], dtype=torch.int32))
    ledger.check(*step(8, 7, outputs=(8, 9, 6, 7)))
    with pytest.raises(InvariantError, match=r"position 8 holds no committed token"):
        ledger.check(*step(9, 7, outputs=(8, 9, 6, 7, 7)))


def test_slot_of_another_position_is_found(ledger: ContextLedger) -> None:
    ledger.record(TABLE[1, 2:3], torch.tensor([3]), None)
    with pytest.raises(InvariantError, match="position 2 holds position 3"):
        ledger.check(*step())


def test_length_ahead_of_and_behind_the_scheduler_is_found(ledger: ContextLedger) -> None:
    with pytest.raises(InvariantError, match="committed length 5"):
        ledger.check(*step(5))
    ledger.record(TABLE[1, :16], torch.arange(16), None)
    with pytest.raises(InvariantError, match="committed length 15"):
        ledger.check(*step(15))


def test_wrong_anchor_is_found(ledger: ContextLedger) -> None:
    with pytest.raises(InvariantError, match="anchor 8"):
        ledger.check(*step(anchor=8))
