"""Random inputs of every operation, from a seed and sizes; on the host, moved where needed.

A tree is drawn as parents and tokens, and its depths and ancestor sets are derived here row by
row, so that no code under test takes part in making its own inputs.
"""

from __future__ import annotations

import random
from typing import NamedTuple, TypeVar

import torch
from sglang_dflash.kernels.append_context import ContextCache
from sglang_dflash.kernels.layer_caches import LayerCaches

T = TypeVar("T", bound=tuple)

SENTINEL = 7.0
"""What caches are filled with: a row still holding it was not written."""


def to(case: T, device: str) -> T:
    """The same case with every tensor copied to ``device``; expanded tensors stay expanded."""

    def copied(value: torch.Tensor) -> torch.Tensor:
        if value.dim() and len(value) and value.stride(0) == 0:
            return value[:1].to(device, copy=True).expand(value.shape)
        return value.to(device, copy=True)

    return type(case)(*(copied(v) if isinstance(v, torch.Tensor) else v for v in case))


class BlockCase(NamedTuple):
    anchors: torch.Tensor
    lengths: torch.Tensor
    req_pool_indices: torch.Tensor
    req_to_token: torch.Tensor
    mask_token_id: int
    block_size: int
    verify_rows: int


def block_case(
    seed: int,
    bs: int,
    block_size: int,
    verify_rows: int,
    *,
    length_dtype: torch.dtype = torch.int64,
    index_dtype: torch.dtype = torch.int64,
) -> BlockCase:
    """``bs`` requests in random rows of a table; the longest ends one slot before its end."""
    generator = torch.Generator().manual_seed(seed)
    table_rows, longest = bs + 3, 41
    width = longest + verify_rows + 1
    return BlockCase(
        anchors=torch.randint(0, 150_000, (bs,), generator=generator),
        lengths=torch.randint(0, longest + 1, (bs,), generator=generator).to(length_dtype),
        req_pool_indices=torch.randperm(table_rows, generator=generator)[:bs].to(index_dtype),
        req_to_token=torch.randint(
            0, 1 << 20, (table_rows, width), generator=generator, dtype=torch.int32
        ),
        mask_token_id=151_669,
        block_size=block_size,
        verify_rows=verify_rows,
    )


class AcceptCase(NamedTuple):
    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    choice: torch.Tensor
    lengths: torch.Tensor
    output_width: int


