"""What is proposed of a block: a chain, or the best tree under a budget of rows."""

from __future__ import annotations

import torch
from sglang_dflash.kernels import grow_tree
from sglang_dflash.kernels.accept import pack_bits
from sglang_dflash.kernels.merge_topk import Candidates, merge_topk
from sglang_dflash.kernels.topk import topk

from sglang_dflash import config
from sglang_dflash.proposal import ChainProposer, Proposal, TreeProposer, TreeShape

REQUESTS, DRAFTED, VOCABULARY = 3, 5, 80
ANCHORS = torch.tensor([70, 71, 72])
LENGTHS = torch.tensor([4, 100, 9])
POSITIONS = LENGTHS.unsqueeze(1) + torch.arange(DRAFTED + 1)


def marginals(candidates: int = 4) -> tuple[torch.Tensor, Candidates]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(REQUESTS * DRAFTED, VOCABULARY, generator=generator) * 2
    return logits, merge_topk(topk(logits, candidates), candidates)


def tree(**shape: object) -> tuple[torch.Tensor, Proposal]:
    logits, best = marginals()
    proposer = TreeProposer(TreeShape(**shape))  # type: ignore[arg-type]
    return logits, proposer.propose(ANCHORS, POSITIONS, best)


def test_a_budget_of_the_block_leaves_the_chain() -> None:
    logits, grown = tree(rows=DRAFTED + 1)
    drafted = logits.argmax(-1).view(REQUESTS, DRAFTED)
    chain = ChainProposer(DRAFTED + 1, "cpu").propose(ANCHORS, POSITIONS, drafted)
    for name in ("tokens", "parents", "depths", "ancestors", "positions"):
        assert torch.equal(getattr(grown, name), getattr(chain, name)), name
    assert chain.links is None
    assert grown.links is not None


def test_a_file_may_say_what_the_kernel_can_do() -> None:
    for name in ("MAX_ROWS", "MAX_CANDIDATES", "MAX_DEPTH"):
        assert getattr(config, name) == getattr(grow_tree, name)


def test_rows_lie_at_their_depth_behind_the_committed_text() -> None:
    _, grown = tree(rows=16, keep_spine=False)
    assert grown.rows == 16
    assert torch.equal(grown.positions, LENGTHS.unsqueeze(1) + grown.depths)
    assert grown.depths.max() > 1


def test_following_the_links_visits_every_row_below_its_parent() -> None:
    _, grown = tree(rows=16)
    assert grown.links is not None
    for request in range(REQUESTS):
        ancestors = torch.zeros(16, 16, dtype=torch.bool)
        waiting = [(0, -1)]
        while waiting:
            row, parent = waiting.pop()
            assert grown.parents[request, row] == parent
            if parent >= 0:
                ancestors[row] = ancestors[parent]
            ancestors[row, row] = True
            child = int(grown.links.first_child[request, row])
            while child >= 0:
                waiting.append((child, row))
                child = int(grown.links.next_sibling[request, child])
        assert ancestors.any(-1).all()
        assert torch.equal(pack_bits(ancestors), grown.ancestors[request])
