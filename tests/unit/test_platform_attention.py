"""The CPU platform's attention against a dense softmax over explicitly gathered K/V."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.platforms import tiles
from sglang_dflash.platforms.tiles import Queries, Sight, as_slice, attend, plan

SLOTS = 1024
HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = DIM**-0.5
CAUSAL, BLOCK = Sight(True), Sight(False)


class Case(NamedTuple):
    """A pool, a request table, and the query rows of one forward."""

    queries: Queries
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def make_case(
    contexts: Sequence[int],
    widths: Sequence[int],
    *,
    page: int = 1,
    ancestors: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Requests whose K/V pages lie scattered over the pool, other slots full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(len(contexts) + 3, 800, dtype=torch.int32)
    rows = torch.randperm(len(contexts) + 3, generator=generator)[: len(contexts)]
    pages = torch.randperm(SLOTS // page, generator=generator).tolist()
    keys = torch.full((SLOTS, KV_HEADS, DIM), math.nan, dtype=dtype)
    values = torch.full((SLOTS, KV_HEADS, DIM), math.nan, dtype=dtype)
    for row, context, width in zip(rows.tolist(), contexts, widths, strict=True):
        length = context + width
        taken = [pages.pop() for _ in range(-(-length // page))]
        slots = torch.cat([torch.arange(p * page, (p + 1) * page) for p in taken])[:length]
        table[row, :length] = slots.to(torch.int32)
        shape = (length, KV_HEADS, DIM)
        keys[slots] = torch.randn(shape, generator=generator).to(dtype)
        values[slots] = torch.randn(shape, generator=generator).to(dtype)
    query = torch.randn(sum(widths), HEADS, DIM, generator=generator).to(dtype)
    queries = Queries(table, rows, torch.tensor(contexts), list(widths), positions, ancestors)
    return Case(queries, query, keys, values)


def dense(case: Case, sight: Sight) -> torch.Tensor:
    """Softmax over every K/V row of a request, from the definition, in float64."""
    queries, outputs, row = case.queries, [], 0
    for request, (context, width) in enumerate(
        zip(queries.contexts.tolist(), queries.widths, strict=True)
    ):
        length = context + width
        slots = queries.table[queries.table_rows[request], :length].long()
        keys = case.keys[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
        values = case.values[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
        query = case.query[row : row + width].double()
        scores = torch.einsum("nhd,jhd->hnj", query, keys) * SCALE
        scores.masked_fill_(~visible(queries, request, context, width, sight), -math.inf)
        outputs.append(torch.einsum("hnj,jhd->nhd", scores.softmax(-1), values))
        row += width
    return torch.cat(outputs)


def visible(queries: Queries, request: int, context: int, width: int, sight: Sight) -> torch.Tensor:
    """``[width, context + width]``: whether query row n of a request sees its K/V row j."""
    length = context + width
    positions = torch.arange(length)
    seen = torch.ones(width, length, dtype=torch.bool)
    if queries.positions is not None:
        positions[context:] = queries.positions[request]
    if sight.causal:
        seen[:, context:] = torch.ones(width, width, dtype=torch.bool).tril()
        if queries.ancestors is not None:
            for n, words in enumerate(queries.ancestors[request].tolist()):
                for m in range(width):
                    seen[n, context + m] = bool((words[m // 64] >> (m % 64)) & 1)
    if sight.window >= 0:
        seen &= positions >= positions[context:].unsqueeze(1) - sight.window
    return seen


def run(case: Case, sight: Sight, **options: float) -> torch.Tensor:
    planned = plan(case.queries, sight, case.query.dtype, **options)
    return attend(planned, case.query, case.keys, case.values, SCALE)


def check(case: Case, sight: Sight) -> None:
    """With the query heads of a group apart, and folded into rows where that is done."""
    expected = dense(case, sight)
    for group in (1, HEADS // KV_HEADS):
        actual = run(case, sight, group=group)
        torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=1e-5)


def random_tree(width: int, seed: int) -> tuple[list[int], list[int]]:
    """Parents and depths of a random tree whose last rows are dead."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    dead = width // 4
    for n in range(1, width):
        if n >= width - dead:
            parents.append(-1)
            depths.append(0)
            continue
        parents.append(int(torch.randint(0, n, (), generator=generator)))
        depths.append(depths[parents[-1]] + 1)
    return parents, depths


