"""Extend the drafter's context: K/V of committed tokens, every layer in one launch.

For a committed token t with context feature ``c_t``, layer l of the drafter holds (K/V injection,
arXiv 2602.06036; the feature enters without the layer's input norm)::

    k = rope(rms_norm(W_k c_t) * w_l, position_t)        per K/V head, over head_dim
    v = W_v c_t
    k_cache[l][slot_t], v_cache[l][slot_t] = k, v

The projections come in as one tensor ``kv [T, L, 2, H, D]``. Rows are grouped by request: of
every ``rows_per_request`` rows the first ``commit_lengths[b]`` are committed; the rest belong to
rejected drafts, are never computed and leave no trace in the cache.

Arithmetic is float32. The weighted norm is rounded to the dtype of ``kv`` before rope, and the
result again after it, as SGLang does for the keys of the drafter's own block, so that both kinds
of key agree.

RoPE tables ``cos_sin [positions, R]`` hold cos in the first R/2 columns and sin in the rest.
Neox style rotates (i, i + R/2); the interleaved style (2i, 2i + 1); dimensions past R pass.
"""

from __future__ import annotations

import torch
from sglang_dflash.kernels._launch import jit, next_power_of_two, tl
from sglang_dflash.kernels.layer_caches import LayerCaches

TILE = 1024
"""Elements of K (and of V) that one program handles: a few heads of one token and layer."""


class ContextCache:
    """The drafter's K/V caches and what their keys are made with, resolved once.

    Args:
        k_cache: L tensors ``[slots, H, D]``, rows contiguous, any float dtype.
        v_cache: L tensors of the same layout.
        k_norm_weight: ``[L, D]``, what the normed key is multiplied with (a Gemma norm passes
            ``1 + weight``), float.
        eps: of the norm.
        cos_sin_cache: ``[positions, R]`` float, R even and at most D. It must reach every
            position, which the kernel does not check.
        is_neox: the rotation's style.

    Raises:
        ValueError: the shapes or layouts do not fit together.
    """

    def __init__(
        self,
        k_cache: list[torch.Tensor],
        v_cache: list[torch.Tensor],
        k_norm_weight: torch.Tensor,
        eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ):
        if len(k_cache) != len(v_cache):
            raise ValueError(f"{len(k_cache)} K caches but {len(v_cache)} V caches")
        self.caches = LayerCaches([*k_cache, *v_cache])
        """K of every layer, then V of every layer."""
        if self.caches.first.dim() != 3:
            raise ValueError(
                f"a cache must be [slots, heads, head_dim], not {tuple(self.caches.first.shape)}"
            )
        self.layers = len(k_cache)
        self.heads, self.head_dim = self.caches.first.shape[1:]
        if k_norm_weight.shape != (self.layers, self.head_dim):
            raise ValueError(
                f"k_norm_weight is {tuple(k_norm_weight.shape)}, but the caches have "
                f"(layers, head_dim) = {(self.layers, self.head_dim)}"
            )
        self.rotary_dim = cos_sin_cache.shape[1]
        if self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"cos_sin_cache has {self.rotary_dim} columns; they must be even and at most "
                f"head_dim {self.head_dim}"
            )
        self.k_norm_weight = k_norm_weight.contiguous()
        self.eps = eps
        self.cos_sin_cache = cos_sin_cache.contiguous()
        self.is_neox = is_neox

    @property
    def k_cache(self) -> list[torch.Tensor]:
        """K of every layer."""
        return self.caches.tensors[: self.layers]

    @property
    def v_cache(self) -> list[torch.Tensor]:
        """V of every layer."""
        return self.caches.tensors[self.layers :]


def valid_rows(commit_lengths: torch.Tensor, rows_per_request: int) -> torch.Tensor:
    """Indices of the committed rows among ``bs * rows_per_request``, ascending, int64.

    Its shape depends on the data: for the host only, never for a captured region.
    """
    row = torch.arange(rows_per_request, device=commit_lengths.device)
    return (row < commit_lengths.unsqueeze(1)).flatten().nonzero().flatten()


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor, *, is_neox: bool) -> torch.Tensor:
    """Rotate the first R dimensions of ``x [T, .., D]`` by ``cos_sin [T, R]``; float32 out."""
    rotary = cos_sin.shape[-1]
    half = rotary // 2
    table = cos_sin.float().view(len(x), *([1] * (x.dim() - 2)), rotary)
    cos, sin = table[..., :half], table[..., half:]
    turned, rest = x[..., :rotary].float(), x[..., rotary:].float()
    pairs = (half, 2) if not is_neox else (2, half)
    first, second = turned.unflatten(-1, pairs).unbind(-1 if not is_neox else -2)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(rotated, -1) if is_neox else torch.stack(rotated, -1).flatten(-2)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def append_context_reference(
    kv: torch.Tensor,
    cache: ContextCache,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    commit_lengths: torch.Tensor | None,
    rows_per_request: int,
) -> None:
    """The formula above in torch; computes committed rows only."""
    if commit_lengths is not None:
        keep = valid_rows(commit_lengths, rows_per_request)
        kv, positions, slots = kv[keep], positions[keep], slots[keep]
    if not len(kv):
        return
    keys = kv[:, :, 0].float()
    keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + cache.eps)
    keys = (keys * cache.k_norm_weight.unsqueeze(1)).to(kv.dtype)
    keys = apply_rope(keys, cache.cos_sin_cache[positions], is_neox=cache.is_neox).to(kv.dtype)
    slots = slots.long()
    for layer, (k_cache, v_cache) in enumerate(zip(cache.k_cache, cache.v_cache, strict=True)):
        k_cache[slots] = keys[:, layer].to(k_cache.dtype)
        v_cache[slots] = kv[:, layer, 1].to(v_cache.dtype)


