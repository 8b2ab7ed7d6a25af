"""What the drafter proposes: the rows one verify pass of the target will check.

Chain and tree share one structure. Row 0 is the anchor (the root); a parent always
precedes its children. A chain is the proposal whose rows form a single path; it has no
links and is verified causally, without a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_dflash.config import TreeShape
from sglang_dflash.kernels.accept import ChainLinks, chain_links
from sglang_dflash.kernels.grow_tree import grow_tree
from sglang_dflash.kernels.merge_topk import Candidates


class Links(NamedTuple):
    """A tree as its first children and next siblings, -1 where there is none."""

    first_child: torch.Tensor
    """``[bs, N]`` int64."""
    next_sibling: torch.Tensor
    """``[bs, N]`` int64."""


class Proposal(NamedTuple):
    """Candidate tokens of every request and how they hang together.

    Shapes use ``bs`` requests, ``N`` verify rows per request and ``W = ceil(N / 64)``
    words of a bit set. Chain links are broadcast over the batch (stride 0).
    """

    tokens: torch.Tensor
    """``[bs, N]`` int64; row 0 is the anchor."""
    parents: torch.Tensor
    """``[bs, N]`` int32 row index of the parent; -1 for the root and for dead rows."""
    depths: torch.Tensor
    """``[bs, N]`` int32 distance from the root; a row's position is ``length + depth``."""
    ancestors: torch.Tensor
    """``[bs, N, W]`` int64 bit sets over rows, the row itself included."""
    positions: torch.Tensor
    """``[bs, N]`` int64, committed length + depth."""
    links: Links | None = None
    """How a grammar walks a tree; None for a chain, whose rows follow one another."""

    @property
    def rows(self) -> int:
        """Verify rows per request, N."""
        return self.tokens.shape[1]


class ChainProposer:
    """Turns the likeliest token of every block position into a chain.

    Args:
        block_size: rows of the block, anchor included (B). A chain has N = B rows.
        device: where the proposals live.
    """

    def __init__(self, block_size: int, device: torch.device | str):
        self._links: ChainLinks = chain_links(block_size, device=device)

    def propose(
        self, anchors: torch.Tensor, positions: torch.Tensor, drafted: torch.Tensor
    ) -> Proposal:
        """Build the chain ``anchor, d_1 .. d_{B-1}`` of every request.

        Args:
            anchors: ``[bs]`` int64, the last committed token of each request.
            positions: ``[bs, B]`` int64, the block's, from the anchor's on.
            drafted: ``[bs, B-1]`` int64, the argmax of the drafter's marginals (arXiv
                2602.06036, one block pass; row k predicts the token at position s + k).

        Returns:
            A :class:`Proposal` with N = B rows.
        """
        bs = anchors.shape[0]
        parents, depths, ancestors = self._links
        return Proposal(
            tokens=torch.cat((anchors.unsqueeze(1), drafted), dim=1),
            parents=parents.expand(bs, -1),
            depths=depths.expand(bs, -1),
            ancestors=ancestors.expand(bs, -1, -1),
            positions=positions,
        )


class TreeProposer:
    """Turns the marginals of a block into the best tree under a budget of rows (arXiv 2604.12989).

    Args:
        shape: of every tree.
    """

    def __init__(self, shape: TreeShape):
        self.shape = shape

    def propose(
        self, anchors: torch.Tensor, positions: torch.Tensor, drafted: Candidates
    ) -> Proposal:
        """Grow the tree of every request.

        Args:
            anchors: ``[bs]`` int64, the last committed token of each request.
            positions: ``[bs, ..]`` int64, the first being the anchors'.
            drafted: the marginals of ``bs * (B-1)`` drafted positions, request by request, as K
                candidates each.

        Returns:
            A :class:`Proposal` with N = ``shape.rows`` rows, the spine first.
        """
        block = (anchors.shape[0], -1, drafted.ids.shape[1])
        tree = grow_tree(
            drafted.ids.view(block),
            drafted.log_q.view(block),
            anchors,
            positions[:, 0],
            rows=self.shape.rows,
            keep_spine=self.shape.keep_spine,
            spine_discount=self.shape.spine_discount,
        )
        return Proposal(
            tokens=tree.tokens,
            parents=tree.parents,
            depths=tree.depths,
            ancestors=tree.ancestors,
            positions=tree.positions,
            links=Links(tree.first_child, tree.next_sibling),
        )