def accept_case(
    seed: int,
    bs: int,
    rows: int,
    *,
    agreement: float,
    branching: float = 0.0,
    dead: float = 0.0,
    length_dtype: torch.dtype = torch.int64,
    spare_width: int = 0,
) -> AcceptCase:
    """``bs`` proposals of ``rows`` rows.

    Args:
        agreement: how often the target chooses one of a row's drafted tokens.
        branching: how often a row hangs from a random row instead of the one before it; 0 gives
            the same chain to every request, its links expanded over the batch.
        dead: how often a row is unused.
        spare_width: output columns beyond what the deepest row needs.
    """
    draw = random.Random(seed)
    proposals = [_proposal(draw, rows, agreement, branching, dead) for _ in range(bs)]
    links = [(parents, *_derived(parents)) for parents, _, _ in proposals]
    chain = not branching and not dead
    if chain:
        parents = list(range(-1, rows - 1))
        links = [(parents, *_derived(parents))]
    deepest = max((max(depths) for _, depths, _ in links), default=0)
    words = -(-rows // 64)
    parents, depths, ancestors = (
        torch.tensor([link[index] for link in links], dtype=dtype).reshape(len(links), *shape)
        for index, dtype, shape in (
            (0, torch.int32, (rows,)),
            (1, torch.int32, (rows,)),
            (2, torch.int64, (rows, words)),
        )
    )
    return AcceptCase(
        tokens=torch.tensor([p[1] for p in proposals], dtype=torch.int64).reshape(bs, rows),
        parents=parents.expand(bs, -1) if chain else parents,
        depths=depths.expand(bs, -1) if chain else depths,
        ancestors=ancestors.expand(bs, -1, -1) if chain else ancestors,
        choice=torch.tensor([p[2] for p in proposals], dtype=torch.int64).reshape(bs, rows),
        lengths=torch.tensor([draw.randrange(1 << 20) for _ in range(bs)], dtype=length_dtype),
        output_width=deepest + 1 + spare_width,
    )


def _proposal(
    draw: random.Random, rows: int, agreement: float, branching: float, dead: float
) -> tuple[list[int], list[int], list[int]]:
    """Parents, tokens (distinct among siblings) and the target's choices of one request."""
    parents, tokens = [-1], [draw.randrange(50_000)]
    children: list[list[int]] = [[] for _ in range(rows)]
    live = [0]
    for row in range(1, rows):
        if draw.random() < dead:
            parents.append(-1)
            # A dead row must not match even where its token would.
            tokens.append(tokens[0])
            continue
        parent = draw.choice(live) if draw.random() < branching else live[-1]
        taken = {tokens[child] for child in children[parent]}
        token = draw.randrange(8)
        while token in taken:
            token += 8
        parents.append(parent)
        tokens.append(token)
        children[parent].append(row)
        live.append(row)
    choice = [
        tokens[draw.choice(below)]
        if below and draw.random() < agreement
        else draw.choice([100_000 + draw.randrange(8), tokens[0]])
        for below in children
    ]
    return parents, tokens, choice


def _derived(parents: list[int]) -> tuple[list[int], list[list[int]]]:
    """Depths and ancestor bit sets (64 rows a signed word) of rows given by their parents."""
    depths: list[int] = []
    members: list[set[int]] = []
    for row, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        members.append((members[parent] if parent >= 0 else set()) | {row})
    words = []
    for ancestors in members:
        bits = sum(1 << row for row in ancestors)
        split = [(bits >> shift) & (2**64 - 1) for shift in range(0, len(parents), 64)]
        words.append([word - 2**64 if word >= 2**63 else word for word in split])
    return depths, words


class ContextCase(NamedTuple):
    kv: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    commit_lengths: torch.Tensor | None
    rows_per_request: int
    k_norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    eps: float
    is_neox: bool
    cache_dtype: torch.dtype
    cache_slots: int

    def cache(self) -> ContextCache:
        """Fresh caches full of the sentinel, on the case's device."""
        _, layers, _, heads, head_dim = self.kv.shape
        shape = (self.cache_slots, heads, head_dim)
        caches = [
            torch.full(shape, SENTINEL, dtype=self.cache_dtype, device=self.kv.device)
            for _ in range(2 * layers)
        ]
        return ContextCache(
            k_cache=caches[:layers],
            v_cache=caches[layers:],
            k_norm_weight=self.k_norm_weight,
            eps=self.eps,
            cos_sin_cache=self.cos_sin,
            is_neox=self.is_neox,
        )


def context_case(
    seed: int,
    bs: int,
    rows_per_request: int,
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype = torch.float32,
    slot_dtype: torch.dtype = torch.int64,
    prefill: bool = False,
) -> ContextCase:
    """``bs`` requests whose rows scatter over a cache; each commits 0 to all of its rows.

    Rows not committed hold NaN: reading them shows. Their slots repeat those of other requests:
    writing them shows too.
    """
    generator = torch.Generator().manual_seed(seed)
    count = bs * rows_per_request
    kv = torch.randn(count, layers, 2, heads, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(count + 9, generator=generator)[:count]
    commit_lengths = None
    if not prefill:
        commit_lengths = torch.randint(
            0, rows_per_request + 1, (bs,), generator=generator, dtype=torch.int32
        )
        row = torch.arange(count)
        rejected = row % rows_per_request >= commit_lengths[row // rows_per_request]
        kv[rejected] = float("nan")
        if (~rejected).any():
            slots[rejected] = slots[~rejected][0]
    rotary_dim = rotary_dim or head_dim
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6.3
    return ContextCase(
        kv=kv,
        positions=torch.randint(0, 50, (count,), generator=generator),
        slots=slots.to(slot_dtype),
        commit_lengths=commit_lengths,
        rows_per_request=rows_per_request,
        k_norm_weight=(torch.rand(layers, head_dim, generator=generator) + 0.5).to(dtype),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1).to(table_dtype),
        eps=1e-6,
        is_neox=is_neox,
        cache_dtype=cache_dtype or dtype,
        cache_slots=count + 9,
    )


class MoveCase(NamedTuple):
    caches: torch.Tensor
    """``[caches, slots, heads, head_dim]``"""
    slots: torch.Tensor
    path: torch.Tensor
    accept_lengths: torch.Tensor

    def layers(self) -> LayerCaches:
        """A fresh copy of the caches, each a tensor of its own."""
        return LayerCaches([cache.clone() for cache in self.caches])


def move_case(
    seed: int,
    bs: int,
    rows: int,
    width: int,
    *,
    caches: int = 3,
    heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    slot_dtype: torch.dtype = torch.int64,
    dense: bool = False,
) -> MoveCase:
    """``bs`` requests with random accepted paths; ``dense`` ones alias source and target most."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    paths, counts = [], []
    for _ in range(bs):
        deepest = min(width, rows)
        count = deepest if dense else draw.randint(0, deepest)
        # Dense: in place up to some depth, then one row skipped, so every target is a source.
        pool = range(1, min(rows, count + 1)) if dense else range(1, rows)
        tail = sorted(draw.sample(pool, min(max(count - 1, 0), len(pool))))
        path = [0, *tail][:count]
        counts.append(len(path))
        paths.append(path + [-1] * (width - len(path)))
    values = torch.randint(0, 100, (caches, bs * rows + 5, heads, head_dim), generator=generator)
    return MoveCase(
        caches=values.to(dtype),
        slots=torch.randperm(bs * rows + 5, generator=generator)[: bs * rows]
        .reshape(bs, rows)
        .to(slot_dtype),
        path=torch.tensor(paths, dtype=torch.int32).reshape(bs, width),
        accept_lengths=torch.tensor(counts, dtype=torch.int32),
    )


class MaskCase(NamedTuple):
    ancestors: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    """Longer than needed, and full of a random pattern."""


def mask_case(
    seed: int,
    bs: int,
    rows: int,
    *,
    longest: int = 70,
    length_dtype: torch.dtype = torch.int64,
) -> MaskCase:
    """``bs`` trees of ``rows`` rows over contexts of 0 to ``longest`` tokens."""
    draw = random.Random(seed)
    trees = accept_case(seed, bs, rows, agreement=0.0, branching=0.6, dead=0.1)
    lengths = [draw.randint(0, longest) for _ in range(bs)]
    size = sum(rows * (length + rows) for length in lengths) + draw.randint(0, 40)
    pattern = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5
    return MaskCase(trees.ancestors, torch.tensor(lengths, dtype=length_dtype), pattern)


class TreeCase(NamedTuple):
    ids: torch.Tensor
    log_q: torch.Tensor
    anchors: torch.Tensor
    lengths: torch.Tensor
    rows: int
    keep_spine: bool
    spine_discount: float


def tree_case(
    seed: int,
    bs: int,
    depths: int,
    candidates: int,
    rows: int,
    *,
    keep_spine: bool = False,
    spine_discount: float = 0.0,
    grain: float = 0.0,
    support: int | None = None,
    sharpness: float = 2.0,
    length_dtype: torch.dtype = torch.int64,
) -> TreeCase:
    """Marginals of ``bs`` requests; ``grain`` rounds them, so that scores tie, and past
    ``support`` candidates of a depth (drawn up to it) there are none."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(bs, depths, candidates + 3, generator=generator)
    log_q = logits.log_softmax(-1).sort(-1, descending=True).values[..., :candidates]
    if grain:
        log_q = (log_q / grain).round() * grain
    if support is not None:
        kept = torch.randint(1, support + 1, (bs, depths, 1), generator=generator)
        log_q = log_q.masked_fill(torch.arange(candidates) >= kept, float("-inf"))
    ids = torch.rand(bs, depths, 50, generator=generator).argsort(-1)[..., :candidates]
    return TreeCase(
        ids=ids.contiguous(),
        log_q=log_q.contiguous(),
        anchors=torch.randint(0, 150_000, (bs,), generator=generator),
        lengths=torch.randint(0, 5000, (bs,), generator=generator).to(length_dtype),
        rows=rows,
        keep_spine=keep_spine,
        spine_discount=spine_discount,
    )


class LogitsCase(NamedTuple):
    logits: torch.Tensor
    candidates: int
    slices: int
    first_id: int


def logits_case(
    seed: int,
    rows: int,
    columns: int,
    candidates: int,
    slices: int,
    *,
    first_id: int = 0,
    grain: float = 0.0,
    support: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> LogitsCase:
    """Logits of ``rows`` rows; ``grain`` rounds them, so that they tie, and all but ``support``
    tokens of a row are -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, columns, generator=generator)
    if grain:
        logits = (logits / grain).round() * grain
    if support is not None:
        order = torch.rand(rows, columns, generator=generator).argsort(-1)
        logits = logits.masked_fill(order >= support, float("-inf"))
    return LogitsCase(logits.to(dtype), candidates, slices, first_id)
