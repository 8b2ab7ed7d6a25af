"""The target's LM head as the drafter borrows it: which tokens are likeliest after a hidden state.

With tensor parallelism a rank holds some rows of the head: a range of the vocabulary, and perhaps
some of the tokens that were added to it. Every rank finds the best of its own rows; the ranks
exchange K keys and one log-sum per hidden state, and merge the same numbers, so that all of them
find the same tokens (:mod:`sglang_dflash.kernels.merge_topk`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_dflash.kernels.merge_topk import Candidates, merge_topk
from sglang_dflash.kernels.topk import TopK, topk

Gather = Callable[[torch.Tensor], torch.Tensor]
"""``[T, ..]`` of this rank to ``[T, R, ..]`` of all R ranks, in the order of the ranks."""


class DraftHead:
    """Reads the likeliest tokens off hidden states.

    Args:
        module: SGLang's head of the target, or any module with a ``[V, H]`` weight.
        gather: exchanges between the ranks that share the head; None when this rank has all of it.
    """

    def __init__(self, module: Any, gather: Gather | None = None):
        self._module = module
        self._gather = gather

    def candidates(self, hidden: torch.Tensor, count: int) -> Candidates:
        """The ``count`` likeliest tokens after each hidden state, with exact log-probabilities.

        Args:
            hidden: ``[T, H]``.
            count: K.

        Returns:
            ``[T, K]`` ids and float32 log-probabilities over the whole vocabulary, equal on every
            rank.
        """
        logits = self._logits(hidden)
        parts = [topk(part, count, first_id=first) for first, part in self._ranges(logits)]
        best = _side_by_side(parts)
        if self._gather is None:
            return merge_topk(best, count)
        mine = merge_topk(best, count)
        return merge_topk(TopK(self._gather(mine.keys), self._gather(mine.lse)), count)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, rows of this rank]``, padding rows included."""
        method = getattr(self._module, "quant_method", None)
        if method is not None:
            return method.apply(self._module, hidden, None)
        weight = self._module.weight
        return hidden.to(weight.dtype) @ weight.T

    def _ranges(self, logits: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's columns that are tokens, with the id of the first of them."""
        shard = getattr(self._module, "shard_indices", None)
        if shard is None:
            size = getattr(self._module, "org_vocab_size", None)
            yield 0, logits[:, :size]
            return
        if shard.num_org_elements or not shard.num_added_elements:
            yield shard.org_vocab_start_index, logits[:, : shard.num_org_elements]
        if shard.num_added_elements:
            start = shard.num_org_elements_padded
            yield shard.added_vocab_start_index, logits[:, start : start + shard.num_added_elements]


def _side_by_side(parts: list[TopK]) -> TopK:
    if len(parts) == 1:
        return parts[0]
    return TopK(torch.cat([p.keys for p in parts], 1), torch.cat([p.lse for p in parts], 1))