def trees(contexts: Sequence[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestor bit sets ``[bs, N, W]`` and positions ``[bs, N]`` of a random tree each."""
    ancestors = torch.zeros(len(contexts), width, -(-width // 64), dtype=torch.int64)
    positions = torch.zeros(len(contexts), width, dtype=torch.int64)
    for b, context in enumerate(contexts):
        parents, depths = random_tree(width, seed=b)
        positions[b] = context + torch.tensor(depths)
        for n, parent in enumerate(parents):
            if parent >= 0:
                ancestors[b, n] = ancestors[b, parent]
            bit = 1 << (n % 64)
            ancestors[b, n, n // 64] |= bit - (1 << 64) if bit >> 63 else bit
    return ancestors, positions


CONTEXTS = [[37], [5, 5], [130, 7, 64], [1, 17, 40, 300, 90]]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=str)
@pytest.mark.parametrize("width", [1, 8, 16])
@pytest.mark.parametrize(
    "sight", [CAUSAL, BLOCK, Sight(True, 12), Sight(False, 12)], ids=lambda s: f"{tuple(s)}"
)
def test_decode_verify_and_block_rows(
    contexts: list[int], width: int, sight: Sight, page: int
) -> None:
    check(make_case(contexts, [width] * len(contexts), page=page), sight)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("sight", [CAUSAL, BLOCK, Sight(True, 12)], ids=lambda s: f"{tuple(s)}")
@pytest.mark.parametrize(
    ("contexts", "widths"),
    [([0], [19]), ([23], [9]), ([0, 40, 3, 0], [31, 1, 50, 2]), ([64, 128], [64, 64])],
    ids=str,
)
def test_prefill_rows_after_a_cached_prefix(
    contexts: list[int], widths: list[int], sight: Sight, page: int
) -> None:
    check(make_case(contexts, widths, page=page), sight)


@pytest.mark.parametrize("sight", [CAUSAL, Sight(True, 40)], ids=lambda s: f"{tuple(s)}")
def test_prefill_longer_than_a_tile(sight: Sight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "PREFILL_ROWS", 16)
    case = make_case([21, 0], [70, 33])
    check(case, sight)
    assert max(tile.width for tile in plan(case.queries, sight, torch.float32).tiles) == 16


@pytest.mark.parametrize("contexts", CONTEXTS, ids=str)
@pytest.mark.parametrize("width", [4, 16, 65, 100])
@pytest.mark.parametrize("sight", [CAUSAL, Sight(True, 9), BLOCK], ids=lambda s: f"{tuple(s)}")
def test_tree_rows_see_the_context_and_their_ancestors(
    contexts: list[int], width: int, sight: Sight
) -> None:
    ancestors, positions = trees(contexts, width)
    check(
        make_case(contexts, [width] * len(contexts), ancestors=ancestors, positions=positions),
        sight,
    )


def test_a_path_verified_as_a_tree_equals_the_chain() -> None:
    contexts, width = [33, 8], 8
    bits = torch.tensor([(1 << (n + 1)) - 1 for n in range(width)])
    ancestors = bits.view(1, width, 1).expand(2, -1, -1)
    positions = torch.tensor(contexts).unsqueeze(1) + torch.arange(width)
    chain = make_case(contexts, [width] * 2)
    tree = chain._replace(queries=chain.queries._replace(ancestors=ancestors, positions=positions))
    assert torch.equal(run(chain, CAUSAL), run(tree, CAUSAL))


def test_a_verify_row_equals_the_decode_row_at_its_position() -> None:
    case = make_case([50], [8])
    verify = run(case, CAUSAL)
    for n in range(8):
        alone = case._replace(
            queries=case.queries._replace(contexts=torch.tensor([50 + n]), widths=[1]),
            query=case.query[n : n + 1],
        )
        torch.testing.assert_close(verify[n : n + 1], run(alone, CAUSAL), atol=1e-6, rtol=0)


def test_consecutive_slots_are_read_in_place() -> None:
    assert as_slice(torch.arange(7, 20)) == slice(7, 20)
    assert as_slice(torch.tensor([5])) == slice(5, 6)
    for slots in ([3, 5], [5, 4, 3], [1, 2, 2, 4], [4, 6, 5, 7]):
        assert isinstance(as_slice(torch.tensor(slots)), torch.Tensor)
    table = torch.arange(100, dtype=torch.int32).view(1, 100)
    queries = Queries(table, torch.tensor([0]), torch.tensor([40]), [8])
    (tile,) = plan(queries, CAUSAL, torch.float32).tiles
    assert tile.slots == slice(0, 48)


def test_requests_of_similar_length_share_a_call() -> None:
    def batches(queries: Queries, sight: Sight, **options: float) -> list[int]:
        return [tile.batch for tile in plan(queries, sight, torch.float32, **options).tiles]

    even = make_case([40, 50, 60], [8] * 3).queries
    assert batches(even, CAUSAL) == [3]
    ragged = make_case([600, 5, 9, 5], [8] * 4).queries
    assert batches(ragged, CAUSAL) == [3, 1]
    assert batches(ragged, CAUSAL, max_padding=1) == [2, 1, 1]
    # The sliding window makes them equally long.
    assert batches(ragged, Sight(True, 5)) == [4]


def test_without_padding_a_row_does_not_depend_on_its_batch() -> None:
    contexts = [60, 41, 9]
    case = make_case(contexts, [8] * 3)
    together = run(case, CAUSAL, max_padding=1)
    for b in range(3):
        alone = case._replace(
            queries=case.queries._replace(
                table_rows=case.queries.table_rows[b : b + 1],
                contexts=case.queries.contexts[b : b + 1],
                widths=[8],
            ),
            query=case.query[b * 8 : b * 8 + 8],
        )
        assert torch.equal(together[b * 8 : b * 8 + 8], run(alone, CAUSAL, max_padding=1))


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("group", [1, HEADS // KV_HEADS])
def test_bfloat16_stays_bfloat16(width: int, group: int) -> None:
    case = make_case([30, 12], [width] * 2, dtype=torch.bfloat16)
    actual = run(case, CAUSAL, group=group)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), dense(case, CAUSAL), atol=0.03, rtol=0.03)


@settings(max_examples=30, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 120), min_size=1, max_size=5),
    width=st.integers(1, 20),
    window=st.sampled_from([-1, 0, 1, 7, 500]),
    causal=st.booleans(),
    page=st.sampled_from([1, 16]),
    seed=st.integers(0, 999),
)
def test_any_ragged_batch(
    contexts: list[int], width: int, window: int, causal: bool, page: int, seed: int
) -> None:
    case = make_case(contexts, [width] * len(contexts), page=page, seed=seed)
    check(case, Sight(causal, window))


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 70)), min_size=1, max_size=4),
    window=st.sampled_from([-1, 0, 5, 64]),
    page=st.sampled_from([1, 16]),
)
def test_any_prefill(requests: list[tuple[int, int]], window: int, page: int) -> None:
    contexts, widths = zip(*requests, strict=True)
    check(make_case(contexts, widths, page=page), Sight(True, window))
