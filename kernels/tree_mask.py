"""Expand ancestor bit sets into the attention mask of the verify pass.

Row n of request b sees all ``s_b`` committed tokens, and of the N rows exactly its ancestors
(itself among them). SGLang's backends that take a mask for ``TARGET_VERIFY`` (triton, flashinfer,
and fa3, which reads the tail of it) read one flat bool buffer, request after request, row after
row, and in a row first the context, then the tail::

    base_b                 = sum over a < b of N * (s_a + N)
    mask[base_b + n * (s_b + N) + j] = true                               j < s_b
                                     = bit (j - s_b) of ancestors[b, n]   s_b <= j < s_b + N

The buffer belongs to the backend, which made it long enough for its longest context, so sizes
known on the host bound everything: offsets are summed on the device, and what lies behind the
last request's rows is left as it is.
"""

from __future__ import annotations

import torch
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl

COLUMNS = 1024
"""Bytes of the mask one program writes at a time."""


def tree_mask_reference(
    ancestors: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The formula above in torch; it reads the lengths, so a captured step cannot run it."""
    _, rows, _ = ancestors.shape
    column = torch.arange(rows, device=ancestors.device)
    words = ancestors[:, :, column // 64]
    tail = ((words >> (column % 64)) & 1).bool()
    base = 0
    for request, length in enumerate(lengths.tolist()):
        width = length + rows
        view = mask[base : base + rows * width].view(rows, width)
        view[:, :length] = True
        view[:, length:] = tail[request]
        base += rows * width
    return mask


@jit
def _tree_mask_kernel(
    ancestors,
    lengths,
    mask,
    capacity,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.program_id(1)
    # How many tokens the requests before this one hold: one vector of lengths, no second pass.
    before = tl.arange(0, REQUESTS)
    held = tl.load(lengths + before, mask=before < request, other=0).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int64)
    width = length + N
    base = N * (tl.sum(held, axis=0) + request.to(tl.int64) * N) + row * width
    bits = ancestors + (request.to(tl.int64) * N + row) * WORDS
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < width) & (base + column < capacity)
        tail = column - length
        in_tail = inside & (tail >= 0)
        tail = tl.where(in_tail, tail, 0)
        word = tl.load(bits + tail // 64, mask=in_tail, other=-1)
        tl.store(mask + base + column, ((word >> (tail % 64)) & 1).to(tl.int1), mask=inside)


def launch_tree_mask(
    ancestors: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The formula above in Triton: a program per row; one launch."""
    bs, rows, words = ancestors.shape
    if bs:
        _tree_mask_kernel[bs, rows](
            ancestors,
            lengths,
            mask,
            len(mask),
            N=rows,
            WORDS=words,
            REQUESTS=next_power_of_two(bs),
            COLUMNS=COLUMNS,
            num_warps=4,
        )
    return mask


def tree_mask(ancestors: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Write the rows' attention mask into a backend's buffer.

    Args:
        ancestors: ``[bs, N, ceil(N/64)]`` int64 bit sets over the rows, contiguous; bit m of row
            n is set where row m lies on the path to row n, and for m = n.
        lengths: ``[bs]`` int32 or int64 committed lengths, the rows excluded.
        mask: ``[at least sum(N * (s_b + N))]`` bool; what lies behind that is left as it is.

    Returns:
        ``mask``.
    """
    run = launch_tree_mask if ancestors.is_cuda else tree_mask_reference
    return run(ancestors, lengths, mask)
