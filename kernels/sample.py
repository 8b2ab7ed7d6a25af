"""Draw one token for every row of logits, from its request's temperature, seed and position.

The draw is a Gumbel maximum with hashed noise, as SGLang's ``multinomial_with_seed`` defines it::

    p[v]  = softmax(logits / temperature)[v]                          float32
    h[v]  = murmur3(seed's low word, its high word, position, v)      32 bits
    e[v]  = -log(h[v] / (2^32 - 1)), at least 2^-32                   float64
    token = argmax_v log p[v] - log e[v], the lowest of equals        float64

Without a seed the same formula draws from fresh random seeds, one int64 a row out of a torch
generator (:func:`random_seeds`): a token's chance is then its probability but for the 2^-32 grain
of h. A row without any logit above -inf gives token 0.

The reference is SGLang's formula bit for bit, roundings included. It looks closely at few tokens
only: ``e >= d = (2^32 - 1 - h) / 2^32``, and what the token of the largest p / d scores, the
winner scores at least; so its p / d is at least the exponential of that.

The kernel reads the logits once. It leaves the softmax out, ``token = argmax_v logits[v] /
temperature - log e[v]``, since the normaliser shifts all scores of a row alike. What differs are
float32's roundings of p and log p, which move the score of a token with ``log p > -80`` by less
than 3e-5 (:data:`ROUNDING`; typically 1e-6): the two agree wherever the best two scores of a row
lie further apart than twice that. As the best two scores of a Gumbel maximum lie closer than x
with a chance below x, that leaves about one token in a million.

Filters (top-k, top-p, min-p) are not here. SGLang keys the noise of a filtered, seeded draw on the
rank in the sorted distribution, so that one read cannot give it; without seeds, flashinfer's
samplers on CUDA do them in one kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang_dflash.kernels._launch import jit, tl

WIDTH = 4096
"""Logits the kernel holds at a time."""
GROUP = 64
"""Values whose maximum stands for them in the reference's first look."""
ROWS = 8
"""Rows the reference holds at a time."""
ROUNDING = 3e-5
"""How far float32's roundings move the score of a token, at most."""

_LAST = 2**32 - 1
_GRAIN = 2.0**-32


def random_seeds(rows: int, device: torch.device | str, generator: torch.Generator | None = None):
    """``[rows]`` int64 seeds for draws nobody seeded, from a torch generator of that device."""
    bounds = torch.iinfo(torch.int64)
    return torch.randint(bounds.min, bounds.max, (rows,), device=device, generator=generator)


def hashes(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Murmur3 of 16 bytes, for every row and column.

    Args:
        seeds: ``[R]`` int64 or uint64.
        positions: ``[R]`` integers; their low 32 bits count.
        columns: ``[C]`` integers below 2^31.

    Returns:
        ``[R, C]`` int32 whose bits are the unsigned hash.
    """
    seeds = seeds.to(torch.int64)
    rows = torch.zeros_like(seeds, dtype=torch.int32)
    for word in (seeds, seeds >> 32, positions.to(torch.int64)):
        rows = _mixed(rows, _scrambled(_low_word(word)))
    h = _mixed(rows.unsqueeze(1), _scrambled(columns.to(torch.int32)).unsqueeze(0))
    h.bitwise_xor_(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h.bitwise_xor_(_shifted(h, shift)).mul_(_signed(factor))
    return h.bitwise_xor_(_shifted(h, 16))


def gumbel(hashed: torch.Tensor) -> torch.Tensor:
    """``-log e`` of :func:`hashes`' bits: float64, of the same shape."""
    uniform = (hashed.to(torch.int64) & _LAST).double() / _LAST
    # Both ends of h are kept finite: the noise of 0, and that of 2^32 - 1, which gets its
    # neighbour's.
    exponential = uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-_GRAIN).neg_()
    return exponential.log_().neg_()


