"""The K likeliest tokens of every row with their log-probabilities, out of its slices' best.

Over the P slices that :mod:`.topk` read, of one rank or of several::

    keys[r]   = the r-th largest of the P * K keys,  r = 0 .. K-1
    lse       = log sum_p exp(lse[p])
    ids[r]    = the token of keys[r]
    log_q[r]  = the logit of keys[r] - lse

A key gives back its logit bit for bit, and its token. Where a row has fewer than K candidates the
last have id 0 and log-probability -inf. The result is again the best of one slice: with a sharded
vocabulary every rank merges its own, the ranks exchange K keys and one sum a row, and merge those;
all see the same numbers, so all find the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl
from sglang_dflash.kernels.topk import NONE, TopK, tokens_of


class Candidates(NamedTuple):
    """The likeliest tokens of T rows."""

    ids: torch.Tensor
    """``[T, K]`` int64, likeliest first."""
    log_q: torch.Tensor
    """``[T, K]`` float32 log-probabilities, falling along K."""
    keys: torch.Tensor
    """``[T, K]`` int64, the same as keys."""
    lse: torch.Tensor
    """``[T]`` float32 log of the sum of exponentials over all slices."""

    @classmethod
    def empty(cls, rows: int, candidates: int, device: torch.device | str) -> Candidates:
        """Unfilled outputs for :func:`merge_topk`."""

        def make(dtype: torch.dtype, *tail: int) -> torch.Tensor:
            return torch.empty((rows, *tail), dtype=dtype, device=device)

        return cls(
            ids=make(torch.int64, candidates),
            log_q=make(torch.float32, candidates),
            keys=make(torch.int64, candidates),
            lse=make(torch.float32),
        )


def merge_topk_reference(best: TopK, *, out: Candidates) -> Candidates:
    """The formula above in torch."""
    keys, _ = best.keys.flatten(1).topk(out.keys.shape[1], dim=1)
    out.keys.copy_(keys)
    torch.logsumexp(best.lse, dim=1, out=out.lse)
    none = keys == NONE
    ids, logits = tokens_of(keys)
    out.ids.copy_(ids.masked_fill(none, 0))
    out.log_q.copy_((logits - out.lse.unsqueeze(1)).masked_fill(none, float("-inf")))
    return out


@jit
def _merge_topk_kernel(
    keys,
    lse,
    ids,
    log_q,
    merged_keys,
    merged_lse,
    P,
    COUNT,
    K: tl.constexpr,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
):
    NO_KEY: tl.constexpr = -(1 << 63)
    LAST_ID: tl.constexpr = (1 << 32) - 1
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES)
    sums = tl.load(lse + row * P + part, mask=part < P, other=float("-inf"))
    largest = tl.max(sums, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = shift + tl.log(tl.sum(tl.exp(sums - shift), axis=0))
    tl.store(merged_lse + row, total)

    lane = tl.arange(0, LANES)
    key = tl.load(keys + row * COUNT + lane, mask=lane < COUNT, other=NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, NO_KEY, key)
        monotone = (best >> 32).to(tl.int32)
        logit = (monotone ^ ((monotone >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        found = best != NO_KEY
        at = row * K + rank
        tl.store(merged_keys + at, best)
        tl.store(ids + at, tl.where(found, LAST_ID - (best & LAST_ID), 0))
        tl.store(log_q + at, tl.where(found, logit - total, float("-inf")))


def launch_merge_topk(best: TopK, *, out: Candidates) -> Candidates:
    """The formula above in Triton: one program per row, one launch."""
    rows, slices, width = best.keys.shape
    if rows:
        _merge_topk_kernel[(rows,)](
            *best,
            *out,
            slices,
            slices * width,
            K=out.keys.shape[1],
            LANES=next_power_of_two(slices * width),
            SLICES=next_power_of_two(slices),
            num_warps=4 if slices * width > 128 else 1,
        )
    return out


def merge_topk(best: TopK, candidates: int, *, out: Candidates | None = None) -> Candidates:
    """Find the likeliest tokens of every row among its slices' likeliest.

    Args:
        best: of P slices, contiguous; each with at least ``candidates`` keys.
        candidates: K.
        out: contiguous outputs, overwritten; with it nothing is allocated.
    """
    if out is None:
        out = Candidates.empty(len(best.keys), candidates, best.keys.device)
    run = launch_merge_topk if best.keys.is_cuda else merge_topk_reference
    return run(best, out=out)
