"""Run-time proof that the drafter's context is exactly the committed text.

With ``SGLANG_DFLASH_CHECK_INVARIANTS=1`` the worker keeps a ledger of which position each K/V
slot of the drafter was last written for, and checks before every block pass that

* context length == committed length == position of the anchor, for every request, and
* each context slot holds the K/V of its own position, written when that token was committed:
  a slot that a block pass has filled with undecided rows counts as empty until then.

A violation raises, which stops the server; the check waits for the device and is for tests.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.kernels.append_context import valid_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.draft import Window

ENVIRONMENT = "SGLANG_DFLASH_CHECK_INVARIANTS"
EMPTY = -1


def checks_enabled() -> bool:
    """Whether this process was asked to check."""
    return os.environ.get(ENVIRONMENT, "") not in ("", "0")


class InvariantError(RuntimeError):
    """The drafter's context is not the committed text."""


class ContextLedger:
    """The position each of the drafter's K/V slots was last committed for.

    Args:
        slots: number of slots in the drafter's pool.
        req_to_token: ``[requests, positions]`` slots of every request, the target's table.
        device: where the tables live.
    """

    def __init__(self, slots: int, req_to_token: torch.Tensor, device: Any):
        self.positions = torch.full((slots,), EMPTY, dtype=torch.int64, device=device)
        self.req_to_token = req_to_token

    def record(
        self, slots: torch.Tensor, positions: torch.Tensor, commit_lengths: torch.Tensor | None
    ) -> None:
        """Note committed rows: ``[T]`` slots and positions, of which a prefix per request."""
        slots = slots.to(torch.int64)
        if commit_lengths is not None:
            keep = valid_rows(commit_lengths, slots.numel() // commit_lengths.numel())
            slots, positions = slots[keep], positions[keep]
        self.positions[slots] = positions

    def check(self, batch: ScheduleBatch, window: Window) -> None:
        """Check every request before its block pass, which then empties the window's slots.

        Raises:
            InvariantError: naming the request and what differs.
        """
        width = window.slots.shape[1]
        for index, request in enumerate(batch.reqs):
            length = int(window.lengths[index])
            row = self.req_to_token[int(batch.req_pool_indices[index]), :length].to(torch.int64)
            found = self.positions[row]
            wrong = (found != torch.arange(length, device=found.device)).nonzero().flatten()
            if wrong.numel():
                position = int(wrong[0])
                raise InvariantError(
                    f"request {request.rid}: committed length {length}, but the context slot of "
                    f"position {position} holds "
                    + (
                        "no committed token"
                        if int(found[position]) == EMPTY
                        else f"position {int(found[position])}"
                    )
                )
            # The host's record lags by the steps in flight under overlap scheduling.
            known = len(request.origin_input_ids) + len(request.output_ids) - 1
            if not known <= length <= known + 2 * width:
                raise InvariantError(
                    f"request {request.rid}: committed length {length}, but the scheduler has "
                    f"seen {known} committed tokens"
                )
            if length == known and int(window.anchors[index]) != request.output_ids[-1]:
                raise InvariantError(
                    f"request {request.rid}: anchor {int(window.anchors[index])} at position "
                    f"{length}, but the last emitted token is {request.output_ids[-1]}"
                )
        self.positions[window.slots.reshape(-1)] = EMPTY