def entries_at_least(
    values: torch.Tensor, largest: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a row's values reach its threshold, without reading all of them.

    Args:
        values: ``[R, G * GROUP]``, contiguous.
        largest: ``[R, G]`` the maxima of neighbouring groups of :data:`GROUP` values.
        threshold: ``[R]`` of the same dtype.

    Returns:
        Rows and columns of the entries, int64, in row-major order.
    """
    groups = (largest >= threshold.unsqueeze(1)).flatten().nonzero().squeeze(1)
    row = groups // largest.shape[1]
    kept = values.view(-1, GROUP)[groups] >= threshold[row].unsqueeze(1)
    entry, lane = kept.nonzero(as_tuple=True)
    group = groups[entry]
    return row[entry], group % largest.shape[1] * GROUP + lane


def _low_word(value: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64, as int32."""
    word = value & _LAST
    return torch.where(word > 0x7FFFFFFF, word - (1 << 32), word).to(torch.int32)


def _signed(constant: int) -> int:
    """A 32-bit constant as int32 multiplies by it: products wrap alike."""
    return constant - (1 << 32) if constant > 0x7FFFFFFF else constant


def _shifted(value: torch.Tensor, count: int) -> torch.Tensor:
    """int32 shifted right with zeros coming in."""
    return (value >> count).bitwise_and_((1 << (32 - count)) - 1)


def _rotated(value: torch.Tensor, count: int) -> torch.Tensor:
    return (value << count).bitwise_or_(_shifted(value, 32 - count))


def _scrambled(word: torch.Tensor) -> torch.Tensor:
    """What a word of the input is before it meets the hash."""
    return _rotated(word * _signed(0xCC9E2D51), 15).mul_(0x1B873593)


def _mixed(h: torch.Tensor, scrambled: torch.Tensor) -> torch.Tensor:
    return _rotated(h ^ scrambled, 13).mul_(5).add_(_signed(0xE6546B64))


def sample_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """The formula above in torch, a few rows at a time: they stay in the processor's cache."""
    for first in range(0, len(logits), ROWS):
        rows = slice(first, first + ROWS)
        scaled = logits[rows].float() / temperatures[rows].unsqueeze(1)
        probs = torch.softmax(scaled, dim=-1)
        sample_probs(probs, seeds[rows], positions[rows], out=out[rows])
    return out


def sample_probs(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """Draw from rows of probabilities: SGLang's ``sampling_from_probs_torch`` with seeds.

    Args:
        probs: ``[R, V]`` float32.
        seeds: ``[R]`` int64.
        positions: ``[R]`` integers.
        out: ``[R]`` int64, overwritten.
    """
    rows, columns = probs.shape
    probs = F.pad(probs, (0, -columns % GROUP))
    hashed = hashes(seeds, positions, torch.arange(probs.shape[1], device=probs.device))
    # In units of 2^-31, so that the difference fits a signed integer; odd ones lose their half.
    difference = _shifted(~hashed, 1).float().clamp_(min=0.5)
    ratio = probs / difference
    largest = ratio.unflatten(1, (-1, GROUP)).amax(2)

    group = largest.argmax(1, keepdim=True)
    lane = ratio.unflatten(1, (-1, GROUP))[torch.arange(rows, device=probs.device), group[:, 0]]
    first = group * GROUP + lane.argmax(1, keepdim=True)
    score = _scores(probs.gather(1, first), hashed.gather(1, first))[:, 0]
    # float32's own error in the ratio is below 2e-7.
    threshold = (score.exp() * 2.0**-31 * (1 - 1e-6)).float()

    row, column = entries_at_least(ratio, largest, threshold)
    score = _scores(probs[row, column], hashed[row, column])
    best = score.new_full((rows,), float("-inf")).scatter_reduce_(0, row, score, "amax")
    wins = score == best[row]
    out.fill_(columns)
    out.scatter_reduce_(0, row[wins], column[wins], "amin")
    # No entry at all where every logit is -inf, which makes every probability a NaN.
    return out.masked_fill_(out == columns, 0)


def _scores(probs: torch.Tensor, hashed: torch.Tensor) -> torch.Tensor:
    return probs.log().double() + gumbel(hashed)


@jit
def _sample_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    tokens,
    stride,
    columns,
    WIDTH: tl.constexpr,
):
    ALL_BITS: tl.constexpr = 0xFFFFFFFF
    GRAIN: tl.constexpr = 2.0**-32
    LARGEST: tl.constexpr = 1.7976931348623157e308
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint32)

    start_of_hash = seed.to(tl.uint32) & 0
    for word in tl.static_range(3):
        mixed = position if word == 2 else (seed >> (32 * word)).to(tl.uint32)
        mixed = mixed * 0xCC9E2D51
        mixed = ((mixed << 15) | (mixed >> 17)) * 0x1B873593
        mixed = start_of_hash ^ mixed
        start_of_hash = ((mixed << 13) | (mixed >> 19)) * 5 + 0xE6546B64

    best = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), 0, tl.int32)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < columns
        logit = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
        scaled = tl.div_rn(logit.to(tl.float32), temperature)

        mixed = column.to(tl.uint32) * 0xCC9E2D51
        mixed = ((mixed << 15) | (mixed >> 17)) * 0x1B873593
        hashed = start_of_hash ^ mixed
        hashed = ((hashed << 13) | (hashed >> 19)) * 5 + 0xE6546B64
        hashed = hashed ^ 16
        hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
        hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
        hashed = hashed ^ (hashed >> 16)

        # float64 is slow on most GPUs, and few blocks hold a new best score: a bound of the
        # block's scores, with room for float32's errors in it, says which.
        difference = tl.maximum((hashed ^ ALL_BITS).to(tl.float32), 1.0) * GRAIN
        bound = tl.max(scaled - tl.log(difference), axis=0)
        bound += 1e-3 + 1e-6 * tl.abs(bound)
        if bound.to(tl.float64) >= best:
            exponential = -tl.log(hashed.to(tl.float64) / 4294967295.0)
            exponential = tl.minimum(tl.maximum(exponential, GRAIN), LARGEST)
            score = scaled.to(tl.float64) - tl.log(exponential)
            local = tl.max(score, axis=0)
            first = tl.min(tl.where(score == local, column, 0x7FFFFFFF), axis=0)
            token = tl.where(local > best, first, token)
            best = tl.maximum(local, best)
    tl.store(tokens + row, token.to(tl.int64))


def launch_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """The formula above in Triton: a program per row, one launch."""
    rows, columns = logits.shape
    if rows:
        _sample_kernel[(rows,)](
            logits,
            temperatures,
            seeds,
            positions,
            out,
            logits.stride(0),
            columns,
            WIDTH=WIDTH,
            num_warps=8,
        )
    return out


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for every row.

    Args:
        logits: ``[R, V]`` float32, float16 or bfloat16, finite or -inf, rows contiguous; taken as
            float32, as SGLang's sampler gets them.
        temperatures: ``[R]`` float32, positive; contiguous.
        seeds: ``[R]`` int64, the request's or :func:`random_seeds`; contiguous.
        positions: ``[R]`` int32 or int64 positions of the rows' tokens; contiguous.
        out: ``[R]`` int64, contiguous, overwritten; with it nothing is allocated.

    Returns:
        ``[R]`` int64 token ids.
    """
    if out is None:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    run = launch_sample if logits.is_cuda else sample_reference
    return run(logits, temperatures, seeds, positions, out=out)
