"""Draw from top-k, top-p and min-p filtered rows without sorting the vocabulary.

SGLang's torch sampler (``top_k_top_p_min_p_sampling_from_probs_torch``) sorts all V probabilities
of every row, which on a CPU costs more than a small target's forward. Here only the tokens that a
filter can keep are sorted, and the outcome is the same:

* top-k keeps ranks below k. With the k-th largest of the maxima of groups of tokens as threshold,
  at least k tokens reach it, the k likeliest among them.
* top-p keeps a rank while the tokens before it hold at most top-p. Where the tokens that reach a
  threshold hold more than that, every token below it is dropped.
* min-p drops every token below min-p times the largest probability.

So a threshold bounds the tokens of each row to sort, and afterwards it is checked, on the tokens
it let through, that it dropped none of the kept ones; rows that fail get a lower threshold, and
in the end the whole sort. Sorted probabilities, their running sum and the filters' comparisons
are then SGLang's number for number.

With seeds the noise is keyed on the rank, as SGLang's is, so the rank drawn is SGLang's. Which
token has that rank is certain unless another has the very same probability; the order of equals is
what SGLang's sort makes it, so then, and only then, that row is sorted whole. Without seeds the
ranks are drawn from fresh random seeds: a token's chance is its share of what is kept. Of equally
likely tokens that a filter cuts apart, SGLang keeps those its sort happens to put first; here
those with lower ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.kernels.sample import (
    GROUP,
    entries_at_least,
    gumbel,
    hashes,
    random_seeds,
    sample,
    sample_probs,
)

_MARGIN = 2.0**-22
"""More than float32 loses in a running sum of probabilities and in one difference of it."""


class Filters(NamedTuple):
    """What SGLang's sampling parameters say of R rows."""

    top_ks: torch.Tensor
    """``[R]`` int32 or int64; V or more keeps all."""
    top_ps: torch.Tensor
    """``[R]`` float32; 1 keeps all."""
    min_ps: torch.Tensor
    """``[R]`` float32; 0 keeps all."""


