"""Which blocks are drafted in training, what they see and what they must say.

A block of size ``bs`` at anchor ``a`` holds ``[token a, MASK, .., MASK]`` at positions
``a .. a+bs-1``; row ``k`` is labelled with the token at ``a + k`` (arXiv 2602.06036, section 4).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Blocks of a batch of sequences; ``N`` per sequence, short sequences padded."""

    anchors: torch.Tensor
    """``[B, N]`` int64."""
    tokens: torch.Tensor
    """``[B, N, bs]`` int64: the anchor, then MASK."""
    labels: torch.Tensor
    """``[B, N, bs-1]`` int64: tokens at ``anchor + 1 ..``; 0 where there is none."""
    labelled: torch.Tensor
    """``[B, N, bs-1]`` bool: the label exists, and every one before it does."""


def valid_anchors(in_response: torch.Tensor) -> torch.Tensor:
    """``[S]`` bool: the position and the next are both of a response.

    Args:
        in_response: ``[S]`` bool.
    """
    valid = torch.zeros_like(in_response)
    valid[:-1] = in_response[:-1] & in_response[1:]
    return valid


def sample_anchors(
    in_response: torch.Tensor, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Anchors of one sequence, drawn without replacement, in order.

    Args:
        in_response: ``[S]`` bool.
        count: how many; fewer where the response is short.
        generator: the source of randomness.

    Returns:
        ``[<= count]`` int64.
    """
    (candidates,) = valid_anchors(in_response).nonzero(as_tuple=True)
    chosen = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[chosen].sort().values


def build(
    tokens: torch.Tensor,
    in_response: torch.Tensor,
    anchors: torch.Tensor,
    kept: torch.Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Blocks at the given anchors.

    Args:
        tokens: ``[B, S]`` int64.
        in_response: ``[B, S]`` bool.
        anchors: ``[B, N]`` int64.
        kept: ``[B, N]`` bool; padding blocks are off.
        block_size: rows of a block, anchor included.
        mask_token_id: the drafter's MASK.
    """
    length = tokens.shape[1]
    positions = anchors.unsqueeze(-1) + torch.arange(1, block_size, device=anchors.device)
    inside = positions < length
    flat = positions.clamp(max=length - 1).flatten(1)
    labels = tokens.gather(1, flat).view_as(positions)
    labelled = in_response.gather(1, flat).view_as(positions) & inside & kept.unsqueeze(-1)
    # A label behind a gap in the response is no continuation of the anchor.
    labelled = labelled.long().cumprod(-1).bool()
    block = tokens.new_full((*anchors.shape, block_size), mask_token_id)
    block[..., 0] = tokens.gather(1, anchors)
    return Blocks(anchors, block, labels.masked_fill(~labelled, 0), labelled)


def before_labels(anchors: torch.Tensor, block_size: int, length: int) -> torch.Tensor:
    """Positions whose output predicts the labels of a block: ``anchor .. anchor + bs - 2``.

    Args:
        anchors: ``[B, N]`` int64.
        block_size: ``bs``.
        length: ``S``; positions behind the text stay inside it, where nothing is labelled.

    Returns:
        ``[B, N, bs-1]`` int64.
    """
    positions = anchors.unsqueeze(-1) + torch.arange(block_size - 1, device=anchors.device)
    return positions.clamp(max=length - 1)


def context_visible(
    anchors: torch.Tensor, length: int, block_size: int, window: int | None = None
) -> torch.Tensor:
    """Context positions each block row sees.

    Strictly before the anchor: the anchor's own feature is the target's output *after* reading it,
    which serving does not have yet.

    Args:
        anchors: ``[B, N]``.
        length: ``S``.
        block_size: ``bs``.
        window: sliding window in tokens, the row itself included; None sees everything.

    Returns:
        ``[B, N, 1 or bs, S]`` bool.
    """
    positions = torch.arange(length, device=anchors.device)
    before = positions < anchors[..., None, None]
    if window is None:
        return before
    rows = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    return before & (positions > rows.unsqueeze(-1) - window)


def block_visible(
    block_size: int, *, causal: bool, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """``[bs, bs]`` bool: rows of its own block that a row sees."""
    seen = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    return seen.tril() if causal else seen
