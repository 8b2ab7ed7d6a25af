"""Grow the best tree of one block pass under a budget of rows, for all requests at once.

The drafter gives depth d = 1 .. D its K likeliest tokens with log-probabilities ``q[d, r]``,
r = 0 .. K-1 falling. A node is a path of ranks ``(r_1, .., r_d)``; the *spine* is the path of
zeros. With a penalty ``c >= 0`` for every edge below a node that is off the spine::

    score(r_1 .. r_d) = sum_i q[i, r_i] - c * [(r_1 .. r_{i-1}) is not all zero]

A child scores at most what its parent does, so the N - 1 best nodes form a tree, and popping the
best candidate and putting its first child and its next sibling in its place finds them in order
(DDTree, arXiv 2604.12989). Ties go to the candidate put in first, a child before a sibling. With
``keep_spine`` the whole spine is taken first, and what is left of the budget goes to the best rest.

Rows: the root, then the spine's nodes by depth, then the others as they were popped, so that an
accepted spine prefix lies where it belongs. A parent precedes its children. Where candidates run
out (``q`` is -inf) the last rows are dead: parent -1, depth 0, the anchor's token, and no row but
itself in the bit set.

One program per request keeps the candidates in registers: lane 2j holds the first child of the node
popped j-th, lane 2j+1 its next sibling. While it grows, a node off the spine is known by how many
such nodes came before it, and its ancestors by the length of its spine prefix and a bit set over
those; both turn into rows by one shift when the spine's length is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl
from sglang_dflash.kernels.accept import WORD_BITS, pack_bits

MAX_ROWS = 128
MAX_CANDIDATES = 16
MAX_DEPTH = 31


class DraftTree(NamedTuple):
    """Trees of bs requests, N rows each; W = ceil(N / 64)."""

    tokens: torch.Tensor
    """``[bs, N]`` int64; row 0 is the anchor."""
    parents: torch.Tensor
    """``[bs, N]`` int32; -1 for the root and for dead rows."""
    depths: torch.Tensor
    """``[bs, N]`` int32 distance from the root."""
    ancestors: torch.Tensor
    """``[bs, N, W]`` int64 bit sets over rows, the row itself included."""
    positions: torch.Tensor
    """``[bs, N]`` int64, committed length + depth."""
    first_child: torch.Tensor
    """``[bs, N]`` int64, the likeliest child of a row, or -1."""
    next_sibling: torch.Tensor
    """``[bs, N]`` int64, the next likely child of the row's parent, or -1."""

    @classmethod
    def empty(cls, batch_size: int, rows: int, device: torch.device | str) -> DraftTree:
        """Unfilled outputs for :func:`grow_tree`."""

        def make(dtype: torch.dtype, *tail: int) -> torch.Tensor:
            return torch.empty((batch_size, rows, *tail), dtype=dtype, device=device)

        return cls(
            tokens=make(torch.int64),
            parents=make(torch.int32),
            depths=make(torch.int32),
            ancestors=make(torch.int64, -(-rows // WORD_BITS)),
            positions=make(torch.int64),
            first_child=make(torch.int64),
            next_sibling=make(torch.int64),
        )


def grow_tree_reference(
    ids: torch.Tensor,
    log_q: torch.Tensor,
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    *,
    keep_spine: bool,
    spine_discount: float,
    out: DraftTree,
) -> DraftTree:
    """The search above in torch: all requests pop together, and rows are sorted at the end."""
    bs, depths, candidates = ids.shape
    rows = out.tokens.shape[1]
    forced = min(depths, rows - 1) if keep_spine else 0
    request = torch.arange(bs, device=ids.device)
    infinity = float("inf")

    # Candidates: what they would score, their parent's score, and where they hang.
    score = log_q.new_full((bs, 2 * rows), -infinity)
    if not forced:
        score[:, 0] = log_q[:, 0, 0]
    base = torch.zeros_like(score)
    depth, rank, parent, prefix = (
        torch.zeros((bs, 2 * rows), dtype=torch.int64, device=ids.device) for _ in range(4)
    )
    depth[:, 0] = 1
    # Nodes in the order they are popped; the root is the first.
    node_depth, node_rank, node_parent, node_prefix, child, sibling = (
        torch.zeros((bs, rows), dtype=torch.int64, device=ids.device) for _ in range(6)
    )
    child.fill_(-1)
    sibling.fill_(-1)
    alive = torch.ones((bs, rows), dtype=torch.bool, device=ids.device)
    members = torch.eye(rows, dtype=torch.bool, device=ids.device).repeat(bs, 1, 1)
    spine_score = torch.zeros_like(score[:, 0])

    for j in range(1, rows):
        if j <= forced:
            b = spine_score
            best = spine_score = b + log_q[:, j - 1, 0]
            d, r, p, a = (torch.full_like(request, value) for value in (j, 0, j - 1, j - 1))
            before = p
        else:
            best, lane = score.max(1)
            b, d, r, p, a = (x[request, lane] for x in (base, depth, rank, parent, prefix))
            score[request, lane] = -infinity
            before = lane // 2
        live = best > -infinity
        under_spine = a == d - 1
        spine = under_spine & (r == 0)
        node_depth[:, j] = torch.where(live, d, 0)
        node_rank[:, j] = r
        node_parent[:, j] = torch.where(live, p, -1)
        node_prefix[:, j] = a = torch.where(spine, d, a)
        alive[:, j] = live
        members[:, j] |= members[request, p] & live.unsqueeze(1)
        first = live & (r == 0)
        child[request, before] = torch.where(first, j, child[request, before])
        sibling[request, before] = torch.where(live & ~first, j, sibling[request, before])

        deeper = log_q[request, d.clamp(max=depths - 1), 0] - spine_discount * ~spine
        open_below = live & (d < depths) & (j >= forced)
        score[:, 2 * j] = torch.where(open_below, best + deeper, -infinity)
        beside = log_q[request, d - 1, (r + 1).clamp(max=candidates - 1)]
        beside = b + (beside - spine_discount * ~under_spine)
        score[:, 2 * j + 1] = torch.where(live & (r + 1 < candidates), beside, -infinity)
        base[:, 2 * j], base[:, 2 * j + 1] = best, b
        depth[:, 2 * j], depth[:, 2 * j + 1] = d + 1, d
        rank[:, 2 * j], rank[:, 2 * j + 1] = 0, r + 1
        parent[:, 2 * j], parent[:, 2 * j + 1] = j, p
        old = torch.where(spine, d - 1, a)
        prefix[:, 2 * j], prefix[:, 2 * j + 1] = a, old

    popped = torch.arange(rows, device=ids.device)
    on_spine = node_prefix == node_depth
    key = torch.where(on_spine, node_depth, rows + popped)
    order = torch.where(alive, key, 2 * rows + popped).argsort(1)
    place = order.argsort(1)

    def rows_of(popped: torch.Tensor) -> torch.Tensor:
        found = torch.where(popped < 0, -1, place.gather(1, popped.clamp(min=0)))
        return found.gather(1, order)

    out.depths.copy_(node_depth.gather(1, order))
    at = ((node_depth - 1).clamp(min=0) * candidates + node_rank).gather(1, order)
    drafted = ids.flatten(1).gather(1, at)
    out.tokens.copy_(torch.where(out.depths > 0, drafted, anchors.unsqueeze(1)))
    node_parent[:, 0] = -1
    out.parents.copy_(rows_of(node_parent))
    out.first_child.copy_(rows_of(child))
    out.next_sibling.copy_(rows_of(sibling))
    torch.add(lengths.unsqueeze(1), out.depths, out=out.positions)
    ordered = members.gather(1, order.unsqueeze(2).expand_as(members))
    ordered = ordered.gather(2, order.unsqueeze(1).expand_as(members))
    out.ancestors.copy_(pack_bits(ordered))
    return out


@jit
def _grow_tree_kernel(
    ids,
    log_q,
    anchors,
    lengths,
    tokens,
    parents,
    depths,
    ancestors,
    positions,
    first_child,
    next_sibling,
    discount,
    D,
    K,
    N: tl.constexpr,
    FORCED: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    # Codes of nodes whose rows are not known yet: spine nodes are their depth.
    OFF: tl.constexpr = 1024
    DEAD: tl.constexpr = 2048
    request = tl.program_id(0).to(tl.int64)
    ids += request * D * K
    log_q += request * D * K
    lane = tl.arange(0, LANES)
    node = tl.arange(0, ROWS)

    # A candidate's place in one word: depth 5 bits, rank 4, parent 7, its spine prefix 5, its code
    # off the spine 7.
    root_lane = 0 if FORCED == 0 else -1
    score = tl.where(lane == root_lane, tl.load(log_q), float("-inf"))
    base = tl.zeros((LANES,), tl.float32)
    place = tl.full((LANES,), 1, tl.int32)
    code = tl.zeros((ROWS,), tl.int32)
    above = tl.full((ROWS,), -1, tl.int32)
    depth = tl.zeros((ROWS,), tl.int32)
    rank = tl.zeros((ROWS,), tl.int32)
    prefix = tl.zeros((ROWS,), tl.int32)
    child = tl.full((ROWS,), -1, tl.int32)
    sibling = tl.full((ROWS,), -1, tl.int32)
    low = tl.zeros((ROWS,), tl.int64)
    high = tl.zeros((ROWS,), tl.int64)
    one = tl.full((), 1, tl.int64)
    spine_score = tl.sum(base, axis=0)
    spine_length = 0
    off_count = 0
    dead_count = 0

    for j in range(1, N):
        best, picked = tl.max(score, axis=0, return_indices=True)
        here = lane == picked
        found = tl.sum(tl.where(here, place, 0), axis=0)
        b = tl.sum(tl.where(here, base, 0.0), axis=0)
        before = picked // 2
        if FORCED > 0:
            forced = j <= FORCED
            below = spine_score + tl.load(log_q + (j - 1) * K, mask=forced, other=0.0)
            best = tl.where(forced, below, best)
            b = tl.where(forced, spine_score, b)
            spine_score = tl.where(forced, below, spine_score)
            found = tl.where(forced, j | (j - 1) << 9 | (j - 1) << 16, found)
            before = tl.where(forced, j - 1, before)
            # A forced node was no candidate: none is taken out.
            here = lane == tl.where(forced, -1, picked)
        d = found & 31
        r = (found >> 5) & 15
        p = (found >> 9) & 127
        a = (found >> 16) & 31
        p_off = (found >> 21) & 127
        live = best > float("-inf")
        under_spine = a == d - 1
        spine = under_spine & (r == 0)
        mine = tl.where(spine, d, OFF + off_count)
        off = live & (mine >= OFF)

        me = node == j
        code = tl.where(me, tl.where(live, mine, DEAD + dead_count), code)
        placed = node == tl.where(live, j, -1)
        above = tl.where(placed, tl.where(under_spine, a, OFF + p_off), above)
        depth = tl.where(placed, d, depth)
        rank = tl.where(me, r, rank)
        prefix = tl.where(me, tl.where(spine, d, a), prefix)
        bit = tl.where(off, one << (off_count % 64), 0)
        own = tl.sum(tl.where(node == p, low, 0), axis=0)
        low = tl.where(me, own | tl.where(off_count < 64, bit, 0), low)
        if WORDS > 1:
            own = tl.sum(tl.where(node == p, high, 0), axis=0)
            high = tl.where(me, own | tl.where(off_count < 64, 0, bit), high)
        first = live & (r == 0)
        later = live & (r > 0)
        child = tl.where(node == tl.where(first, before, -1), mine, child)
        sibling = tl.where(node == tl.where(later, before, -1), mine, sibling)

        open_below = live & (d < D) & (j >= FORCED)
        deeper = tl.load(log_q + d * K, mask=open_below, other=float("-inf"))
        deeper -= tl.where(spine, 0.0, discount)
        open_beside = live & (r + 1 < K)
        beside = tl.load(log_q + (d - 1) * K + r + 1, mask=open_beside, other=float("-inf"))
        beside -= tl.where(under_spine, 0.0, discount)
        is_child = lane == 2 * j
        is_sibling = lane == 2 * j + 1
        score = tl.where(here, float("-inf"), score)
        score = tl.where(is_child, best + deeper, tl.where(is_sibling, b + beside, score))
        base = tl.where(is_child, best, tl.where(is_sibling, b, base))
        my_prefix = tl.where(spine, d, a)
        my_off = tl.where(off, off_count, 0)
        down = (d + 1) | j << 9 | my_prefix << 16 | my_off << 21
        side = d | (r + 1) << 5 | p << 9 | a << 16 | p_off << 21
        place = tl.where(is_child, down, tl.where(is_sibling, side, place))
        spine_length = tl.where(live & spine, tl.maximum(spine_length, d), spine_length)
        off_count += off.to(tl.int32)
        dead_count += 1 - live.to(tl.int32)

    # Codes become rows: the spine, the others behind it, the dead last.
    shift = spine_length + 1
    row = tl.where(code >= OFF, code - OFF + shift, code)
    row = tl.where(code >= DEAD, code - DEAD + shift + off_count, row)
    above = tl.where(above >= OFF, above - OFF + shift, above)
    child = tl.where(child >= OFF, child - OFF + shift, child)
    sibling = tl.where(sibling >= OFF, sibling - OFF + shift, sibling)
    real = node < N
    alive = (code < DEAD) & real
    at = request * N + row
    drafted = alive & (depth > 0)
    token = tl.load(ids + (depth - 1) * K + rank, mask=drafted, other=0)
    anchor = tl.load(anchors + request)
    tl.store(tokens + at, tl.where(drafted, token, anchor), mask=real)
    tl.store(parents + at, above, mask=real)
    tl.store(depths + at, depth, mask=real)
    length = tl.load(lengths + request).to(tl.int64)
    tl.store(positions + at, length + depth, mask=real)
    tl.store(first_child + at, child.to(tl.int64), mask=real)
    tl.store(next_sibling + at, sibling.to(tl.int64), mask=real)

    spine_bits = (one << (prefix + 1).to(tl.int64)) - 1
    by = tl.full((ROWS,), 0, tl.int64) + shift
    bits = spine_bits | (low << by)
    self_bit = one << (row % 64).to(tl.int64)
    bits = tl.where(alive, bits, tl.where(row < 64, self_bit, 0))
    tl.store(ancestors + at * WORDS, bits, mask=real)
    if WORDS > 1:
        carried = (low.to(tl.uint64) >> (64 - by).to(tl.uint64)).to(tl.int64)
        bits = (high << by) | carried
        bits = tl.where(alive, bits, tl.where(row < 64, 0, self_bit))
        tl.store(ancestors + at * WORDS + 1, bits, mask=real)


def launch_grow_tree(
    ids: torch.Tensor,
    log_q: torch.Tensor,
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    *,
    keep_spine: bool,
    spine_discount: float,
    out: DraftTree,
) -> DraftTree:
    """The search above in Triton: one program per request, one launch."""
    bs, depths, candidates = ids.shape
    rows = out.tokens.shape[1]
    if bs:
        _grow_tree_kernel[(bs,)](
            ids,
            log_q,
            anchors,
            lengths,
            *out,
            float(spine_discount),
            depths,
            candidates,
            N=rows,
            FORCED=min(depths, rows - 1) if keep_spine else 0,
            WORDS=out.ancestors.shape[2],
            ROWS=next_power_of_two(rows),
            LANES=next_power_of_two(2 * rows),
            num_warps=1,
        )
    return out


def grow_tree(
    ids: torch.Tensor,
    log_q: torch.Tensor,
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    *,
    rows: int,
    keep_spine: bool = True,
    spine_discount: float = 0.0,
    out: DraftTree | None = None,
) -> DraftTree:
    """Grow the best tree of every request.

    Args:
        ids: ``[bs, D, K]`` int64, the K likeliest tokens of each depth, likeliest first;
            contiguous.
        log_q: ``[bs, D, K]`` float32 log-probabilities, falling along K; -inf where there is no
            candidate; contiguous.
        anchors: ``[bs]`` int64.
        lengths: ``[bs]`` int32 or int64 committed lengths.
        rows: N, root included; at most 128.
        keep_spine: take the whole spine before anything else.
        spine_discount: c, in nats.
        out: contiguous outputs, overwritten; with it nothing is allocated.

    Raises:
        ValueError: a size or the discount is out of range.
    """
    _, depths, candidates = ids.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows={rows} must be between 1 and {MAX_ROWS}")
    if not 1 <= candidates <= MAX_CANDIDATES or not 1 <= depths <= MAX_DEPTH:
        raise ValueError(
            f"ids have {depths} depths of {candidates} candidates; at most {MAX_DEPTH} of "
            f"{MAX_CANDIDATES} are supported"
        )
    if not spine_discount >= 0:
        raise ValueError(
            f"spine_discount={spine_discount} must not be negative: a child must not score more "
            "than its parent"
        )
    if out is None:
        out = DraftTree.empty(len(ids), rows, ids.device)
    run = launch_grow_tree if ids.is_cuda else grow_tree_reference
    return run(
        ids,
        log_q,
        anchors,
        lengths,
        keep_spine=keep_spine,
        spine_discount=spine_discount,
        out=out,
    )
