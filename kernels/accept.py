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

from sglang_dflash.kernels._device import jit, next_power_of_two, runs_kernel, tl

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
    """``[.., N]`` bool sets as ``[.., ceil(N / 64)]`` int64 words, bit n of word n // 64."""
    count = members.shape[-1]
    words = -(-count // WORD_BITS)
    bit = torch.arange(count, device=members.device)
    value = torch.ones_like(bit) << (bit % WORD_BITS)  # bit 63 is the sign; sums wrap to it
    packed = members.new_zeros((*members.shape[:-1], words), dtype=torch.int64)
    return packed.index_add_(-1, bit // WORD_BITS, torch.where(members, value, 0))


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
    accepted = ((ancestors & words) == ancestors).all(dim=-1) & matched
    depth = depths.masked_fill(~accepted, -1)
    last_depth, end = depth.max(dim=1)

    out.path.fill_(-1)
    row = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    # Rejected rows go to a column of their own, which is then dropped.
    width = out.path.shape[1]
    column = torch.where(accepted, depths, width).long()
    path = torch.full((tokens.shape[0], width + 1), -1, dtype=torch.int32, device=tokens.device)
    path.scatter_(1, column, row.expand_as(column))
    out.path.copy_(path[:, :width])

    torch.add(last_depth, 1, out=out.accept_lengths)
    out.bonus.copy_(choice.gather(1, end.unsqueeze(1)).squeeze(1))
    torch.add(lengths, out.accept_lengths, out=out.new_lengths)
    # Column d emits the row at depth d + 1; the last accepted row's column emits the bonus.
    drafted = torch.zeros((tokens.shape[0], width + 1), dtype=torch.int64, device=tokens.device)
    drafted.scatter_(1, column, tokens)
    out.output_tokens[:, :-1] = drafted[:, 1:width]
    out.output_tokens[:, -1] = 0
    out.output_tokens.scatter_(1, last_depth.unsqueeze(1).long(), out.bonus.unsqueeze(1))
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
    parent_stride,
    depth_stride,
    ancestor_stride,
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
    parent = tl.load(parents + request * parent_stride + row, mask=live, other=-1).to(tl.int32)
    depth = tl.load(depths + request * depth_stride + row, mask=live, other=0).to(tl.int32)
    has_parent = live & (parent >= 0)
    chosen = tl.load(choice + request * N + parent, mask=has_parent, other=0)
    matched = (has_parent & (token == chosen)) | (row == 0)

    accepted = matched
    for word in tl.static_range(WORDS):
        bit = tl.where(
            matched & (row // 64 == word),
            tl.full((ROWS,), 1, tl.int64) << (row % 64).to(tl.int64),
            tl.zeros((ROWS,), tl.int64),
        )
        # Distinct bits: their sum is their union, bit 63 included.
        members = tl.sum(bit, axis=0)
        ancestor = tl.load(
            ancestors + request * ancestor_stride + row * WORDS + word, mask=live, other=-1
        )
        accepted = accepted & ((ancestor & members) == ancestor)

    # Rows of the path have distinct depths, so depth and row fit one key.
    key = tl.where(accepted, depth * ROWS + row, -1)
    last = tl.max(key, axis=0)
    last_depth = last // ROWS
    end = last % ROWS
    emitted = last_depth + 1
    bonus_token = tl.load(choice + request * N + end)

    # At most one accepted row has a given depth, so a reduction over rows picks it; every
    # output column is stored once.
    column = tl.arange(0, COLUMNS)
    in_output = column < D
    at_column = accepted[:, None] & (depth[:, None] == column[None, :])
    row_at = tl.max(tl.where(at_column, row[:, None], -1), axis=0)
    tl.store(path + request * D + column, row_at, mask=in_output)
    above = accepted[:, None] & (depth[:, None] == column[None, :] + 1)
    drafted = tl.sum(tl.where(above, token[:, None], 0), axis=0)
    emitted_token = tl.where(column == last_depth, bonus_token, drafted)
    tl.store(output_tokens + request * D + column, emitted_token, mask=in_output)
    tl.store(accept_lengths + request, emitted)
    tl.store(bonus + request, bonus_token)
    length = tl.load(lengths + request)
    tl.store(new_lengths + request, length + emitted.to(length.dtype))


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
    """Accept rows of every request in one launch.

    Args:
        tokens: ``[bs, N]`` int64 drafted tokens, row 0 the anchor.
        parents: ``[bs, N]`` int32; -1 for the root and for dead rows. May be expanded.
        depths: ``[bs, N]`` int32. May be expanded.
        ancestors: ``[bs, N, W]`` int64 bit sets, self included. May be expanded.
        choice: ``[bs, N]`` int64, the target's token after each row.
        lengths: ``[bs]`` int32 or int64 committed lengths.
        output_width: D, greater than every depth.
        out: preallocated outputs; with it nothing is allocated.

    Returns:
        :class:`Accepted`.
    """
    bs, rows = tokens.shape
    if out is None:
        out = Accepted.empty(bs, output_width, lengths.dtype, tokens.device)
    if not runs_kernel(tokens):
        return accept_reference(tokens, parents, depths, ancestors, choice, lengths, out=out)
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
            D=output_width,
            WORDS=ancestors.shape[2],
            ROWS=next_power_of_two(rows),
            COLUMNS=next_power_of_two(output_width),
            num_warps=1 if rows <= 32 else 4,
        )
    return out