@jit
def _append_context_kernel(
    kv,
    pointers,
    cache_like,
    k_norm_weight,
    cos_sin,
    positions,
    slots,
    commit_lengths,
    eps,
    slot_stride,
    rows_per_request,
    L: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    if commit_lengths is not None:
        committed = tl.load(commit_lengths + token // rows_per_request)
        if token % rows_per_request >= committed:
            return

    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    live = (head < H) & (dim < D)
    row = head * D + dim
    keys = kv + (token * L + layer) * (2 * H * D)
    raw = tl.load(keys + row, mask=live, other=0.0)
    value = tl.load(keys + H * D + row, mask=live, other=0.0)

    # Each rotated dimension reads its partner from memory (a cache hit) rather than from another
    # thread; what the norm needs of it is the same scale and its own weight.
    half: tl.constexpr = R // 2
    if NEOX:
        is_first = dim < half
        partner = tl.where(is_first, dim + half, dim - half)
        angle = tl.where(is_first, dim, dim - half)
    else:
        is_first = dim % 2 == 0
        partner = tl.where(is_first, dim + 1, dim - 1)
        angle = dim // 2
    rotated = dim < R
    other = tl.load(keys + head * D + partner, mask=live & rotated, other=0.0)

    key = raw.to(tl.float32)
    scale = tl.rsqrt(tl.sum(key * key, axis=1) / D + eps)[:, None]
    weights = k_norm_weight + layer * D
    weight = tl.load(weights + dim, mask=dim < D, other=0.0).to(tl.float32)
    other_weight = tl.load(weights + partner, mask=rotated, other=0.0).to(tl.float32)
    key = (key * scale * weight).to(raw.dtype).to(tl.float32)
    other = (other.to(tl.float32) * scale * other_weight).to(raw.dtype).to(tl.float32)

    table = cos_sin + tl.load(positions + token) * R
    cos = tl.load(table + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(table + half + angle, mask=rotated, other=0.0).to(tl.float32)
    key = (key * cos + tl.where(is_first, -other, other) * sin).to(raw.dtype)

    element = cache_like.dtype.element_ty
    target = tl.load(slots + token).to(tl.int64) * slot_stride + row
    # LayerCaches checked the alignment, which an address loaded from memory does not show.
    k_cache = tl.multiple_of(tl.load(pointers + layer).to(tl.pointer_type(element)), 16)
    v_cache = tl.multiple_of(tl.load(pointers + L + layer).to(tl.pointer_type(element)), 16)
    tl.store(k_cache + target, key.to(element), mask=live)
    tl.store(v_cache + target, value.to(element), mask=live)


def launch_append_context(
    kv: torch.Tensor,
    cache: ContextCache,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    commit_lengths: torch.Tensor | None,
    rows_per_request: int,
) -> None:
    """The formula above in Triton: a program per token, layer and few heads; one launch."""
    if not len(kv):
        return
    dim = next_power_of_two(cache.head_dim)
    heads = min(next_power_of_two(cache.heads), max(TILE // dim, 1))
    grid = (len(kv), cache.layers, -(-cache.heads // heads))
    _append_context_kernel[grid](
        kv,
        cache.caches.pointers,
        cache.caches.first,
        cache.k_norm_weight,
        cache.cos_sin_cache,
        positions,
        slots,
        commit_lengths,
        cache.eps,
        cache.caches.first.stride(0),
        rows_per_request,
        L=cache.layers,
        H=cache.heads,
        D=cache.head_dim,
        R=cache.rotary_dim,
        NEOX=cache.is_neox,
        HEADS=heads,
        DIM=dim,
        num_warps=4,
    )


def append_context(
    kv: torch.Tensor,
    cache: ContextCache,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    commit_lengths: torch.Tensor | None = None,
    rows_per_request: int = 1,
) -> None:
    """Write the context K/V of committed rows into every layer's cache.

    Args:
        kv: ``[T, L, 2, H, D]`` contiguous projections, key then value, any float dtype.
        cache: the drafter's caches and constants.
        positions: ``[T]`` int64.
        slots: ``[T]`` int32 or int64, distinct among committed rows.
        commit_lengths: ``[bs]`` int32 or int64 committed rows per request; None commits all.
        rows_per_request: rows of each request; ``T == bs * rows_per_request``.

    Raises:
        ValueError: ``kv`` does not fit the cache, or ``commit_lengths`` not ``kv``.
    """
    wanted = (cache.layers, 2, cache.heads, cache.head_dim)
    if kv.shape[1:] != wanted or not kv.is_contiguous():
        raise ValueError(
            f"kv is {tuple(kv.shape)} with strides {kv.stride()}; the cache takes a contiguous "
            f"[T, layers, 2, heads, head_dim] = [T, {', '.join(map(str, wanted))}]"
        )
    if commit_lengths is not None and len(commit_lengths) * rows_per_request != len(kv):
        raise ValueError(
            f"kv has {len(kv)} rows, not {len(commit_lengths)} requests of {rows_per_request} rows"
        )
    run = launch_append_context if kv.is_cuda else append_context_reference
    run(
        kv,
        cache,
        positions=positions,
        slots=slots,
        commit_lengths=commit_lengths,
        rows_per_request=rows_per_request,
    )
