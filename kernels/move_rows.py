"""Move the accepted rows' K/V to the front of the verify window, in every layer.

A request's verify rows wrote K/V to ``slots[0 .. N-1]`` in row order. The accepted path
``path[0] = 0 < path[1] < ..`` must end up in position order, because the next step's window
begins right behind it. For every cache (K and V of each layer), all requests at once::

    cache[slots[d]] <- cache[slots[path[d]]]        d = 0 .. accept_length - 1

A row already in place (``path[d] == d``: every row of a chain, and a tree's prefix along its
first branch) is neither read nor written.

**Aliasing.** ``path[d] >= d``, so the row that depth d overwrites can be the source of another
depth. Memory is split among programs by request, cache and columns: no two requests share a
slot, and within a request both source and target of a move lie in the same columns. So the only
accesses that could be misordered are those of one program, and it loads every source row into
registers, waits at a barrier, and only then stores: whichever warp holds an element, no store of
the program precedes any of its loads.
"""

from __future__ import annotations

import torch
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl
from sglang_dflash.kernels.layer_caches import LayerCaches

TILE = 4096
"""Elements one program holds: every accepted row of one request, times a slice of columns."""


def move_rows_reference(
    caches: LayerCaches,
    slots: torch.Tensor,
    path: torch.Tensor,
    accept_lengths: torch.Tensor,
) -> None:
    """The formula above in torch: gather a source for every depth, then scatter.

    A depth whose row stays is its own source, so nothing depends on how many rows move.
    """
    depths = path.shape[1]
    depth = torch.arange(depths, dtype=path.dtype, device=path.device)
    row = torch.where(depth < accept_lengths.unsqueeze(1), path, depth)
    source = slots.gather(1, row.long()).flatten().long()
    target = slots[:, :depths].flatten().long()
    for cache in caches.tensors:
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
    DEPTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, DEPTHS)
    accepted = (depth < D) & (depth < tl.load(accept_lengths + request))
    row = tl.load(path + request * D + depth, mask=accepted, other=0)
    moved = accepted & (row != depth)
    if tl.max(moved.to(tl.int32), axis=0) == 0:
        return
    source = tl.load(slots + request * N + row, mask=moved, other=0).to(tl.int64)
    target = tl.load(slots + request * N + depth, mask=moved, other=0).to(tl.int64)

    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = moved[:, None] & (column < WIDTH)[None, :]
    address = tl.load(pointers + tl.program_id(1))
    # LayerCaches checked the alignment, which an address loaded from memory does not show.
    cache = tl.multiple_of(address.to(tl.pointer_type(cache_like.dtype.element_ty)), 16)
    data = tl.load(cache + source[:, None] * slot_stride + column[None, :], mask=inside)
    tl.debug_barrier()
    tl.store(cache + target[:, None] * slot_stride + column[None, :], data, mask=inside)


def launch_move_rows(
    caches: LayerCaches,
    slots: torch.Tensor,
    path: torch.Tensor,
    accept_lengths: torch.Tensor,
) -> None:
    """The formula above in Triton: a program per request, cache and column slice; one launch."""
    if not len(path):
        return
    first = caches.first
    width = first.shape[1:].numel()
    depths = next_power_of_two(path.shape[1])
    columns = min(next_power_of_two(width), max(TILE // depths, 1))
    _move_rows_kernel[len(path), len(caches), -(-width // columns)](
        caches.pointers,
        first,
        slots,
        path,
        accept_lengths,
        first.stride(0),
        N=slots.shape[1],
        D=path.shape[1],
        WIDTH=width,
        DEPTHS=depths,
        COLUMNS=columns,
        num_warps=4,
    )


def move_rows(
    caches: LayerCaches,
    slots: torch.Tensor,
    path: torch.Tensor,
    accept_lengths: torch.Tensor,
) -> None:
    """Move accepted rows to the front of their request's window, in place.

    Args:
        caches: K and V of all layers, ``[slots, ..]`` each, any dtype. A target whose K and V
            rows differ in shape makes one call for each.
        slots: ``[bs, N]`` int32 or int64 slots of the verify rows, distinct.
        path: ``[bs, D]`` int32 accepted rows, strictly increasing from 0; read up to
            ``accept_lengths`` (what lies past it, -1 or anything else, is not).
        accept_lengths: ``[bs]`` int32 rows to keep, at most D; 0 moves nothing.
    """
    run = launch_move_rows if path.is_cuda else move_rows_reference
    run(caches, slots, path, accept_lengths)
