"""Lay out one step: block ids, positions and K/V slots of every request, in one launch.

For request b with anchor token ``a_b``, committed length ``s_b`` and table row ``r_b``::

    ids[b, j]       = a_b if j == 0 else MASK          0 <= j < B
    positions[b, j] = s_b + j                          0 <= j < N
    slots[b, j]     = req_to_token[r_b, s_b + j]       0 <= j < N

B is the block size (anchor included) and N >= B the verify rows per request. The block is the
input of DFlash's single draft pass (arXiv 2602.06036): row 0 carries the anchor's embedding,
every other row the MASK embedding, and row j predicts the token at position ``s_b + j``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl


class DraftBlock(NamedTuple):
    """Where one step drafts, verifies and writes; bs requests, B block and N verify rows."""

    ids: torch.Tensor
    """``[bs, B]`` int64 token ids: anchor, then MASK."""
    positions: torch.Tensor
    """``[bs, N]`` int64 absolute positions."""
    slots: torch.Tensor
    """``[bs, N]`` int64 K/V slots."""

    @classmethod
    def empty(
        cls, batch_size: int, block_size: int, verify_rows: int, device: torch.device | str
    ) -> DraftBlock:
        """Unfilled outputs for :func:`prepare_block`."""
        return cls(
            *(
                torch.empty((batch_size, width), dtype=torch.int64, device=device)
                for width in (block_size, verify_rows, verify_rows)
            )
        )


def prepare_block_reference(
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    mask_token_id: int,
    out: DraftBlock,
) -> DraftBlock:
    """The formula above in torch."""
    out.ids.fill_(mask_token_id)
    out.ids[:, 0] = anchors
    steps = torch.arange(out.positions.shape[1], device=anchors.device)
    torch.add(lengths.unsqueeze(1), steps, out=out.positions)
    out.slots.copy_(req_to_token[req_pool_indices.unsqueeze(1).long(), out.positions])
    return out


@jit
def _prepare_block_kernel(
    anchors,
    lengths,
    req_pool_indices,
    req_to_token,
    ids,
    positions,
    slots,
    table_stride,
    mask_token_id,
    B: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    in_block = row < B
    in_window = row < N

    anchor = tl.load(anchors + request)
    block_ids = tl.where(row == 0, anchor, mask_token_id)
    tl.store(ids + request * B + row, block_ids, mask=in_block)

    position = tl.load(lengths + request).to(tl.int64) + row
    tl.store(positions + request * N + row, position, mask=in_window)

    table_row = tl.load(req_pool_indices + request).to(tl.int64)
    slot = tl.load(req_to_token + table_row * table_stride + position, mask=in_window, other=0)
    tl.store(slots + request * N + row, slot.to(tl.int64), mask=in_window)


def launch_prepare_block(
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    mask_token_id: int,
    out: DraftBlock,
) -> DraftBlock:
    """The formula above in Triton: one program per request, one launch."""
    bs, block_size = out.ids.shape
    verify_rows = out.positions.shape[1]
    if bs:
        _prepare_block_kernel[(bs,)](
            anchors,
            lengths,
            req_pool_indices,
            req_to_token,
            *out,
            req_to_token.stride(0),
            mask_token_id,
            B=block_size,
            N=verify_rows,
            ROWS=next_power_of_two(verify_rows),
            num_warps=1,
        )
    return out


def prepare_block(
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    mask_token_id: int,
    block_size: int,
    verify_rows: int,
    out: DraftBlock | None = None,
) -> DraftBlock:
    """Fill block ids, positions and slots of every request.

    Args:
        anchors: ``[bs]`` int64, the last committed token of each request.
        lengths: ``[bs]`` int32 or int64 committed lengths; the anchor's position.
        req_pool_indices: ``[bs]`` int32 or int64 rows of the request table.
        req_to_token: ``[requests, width]`` int32 slots, rows contiguous; it must reach
            ``length + verify_rows``, which the kernel does not check.
        mask_token_id: the id that fills undecided rows.
        block_size: B, rows of the block, anchor included.
        verify_rows: N >= B, rows the target verifies.
        out: contiguous outputs, overwritten; with it nothing is allocated.

    Raises:
        ValueError: ``verify_rows`` is smaller than ``block_size``.
    """
    if not 1 <= block_size <= verify_rows:
        raise ValueError(
            f"block_size={block_size} must be between 1 and verify_rows={verify_rows}: every "
            "drafted row is verified"
        )
    if out is None:
        out = DraftBlock.empty(anchors.shape[0], block_size, verify_rows, anchors.device)
    run = launch_prepare_block if anchors.is_cuda else prepare_block_reference
    return run(
        anchors, lengths, req_pool_indices, req_to_token, mask_token_id=mask_token_id, out=out
    )
