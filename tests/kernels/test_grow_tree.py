"""The best tree of a block: against a heap, against every tree there is, and how it is laid out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang_dflash.kernels.accept import chain_links
from sglang_dflash.kernels.grow_tree import DraftTree, grow_tree

from tests.kernels import oracles
from tests.kernels.cases import TreeCase, tree_case
from tests.kernels.oracles import Node
from tests.kernels.strategies import PROPERTY, SEEDS, tree_cases


def run(case: TreeCase, out: DraftTree | None = None) -> DraftTree:
    return grow_tree(
        *case[:4],
        rows=case.rows,
        keep_spine=case.keep_spine,
        spine_discount=case.spine_discount,
        out=out,
    )


def laid_out(chosen: list[Node]) -> list[Node]:
    """Rows in order: the root, the spine, the rest as chosen."""
    spine = [node for node in chosen if node.on_spine]
    return [Node((), np.float32(0)), *spine, *(node for node in chosen if not node.on_spine)]


@PROPERTY
@given(tree_cases())
@example(tree_case(0, 3, 15, 8, 128))
@example(tree_case(1, 3, 15, 8, 64, keep_spine=True, spine_discount=0.3))
@example(tree_case(2, 64, 7, 8, 32, grain=0.5))
@example(tree_case(3, 2, 3, 16, 128, support=16))
def test_equals_a_heap(case: TreeCase) -> None:
    found = run(case)
    for b in range(len(case.ids)):
        nodes = laid_out(oracles.tree(case, b))
        row_of = {node.ranks: row for row, node in enumerate(nodes)}
        dead = case.rows - len(nodes)
        tokens, parents, depths, positions, children, siblings, ancestors = ([] for _ in range(7))
        for row, (ranks, _) in enumerate(nodes):
            depth = len(ranks)
            tokens.append(int(case.ids[b, depth - 1, ranks[-1]] if ranks else case.anchors[b]))
            parents.append(row_of[ranks[:-1]] if ranks else -1)
            depths.append(depth)
            children.append(row_of.get((*ranks, 0), -1))
            siblings.append(row_of.get((*ranks[:-1], ranks[-1] + 1), -1) if ranks else -1)
            ancestors.append({row_of[ranks[:d]] for d in range(depth + 1)})
            assert parents[-1] < row
        for row in range(len(nodes), case.rows):
            ancestors.append({row})
        positions = [int(case.lengths[b]) + depth for depth in depths + [0] * dead]
        assert found.tokens[b].tolist() == tokens + [int(case.anchors[b])] * dead
        assert found.parents[b].tolist() == parents + [-1] * dead
        assert found.depths[b].tolist() == depths + [0] * dead
        assert found.positions[b].tolist() == positions
        assert found.first_child[b].tolist() == children + [-1] * dead
        assert found.next_sibling[b].tolist() == siblings + [-1] * dead
        sets = [
            {n for n in range(case.rows) if words[n // 64] >> (n % 64) & 1}
            for words in found.ancestors[b].tolist()
        ]
        assert sets == ancestors


@settings(PROPERTY, max_examples=60)
@given(
    seed=SEEDS,
    depths=st.integers(1, 4),
    candidates=st.integers(1, 4),
    rows=st.integers(1, 24),
    keep_spine=st.booleans(),
    discount=st.sampled_from([0.0, 0.5]),
)
def test_no_other_tree_scores_more(
    seed: int, depths: int, candidates: int, rows: int, keep_spine: bool, discount: float
) -> None:
    case = tree_case(
        seed, 1, depths, candidates, rows, keep_spine=keep_spine, spine_discount=discount
    )
    found = run(case)
    # The best nodes are closed under parents, so the best set of nodes is the best tree.
    nodes = sorted(oracles.all_nodes(case, 0), key=lambda node: -node.score)
    spine = [node for node in nodes if node.on_spine][: rows - 1] if keep_spine else []
    rest = [node for node in nodes if node not in spine]
    best = [*spine, *rest][: rows - 1]
    alive = (found.parents[0] >= 0).sum().item()
    assert alive == len(best)
    scores = []
    for row in range(1, alive + 1):
        ranks, at = [], row
        while at:
            depth = int(found.depths[0, at]) - 1
            ranks.append(case.ids[0, depth].tolist().index(int(found.tokens[0, at])))
            at = int(found.parents[0, at])
        node = Node((), np.float32(0))
        for rank in reversed(ranks):
            node = oracles.extended(case, 0, node, rank)
        scores.append(float(node.score))
    assert sorted(scores) == pytest.approx(sorted(float(node.score) for node in best), abs=1e-5)


@pytest.mark.parametrize("keep_spine", [True, False])
def test_a_budget_of_the_spine_alone_is_the_chain(keep_spine: bool) -> None:
    # Without keep_spine the marginals must be sharp: a branch nowhere beats the spine's end.
    case = tree_case(0, 3, 7, 4, 8, keep_spine=keep_spine)
    if not keep_spine:
        case.log_q[:, :, 0], case.log_q[:, :, 1:] = -0.01, -9.0
    found = run(case)
    parents, depths, ancestors = chain_links(8, "cpu")
    assert torch.equal(found.parents, parents.expand(3, -1))
    assert torch.equal(found.depths, depths.expand(3, -1))
    assert torch.equal(found.ancestors, ancestors.expand(3, -1, -1))
    assert torch.equal(found.tokens[:, 1:], case.ids[:, :, 0])


def test_a_discount_moves_rows_from_below_branches_to_the_spine() -> None:
    case = tree_case(5, 8, 7, 8, 32, sharpness=1.0)
    free, discounted = run(case), run(case._replace(spine_discount=2.0))

    def deep_off_spine(tree: DraftTree) -> int:
        off = tree.ancestors[..., 0] != (1 << (tree.depths.long() + 1)) - 1
        return int((off & (tree.depths > 1)).sum())

    assert deep_off_spine(discounted) < deep_off_spine(free)


def test_the_same_inputs_give_the_same_tree_whatever_else_is_in_the_batch() -> None:
    case = tree_case(6, 5, 7, 8, 64, grain=0.5)
    together = run(case)
    for b in range(5):
        alone = run(case._replace(**{f: getattr(case, f)[b : b + 1] for f in case._fields[:4]}))
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_of_them[b])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 0}, "rows=0 must be between 1 and 128"),
        ({"rows": 129}, "rows=129 must be between 1 and 128"),
        ({"spine_discount": -0.1}, "spine_discount=-0.1 must not be negative"),
        ({"spine_discount": float("nan")}, "must not be negative"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tree_case(0, 1, 3, 3, 8)._replace(**sizes))


def test_more_candidates_than_the_kernel_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="3 depths of 17 candidates; at most 31 of 16"):
        run(tree_case(0, 1, 3, 17, 8))
