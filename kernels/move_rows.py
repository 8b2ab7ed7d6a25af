"""Move the accepted rows' K/V to the front of the verify window, in every layer.

A request's verify rows wrote K/V to ``slots[0 .. N-1]`` in row order; the accepted path
``path[0] = 0 < path[1] < ..`` must end up in position order, because the next step's window
begins right behind it::

    cache[slots[d]] <- cache[slots[path[d]]]        d = 0 .. accept_length - 1

A chain's path is ``path[d] = d`` and needs no move; a tree's spine prefix neither.

Aliasing: within a request the destination of depth d may be the source of none but an earlier
or equal depth. ``path`` increases strictly from 0, so ``path[d] >= d``; a program handles one
request, one layer and one slice of columns and goes through d upwards, loading before it
stores. When it stores row d, every later load reads row ``path[e] > path[d] >= d`` for e > d,
never the row just overwritten. Different requests, layers, K and V, and column slices share no
memory, so programs need no order among themselves; within a program each thread stores the
very elements it loaded.
"""

from __future__ import annotations

import torch

from sglang_dflash.kernels._device import jit, next_power_of_two, runs_kernel, tl


def move_rows_reference(
    caches: list[torch.Tensor],
    slots: torch.Tensor,
    path: torch.Tensor,
    accept_lengths: torch.Tensor,
) -> None:
    """The formula above in torch: gather every source, then scatter."""
    depth = torch.arange(path.shape[1], device=path.device)
    moved = (depth < accept_lengths.unsqueeze(1)) & (path != depth)
    request, target_depth = moved.nonzero(as_tuple=True)
    if request.numel() == 0:
        return
    source = slots[request, path[request, target_depth].long()].long()
    target = slots[request, target_depth].long()
    for cache in caches:
        cache[target] = cache[source]


@jit
def _move_rows_kernel(
    pointers,
    cache_like,
    slots,
    path,
    accept_lengths,
    slot_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    cache = tl.load(pointers + tl.program_id(1)).to(tl.pointer_type(cache_like.dtype.element_ty))
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    count = tl.load(accept_lengths + request)
    for depth in range(1, D):
        row = tl.load(path + request * D + depth)
        if (depth < count) & (row != depth):
            source = tl.load(slots + request * N + row).to(tl.int64)
            target = tl.load(slots + request * N + depth).to(tl.int64)
            data = tl.load(cache + source * slot_stride + column, mask=inside)
            tl.store(cache + target * slot_stride + column, data, mask=inside)


def move_rows(
    caches: list[torch.Tensor],
    pointers: torch.Tensor,
    slots: torch.Tensor,
    path: torch.Tensor,
    accept_lengths: torch.Tensor,
) -> None:
    """Move accepted rows to the front of their request's window.

    Args:
        caches: K and V of all layers, ``[slots, ..]`` each with contiguous rows of one shape.
        pointers: ``[len(caches)]`` int64, their addresses on their device.
        slots: ``[bs, N]`` int32 or int64 slots of the verify rows.
        path: ``[bs, D]`` int32 accepted rows, strictly increasing from 0; read up to
            ``accept_lengths``.
        accept_lengths: ``[bs]`` int32.
    """
    if not runs_kernel(path):
        move_rows_reference(caches, slots, path, accept_lengths)
        return
    if path.shape[0] == 0:
        return
    first = caches[0]
    width = first[0].numel()
    block = min(next_power_of_two(width), 1024)
    grid = (path.shape[0], len(caches), -(-width // block))
    _move_rows_kernel[grid](
        pointers,
        first,
        slots,
        path,
        accept_lengths,
        first.stride(0),
        N=slots.shape[1],
        D=path.shape[1],
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