def sample_rows(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    filters: Filters | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw a token for every row as SGLang's sampler with its ``pytorch`` backend does.

    Args:
        logits: ``[R, V]``, contiguous; left as they are.
        temperatures: ``[R]`` or ``[R, 1]`` float32.
        filters: of the batch, where any of its requests filters (SGLang's
            ``need_top_k_sampling``, ``need_top_p_sampling`` or ``need_min_p_sampling``), else
            ``None``. With seeds this is part of the result: SGLang keys the noise on the
            vocabulary id in a batch without filters, else on the rank.
        seeds: ``[R]`` int64, or ``None``: drawn from torch's generator.
        positions: ``[R]`` integers.

    Returns:
        ``[R]`` int64 token ids. With seeds, SGLang's.
    """
    temperatures = temperatures.view(-1)
    if filters is None:
        if seeds is None:
            seeds = random_seeds(len(logits), logits.device)
        return sample(logits, temperatures, seeds, positions)
    probs = torch.softmax(logits.float() / temperatures.unsqueeze(1), dim=-1)
    return sample_filtered(probs, filters, seeds, positions)


def sample_filtered(
    probs: torch.Tensor,
    filters: Filters,
    seeds: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw from rows of filtered probabilities.

    Args:
        probs: ``[R, V]`` float32, contiguous; left as they are.
        filters: their limits.
        seeds: ``[R]`` int64, or ``None``: drawn from torch's generator.
        positions: ``[R]`` integers.

    Returns:
        ``[R]`` int64 token ids.

    Raises:
        ValueError: a row has both a seed and min-p, which SGLang's sampler cannot serve.
    """
    count, columns = probs.shape
    tokens = torch.empty(count, dtype=torch.int64, device=probs.device)
    seeded = seeds is not None
    if seeds is None:
        seeds = random_seeds(count, probs.device)
    elif bool((filters.min_ps > 0).any()):
        raise ValueError(
            f"min_p={float(filters.min_ps.max()):g} with a sampling seed: SGLang's sampler cannot "
            "combine them. Leave out min_p or the seed."
        )
    draw = _Draw(probs, filters, seeds, positions, seeded, tokens)

    rows = torch.arange(count, device=probs.device)
    if not seeded:
        # Any noise will do, so a row that keeps every token need not be sorted.
        free = (filters.top_ks >= columns) & (filters.top_ps >= 1) & (filters.min_ps <= 0)
        if bool(free.any()):
            some = rows[free]
            tokens[some] = sample_probs(probs[some], seeds[some], positions[some], out=tokens[some])
            rows = rows[~free]
    padded = F.pad(probs, (0, -columns % GROUP))
    largest = padded.unflatten(1, (-1, GROUP)).amax(2)
    # Most nuclei end far above the lowest probability they could end at.
    for share in (1 / 256, 1 / columns):
        if not len(rows):
            break
        rows = draw.from_candidates(padded, largest, rows, share)
    for row in rows.tolist():
        draw.from_all(row)
    return tokens


class _Draw(NamedTuple):
    """One call's arguments, and the tokens it fills in."""

    probs: torch.Tensor
    filters: Filters
    seeds: torch.Tensor
    positions: torch.Tensor
    seeded: bool
    tokens: torch.Tensor

    def from_candidates(
        self, padded: torch.Tensor, largest: torch.Tensor, rows: torch.Tensor, share: float
    ) -> torch.Tensor:
        """Draw for those of ``rows`` whose kept tokens reach a threshold; return the others.

        Args:
            padded: ``[R, G * GROUP]`` the probabilities, zeros at the end.
            largest: ``[R, G]`` their groups' maxima.
            rows: int64.
            share: of the mass outside a nucleus, the threshold on its tokens.
        """
        top_k, top_p, min_p = (limit[rows] for limit in self.filters)
        whole = len(rows) == len(padded)
        largest = largest if whole else largest[rows]
        threshold = (1 - top_p) * share
        best = largest.amax(1)
        threshold = torch.maximum(threshold, best * min_p)
        limited = top_k <= largest.shape[1]
        if bool(limited.any()):
            ranks = top_k.masked_fill(~limited, 1).long()
            kth = largest.topk(int(ranks.max()), dim=1).values
            kth = kth.gather(1, ranks.unsqueeze(1) - 1).squeeze(1)
            threshold = torch.where(limited, torch.maximum(threshold, kth), threshold)
        # Zeros are never candidates, and a row that keeps all has no use for a threshold.
        threshold = threshold.masked_fill(threshold <= 0, 2)

        row, ids = entries_at_least(padded if whole else padded[rows], largest, threshold)
        values = self.probs[rows[row], ids]
        found = torch.bincount(row, minlength=len(rows))
        mass = torch.zeros(len(rows), dtype=torch.float64, device=row.device)
        mass.index_add_(0, row, values.double())
        covered = (
            (found >= top_k)
            | (mass > top_p.double() + _MARGIN)
            | ((min_p > 0) & (threshold <= best * min_p))
        ) & (found > 0)
        if not bool(covered.all()):
            kept = covered[row]
            number = covered.cumsum(0) - 1
            row, ids, values = number[row[kept]], ids[kept], values[kept]
            found = found[covered]
        if len(found):
            self._from_lists(rows[covered], row, ids, values, found)
        return rows[~covered]

    def _from_lists(
        self,
        rows: torch.Tensor,
        row: torch.Tensor,
        ids: torch.Tensor,
        values: torch.Tensor,
        found: torch.Tensor,
    ) -> None:
        """Draw for ``rows``, each out of its list of tokens.

        Args:
            rows: ``[r]`` rows of the batch.
            row: ``[n]`` which of ``rows`` an entry belongs to, ascending.
            ids: ``[n]`` its token.
            values: ``[n]`` its probability.
            found: ``[r]`` entries of each.
        """
        place = torch.arange(len(row), device=row.device) - (found.cumsum(0) - found)[row]
        width = int(found.max())
        lists = values.new_zeros(len(rows), width)
        lists[row, place] = values
        tokens = ids.new_zeros(len(rows), width)
        tokens[row, place] = ids

        ordered, order = lists.sort(dim=1, descending=True, stable=True)
        filters = Filters(*(limit[rows] for limit in self.filters))
        rank = _drawn_rank(ordered.clone(), filters, self.seeds[rows], self.positions[rows])
        self.tokens[rows] = tokens.gather(1, order.gather(1, rank)).squeeze(1)
        if self.seeded:
            equals = (ordered == ordered.gather(1, rank)).sum(1) > 1
            if bool(equals.any()):
                for index in equals.nonzero().squeeze(1).tolist():
                    whole = self.probs[rows[index]].sort(descending=True)
                    self.tokens[rows[index]] = whole.indices[rank[index, 0]]

    def from_all(self, row: int) -> None:
        """Draw for a row out of all its tokens."""
        one = slice(row, row + 1)
        ordered, order = self.probs[one].sort(dim=1, descending=True)
        filters = Filters(*(limit[one] for limit in self.filters))
        rank = _drawn_rank(ordered, filters, self.seeds[one], self.positions[one])
        self.tokens[one] = order.gather(1, rank).squeeze(1)


def _drawn_rank(
    ordered: torch.Tensor, filters: Filters, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Filter falling probabilities ``[r, M]``, in place, and draw one rank ``[r, 1]`` of each."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    total = ordered.cumsum(1)
    ordered.masked_fill_(ranks >= filters.top_ks.unsqueeze(1), 0)
    ordered.masked_fill_((total - ordered) > filters.top_ps.unsqueeze(1), 0)
    ordered.masked_fill_(ordered < (ordered[:, 0] * filters.min_ps).unsqueeze(1), 0)
    noise = gumbel(hashes(seeds, positions, ranks))
    return noise.add_(ordered.double().log_()).argmax(1, keepdim=True)
