"""The K likeliest tokens of every row of logits, slice by slice of the vocabulary.

A row's vocabulary (or this rank's shard of it) is cut into P slices, each read once. Of slice p::

    lse[p]     = log sum_v exp(logit[v])
    keys[p, r] = the r-th largest of key(v),  r = 0 .. K-1

where a key is one integer that orders tokens by logit, and equal logits by token id, the lower
first: the float's bits, made monotone, above the complement of the id. Keys of other slices and
ranks compare as they are, so :mod:`.merge_topk` finds the vocabulary's K likeliest, with their
log-probabilities, among ``P * K`` keys per row and rank. A logit of -inf is no candidate: its key
is :data:`NONE`, the smallest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl

NONE = -(1 << 63)
"""The key of no token."""
SLICE = 4096
"""Logits one program holds."""
GROUP = 64
"""Logits whose maximum stands for them in the reference's first look."""


class TopK(NamedTuple):
    """The best of P slices of T rows."""

    keys: torch.Tensor
    """``[T, P, K]`` int64, falling along K."""
    lse: torch.Tensor
    """``[T, P]`` float32 log of the slice's sum of exponentials."""

    @classmethod
    def empty(cls, rows: int, slices: int, candidates: int, device: torch.device | str) -> TopK:
        """Unfilled outputs for :func:`topk`."""
        return cls(
            torch.empty((rows, slices, candidates), dtype=torch.int64, device=device),
            torch.empty((rows, slices), dtype=torch.float32, device=device),
        )


def keys_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``key(v)`` of float32 logits and int64 ids of one shape."""
    bits = (logits + 0.0).view(torch.int32)  # -0 equals 0
    return ((_flipped(bits).long() << 32) | (0xFFFFFFFF - ids)).masked_fill(
        logits == float("-inf"), NONE
    )


def tokens_of(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and float32 logits behind keys, the inverse of :func:`keys_of`; those of :data:`NONE`
    mean nothing."""
    logits = _flipped((keys >> 32).to(torch.int32)).view(torch.float32)
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF), logits


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """A float's bits as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def topk_reference(logits: torch.Tensor, *, first_id: int, out: TopK) -> TopK:
    """The formula above in torch.

    The K likeliest lie in the K groups of neighbouring tokens whose maxima have the largest keys,
    so only those are looked at one by one.
    """
    slices, candidates = out.keys.shape[1:]
    width = slice_width(logits.shape[1], slices)
    out.keys.fill_(NONE)
    out.lse.fill_(float("-inf"))
    for p, part in enumerate(logits.split(width, dim=1)):
        torch.logsumexp(part.float(), dim=1, out=out.lse[:, p])
        start = first_id + p * width
        groups = F.pad(part, (0, -part.shape[1] % GROUP), value=float("-inf"))
        groups = groups.unflatten(1, (-1, GROUP))
        number = torch.arange(groups.shape[1], device=logits.device)
        best = keys_of(groups.amax(2).float(), number.expand(len(part), -1))
        best = best.topk(min(candidates, best.shape[1]), dim=1).indices
        kept = groups.gather(1, best.unsqueeze(2).expand(-1, -1, GROUP)).float()
        ids = start + best.unsqueeze(2) * GROUP + torch.arange(GROUP, device=logits.device)
        out.keys[:, p] = keys_of(kept, ids).flatten(1).topk(candidates, dim=1).values
    return out


@jit
def _topk_kernel(
    logits,
    keys,
    lse,
    stride,
    columns,
    first_id,
    P,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    NO_KEY: tl.constexpr = -(1 << 63)
    LAST_ID: tl.constexpr = (1 << 32) - 1
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    logit = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)

    largest = tl.max(logit, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(logit - shift), axis=0)
    at = row * P + part
    tl.store(lse + at, shift + tl.log(total))

    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    monotone = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = (monotone << 32) | (LAST_ID - (first_id + column).to(tl.int64))
    key = tl.where(logit == float("-inf"), NO_KEY, key)
    for rank in tl.static_range(K):
        best = tl.max(key, axis=0)
        tl.store(keys + at * K + rank, best)
        key = tl.where(key == best, NO_KEY, key)


def launch_topk(logits: torch.Tensor, *, first_id: int, out: TopK) -> TopK:
    """The formula above in Triton: a program per row and slice, one launch."""
    rows, columns = logits.shape
    slices, candidates = out.keys.shape[1:]
    if rows:
        width = slice_width(columns, slices)
        _topk_kernel[(rows, slices)](
            logits,
            *out,
            logits.stride(0),
            columns,
            first_id,
            slices,
            K=candidates,
            WIDTH=width,
            num_warps=8 if width >= SLICE else 4,
        )
    return out


def slices_of(columns: int) -> int:
    """P on a GPU for a vocabulary of ``columns``."""
    return -(-columns // SLICE)


def slice_width(columns: int, slices: int) -> int:
    """Columns of a slice; the last ones may have fewer, or none."""
    return next_power_of_two(-(-columns // slices))


def topk(
    logits: torch.Tensor,
    candidates: int,
    *,
    first_id: int = 0,
    out: TopK | None = None,
) -> TopK:
    """Find the likeliest tokens of every slice of every row.

    Args:
        logits: ``[T, V]`` float32, float16 or bfloat16, rows contiguous.
        candidates: K.
        first_id: token id of column 0, where this is a shard of the vocabulary.
        out: contiguous outputs, overwritten; with it nothing is allocated. Its P slices must
            cover V; :func:`slices_of` says how many do.
    """
    if out is None:
        rows, columns = logits.shape
        slices = slices_of(columns) if logits.is_cuda else 1
        out = TopK.empty(rows, slices, candidates, logits.device)
    run = launch_topk if logits.is_cuda else topk_reference
    return run(logits, first_id=first_id, out=out)
