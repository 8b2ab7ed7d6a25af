"""Accept the longest path of verify rows that the target agrees with, for all requests at once.

Row n of a request was drafted as ``tokens[n]`` after row ``parents[n]``; ``choice[n]`` is the
token the target itself emits after row n. With bit sets over the N rows of a request::

    matched   = { n : n == 0  or  parents[n] >= 0 and tokens[n] == choice[parents[n]] }
    accepted  = { n : ancestors[n] & matched == ancestors[n] }      (a row is its own ancestor)
    end       = the accepted row of greatest depth
    path[d]   = the accepted row of depth d,  d = 0 .. depth(end)
    bonus     = choice[end]
    output    = tokens[path[1]], .., tokens[path[depth(end)]], bonus

Siblings carry distinct tokens, so at most one child of a row matches and the accepted rows form
one path. No pointer is followed: membership is one comparison of bit sets, W = ceil(N / 64)
words each. A chain is the case of one path; a dead row has parent -1 and never matches. The
path test over ancestors replaces the walk of DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl

WORD_BITS = 64


class Accepted(NamedTuple):
    """What a step commits; bs requests, D output columns."""

    path: torch.Tensor
    """``[bs, D]`` int32 accepted rows from the root down, -1 past the end."""
    accept_lengths: torch.Tensor
    """``[bs]`` int32 tokens emitted: accepted drafts and the bonus token, at least 1."""
    bonus: torch.Tensor
    """``[bs]`` int64, the target's token after the last accepted row; the next anchor."""
    new_lengths: torch.Tensor
    """``[bs]`` committed lengths after the step, in the dtype of the old ones."""
    output_tokens: torch.Tensor
    """``[bs, D]`` int64 emitted tokens, 0 past ``accept_lengths``."""

    @classmethod
    def empty(
        cls, batch_size: int, width: int, length_dtype: torch.dtype, device: torch.device | str
    ) -> Accepted:
        """Unfilled outputs for :func:`accept`."""

        def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            path=make((batch_size, width), torch.int32),
            accept_lengths=make((batch_size,), torch.int32),
            bonus=make((batch_size,), torch.int64),
            new_lengths=make((batch_size,), length_dtype),
            output_tokens=make((batch_size, width), torch.int64),
        )


class ChainLinks(NamedTuple):
    """The constant links of a chain of N rows, to be expanded over a batch."""

    parents: torch.Tensor
    """``[1, N]`` int32: -1, 0, 1, .."""
    depths: torch.Tensor
    """``[1, N]`` int32: 0, 1, 2, .."""
    ancestors: torch.Tensor
    """``[1, N, W]`` int64: row n's word has bits 0..n set."""


def chain_links(rows: int, device: torch.device | str) -> ChainLinks:
    """Links of a single path of ``rows`` rows."""
    depths = torch.arange(rows, dtype=torch.int32, device=device)
    return ChainLinks(
        parents=(depths - 1).unsqueeze(0),
        depths=depths.unsqueeze(0),
        ancestors=pack_bits(torch.ones(rows, rows, dtype=torch.bool, device=device).tril())[None],
    )


def pack_bits(members: torch.Tensor) -> torch.Tensor:
    """``[.., N]`` bool sets as ``[.., W]`` int64 words; row n is bit n % 64 of word n // 64."""
    rows = members.shape[-1]
    if rows % WORD_BITS and rows > WORD_BITS:
        members = F.pad(members, (0, -rows % WORD_BITS))
    words = members.unflatten(-1, (-1, min(rows, WORD_BITS))).long()
    # The bits are distinct, so their sum is their union. Bit 63 is the sign and wraps to it.
    return (words << torch.arange(words.shape[-1], device=members.device)).sum(-1)


def accept_reference(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    choice: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out: Accepted,
) -> Accepted:
    """The formula above in torch."""
    chosen = choice.gather(1, parents.clamp(min=0).long())
    matched = (tokens == chosen) & (parents >= 0)
    matched[:, 0] = True
    words = pack_bits(matched).unsqueeze(1)
    accepted = ((ancestors & words) == ancestors).all(-1) & matched
    end_depth, end = depths.masked_fill(~accepted, -1).max(1)

    # Accepted rows have distinct depths, so each scatters to a column of its own; the rest share
    # one column past the end, which is then dropped.
    width = out.path.shape[1]
    column = depths.long().masked_fill(~accepted, width)
    row = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    path = out.path.new_full((len(tokens), width + 1), -1)
    out.path.copy_(path.scatter_(1, column, row.expand_as(column))[:, :width])

    torch.add(end_depth, 1, out=out.accept_lengths)
    torch.add(lengths, out.accept_lengths, out=out.new_lengths)
    bonus = choice.gather(1, end.unsqueeze(1))
    out.bonus.copy_(bonus.squeeze(1))
    # Output column d is the row at depth d + 1; at the end's depth it is the bonus.
    drafted = tokens.new_zeros((len(tokens), width + 2)).scatter_(1, column, tokens)
    drafted[:, width:] = 0
    drafted.scatter_(1, end_depth.unsqueeze(1).long() + 1, bonus)
    out.output_tokens.copy_(drafted[:, 1 : width + 1])
    return out


