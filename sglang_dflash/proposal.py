"""What the drafter proposes: the rows one verify pass of the target will check.

Chain and tree share one structure. Row 0 is the anchor (the root); a parent always
precedes its children. A chain is the proposal whose rows form a single path; it is
verified causally, without a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_dflash.kernels.accept import ChainLinks, chain_links


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
    is_chain: bool
    """True when every row is the only child of the row before it."""

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

    def propose(self, anchors: torch.Tensor, drafted: torch.Tensor) -> Proposal:
        """Build the chain ``anchor, d_1 .. d_{B-1}`` of every request.

        Args:
            anchors: ``[bs]`` int64, the last committed token of each request.
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
            is_chain=True,
        )