@jit
def _accept_kernel(
    tokens,
    parents,
    depths,
    ancestors,
    choice,
    lengths,
    path,
    accept_lengths,
    bonus,
    new_lengths,
    output_tokens,
    parents_stride,
    depths_stride,
    ancestors_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    live = row < N
    token = tl.load(tokens + request * N + row, mask=live, other=0)
    parent = tl.load(parents + request * parents_stride + row, mask=live, other=-1)
    depth = tl.load(depths + request * depths_stride + row, mask=live, other=0)
    has_parent = live & (parent >= 0)
    chosen = tl.load(choice + request * N + parent, mask=has_parent, other=0)
    matched = (has_parent & (token == chosen)) | (row == 0)

    accepted = matched
    for word in tl.static_range(WORDS):
        bit = tl.full((ROWS,), 1, tl.int64) << (row % 64).to(tl.int64)
        # The bits are distinct, so their sum is their union. Bit 63 is the sign and wraps to it.
        members = tl.sum(tl.where(matched & (row // 64 == word), bit, 0), axis=0)
        ancestor = tl.load(
            ancestors + request * ancestors_stride + row * WORDS + word, mask=live, other=0
        )
        accepted = accepted & ((ancestor & members) == ancestor)

    # Depth leads, so the greatest key is the end; the root is always accepted.
    key = tl.max(tl.where(accepted, depth * ROWS + row, -1), axis=0)
    end_depth = key // ROWS
    bonus_token = tl.load(choice + request * N + key % ROWS)

    # At most one accepted row has a given depth, so a reduction over the rows picks it.
    column = tl.arange(0, COLUMNS)
    in_output = column < D
    here = accepted[:, None] & (depth[:, None] == column[None, :])
    row_here = tl.max(tl.where(here, row[:, None], -1), axis=0)
    tl.store(path + request * D + column, row_here, mask=in_output)
    # Output column d is the row at depth d + 1; at the end's depth it is the bonus.
    below = accepted[:, None] & (depth[:, None] == column[None, :] + 1)
    row_below = tl.max(tl.where(below, row[:, None], -1), axis=0)
    drafted = tl.load(tokens + request * N + row_below, mask=row_below >= 0, other=0)
    emitted = tl.where(column == end_depth, bonus_token, drafted)
    tl.store(output_tokens + request * D + column, emitted, mask=in_output)

    tl.store(accept_lengths + request, end_depth + 1)
    tl.store(bonus + request, bonus_token)
    length = tl.load(lengths + request)
    tl.store(new_lengths + request, length + (end_depth + 1).to(length.dtype))


def launch_accept(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    choice: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out: Accepted,
) -> Accepted:
    """The formula above in Triton: one program per request, one launch."""
    bs, rows = tokens.shape
    width = out.path.shape[1]
    if bs:
        _accept_kernel[(bs,)](
            tokens,
            parents,
            depths,
            ancestors,
            choice,
            lengths,
            *out,
            parents.stride(0),
            depths.stride(0),
            ancestors.stride(0),
            N=rows,
            D=width,
            WORDS=ancestors.shape[2],
            ROWS=next_power_of_two(rows),
            COLUMNS=next_power_of_two(width),
            num_warps=1 if rows <= 32 else 4,
        )
    return out


def accept(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    choice: torch.Tensor,
    lengths: torch.Tensor,
    *,
    output_width: int,
    out: Accepted | None = None,
) -> Accepted:
    """Accept rows of every request at once.

    The links may be expanded over the batch (stride 0), as a chain's are; within a request every
    input is contiguous.

    Args:
        tokens: ``[bs, N]`` int64 drafted tokens, row 0 the anchor; contiguous.
        parents: ``[bs, N]`` int32; -1 for the root and for dead rows.
        depths: ``[bs, N]`` int32 distances from the root.
        ancestors: ``[bs, N, W]`` int64 bit sets, the row itself included.
        choice: ``[bs, N]`` int64, the target's token after each row; contiguous.
        lengths: ``[bs]`` int32 or int64 committed lengths.
        output_width: D, greater than every depth; not checked.
        out: contiguous outputs of width D, overwritten; with it nothing is allocated.
    """
    if out is None:
        out = Accepted.empty(len(tokens), output_width, lengths.dtype, tokens.device)
    run = launch_accept if tokens.is_cuda else accept_reference
    return run(tokens, parents, depths, ancestors, choice, lengths, out=out)
