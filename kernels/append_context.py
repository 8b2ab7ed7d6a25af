"""Extend the drafter's context: K/V of committed tokens, every layer in one launch.

For a committed token t with context feature ``c_t``, layer l holds (arXiv 2602.06036, K/V
injection; the feature is not layer-normed)::

    k = rope(rms_norm(W_k c_t) * w_l, position_t)        per K/V head, over head_dim
    v = W_v c_t
    k_cache[l][slot_t], v_cache[l][slot_t] = k, v

The projections come in as one tensor ``kv [T, L, 2, H, D]``. Rows are grouped by request: of
every ``rows_per_request`` rows the first ``commit_lengths[b]`` are committed, the rest belong to
rejected drafts and must not be written. rms_norm and rope are computed in float32; the norm is
rounded to the input dtype before its weight is applied and before rope, as the drafter does for
its own block, so that both kinds of key agree.

RoPE tables ``cos_sin [positions, R]`` hold cos in the first R/2 columns and sin in the rest.
Neox style rotates (i, i + R/2); the interleaved style (2i, 2i + 1); dimensions past R pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_dflash.kernels._device import jit, next_power_of_two, runs_kernel, tl


@dataclass
class ContextCache:
    """The drafter's caches and constants, resolved once.

    Attributes:
        k_cache: L tensors ``[slots, H, D]``, any float dtype.
        v_cache: L tensors of the same shape.
        k_norm_weight: ``[L, D]``.
        eps: of the norm.
        cos_sin_cache: ``[positions, R]``, R <= D even.
        is_neox: rotation style.

    Raises:
        ValueError: caches or weights of different shapes.
    """

    k_cache: list[torch.Tensor]
    v_cache: list[torch.Tensor]
    k_norm_weight: torch.Tensor
    eps: float
    cos_sin_cache: torch.Tensor
    is_neox: bool = True
    k_pointers: torch.Tensor = field(init=False)
    """``[L]`` int64 addresses of ``k_cache``, on its device."""
    v_pointers: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        caches = [*self.k_cache, *self.v_cache]
        first = caches[0]
        if any(c.shape != first.shape or c.dtype != first.dtype for c in caches):
            raise ValueError("every layer's K and V cache must have one shape and dtype")
        if any(c.stride() != first.stride() or c.stride(-1) != 1 for c in caches):
            raise ValueError("every layer's K and V cache must have one layout, head_dim inmost")
        layers, head_dim = len(self.k_cache), first.shape[-1]
        if self.k_norm_weight.shape != (layers, head_dim):
            raise ValueError(
                f"k_norm_weight is {tuple(self.k_norm_weight.shape)}, not {(layers, head_dim)}"
            )
        if self.cos_sin_cache.shape[1] > head_dim:
            raise ValueError(
                f"rotary dimension {self.cos_sin_cache.shape[1]} exceeds head_dim {head_dim}"
            )

        def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
            pointers = [tensor.data_ptr() for tensor in tensors]
            return torch.tensor(pointers, dtype=torch.int64, device=first.device)

        self.k_pointers = addresses(self.k_cache)
        self.v_pointers = addresses(self.v_cache)


def valid_rows(commit_lengths: torch.Tensor, rows_per_request: int) -> torch.Tensor:
    """Indices of committed rows among ``bs * rows_per_request``, ascending.

    Its shape depends on the data: for the host only, never for a captured region.
    """
    row = torch.arange(rows_per_request, device=commit_lengths.device)
    return (row < commit_lengths.unsqueeze(1)).flatten().nonzero().flatten()


def apply_rope(
    x: torch.Tensor, cos_sin: torch.Tensor, *, is_neox: bool
) -> torch.Tensor:
    """Rotate the first R dimensions of ``x [T, .., D]`` by ``cos_sin [T, R]``, in float32."""
    rotary = cos_sin.shape[-1]
    half = rotary // 2
    shape = (cos_sin.shape[0], *([1] * (x.dim() - 2)), half)
    cos = cos_sin[:, :half].float().view(shape)
    sin = cos_sin[:, half:].float().view(shape)
    rotated, rest = x[..., :rotary].float(), x[..., rotary:].float()
    first = rotated[..., :half] if is_neox else rotated[..., 0::2]
    second = rotated[..., half:] if is_neox else rotated[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat((rotated, rest), -1)


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
    if kv.shape[0] == 0:
        return
    keys = kv[:, :, 0].float()
    keys = keys * torch.rsqrt(keys.square().mean(dim=-1, keepdim=True) + cache.eps)
    weight = cache.k_norm_weight.unsqueeze(1)
    keys = keys.to(kv.dtype) * weight
    keys = apply_rope(keys, cache.cos_sin_cache[positions], is_neox=cache.is_neox).to(kv.dtype)
    slots = slots.long()
    for layer, (k_cache, v_cache) in enumerate(zip(cache.k_cache, cache.v_cache, strict=True)):
        k_cache[slots] = keys[:, layer].to(k_cache.dtype)
        v_cache[slots] = kv[:, layer, 1].to(v_cache.dtype)


@jit
def _append_context_kernel(
    kv,
    k_pointers,
    v_pointers,
    cache_like,
    k_norm_weight,
    cos_sin,
    positions,
    slots,
    commit_lengths,
    eps,
    slot_stride,
    head_stride,
    rows_per_request,
    L: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NEOX: tl.constexpr,
    PREFIX: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    committed = True
    if PREFIX:
        request = token // rows_per_request
        committed = token % rows_per_request < tl.load(commit_lengths + request)
    if committed:
        head = tl.arange(0, HEADS)[:, None]
        dim = tl.arange(0, DIM)[None, :]
        live = (head < H) & (dim < D)
        base = kv + (token * L + layer) * 2 * H * D
        offset = head * D + dim
        raw = tl.load(base + offset, mask=live, other=0.0)
        value = tl.load(base + H * D + offset, mask=live, other=0.0)

        # The partner of each rotated dimension is loaded again rather than shuffled.
        half: tl.constexpr = R // 2
        if NEOX:
            first = dim < half
            partner = tl.where(first, dim + half, dim - half)
            angle = tl.where(first, dim, dim - half)
        else:
            first = dim % 2 == 0
            partner = tl.where(first, dim + 1, dim - 1)
            angle = dim // 2
        rotated = live & (dim < R)
        other = tl.load(base + head * D + partner, mask=rotated, other=0.0)

        key = raw.to(tl.float32)
        scale = tl.rsqrt(tl.sum(key * key, axis=1) / D + eps)[:, None]
        weight = tl.load(k_norm_weight + layer * D + dim, mask=dim < D, other=0.0)
        other_weight = tl.load(k_norm_weight + layer * D + partner, mask=dim < R, other=0.0)
        key = ((key * scale).to(raw.dtype) * weight).to(raw.dtype).to(tl.float32)
        other = ((other.to(tl.float32) * scale).to(raw.dtype) * other_weight).to(raw.dtype)
        other = other.to(tl.float32)

        position = tl.load(positions + token)
        table = cos_sin + position * R
        cos = tl.load(table + angle, mask=dim < R, other=1.0).to(tl.float32)
        sin = tl.load(table + half + angle, mask=dim < R, other=0.0).to(tl.float32)
        key = key * cos + tl.where(first, -other, other) * sin

        slot = tl.load(slots + token).to(tl.int64)
        target = slot * slot_stride + head * head_stride + dim
        element = cache_like.dtype.element_ty
        k_cache = tl.load(k_pointers + layer).to(tl.pointer_type(element))
        v_cache = tl.load(v_pointers + layer).to(tl.pointer_type(element))
        tl.store(k_cache + target, key.to(raw.dtype).to(element), mask=live)
        tl.store(v_cache + target, value.to(element), mask=live)


def append_context(
    kv: torch.Tensor,
    cache: ContextCache,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    commit_lengths: torch.Tensor | None = None,
    rows_per_request: int = 1,
) -> None:
    """Write the context K/V of committed rows, all layers in one launch.

    Args:
        kv: ``[T, L, 2, H, D]`` contiguous projections, key then value.
        cache: the drafter's caches and constants.
        positions: ``[T]`` int64.
        slots: ``[T]`` int32 or int64, distinct among committed rows.
        commit_lengths: ``[bs]`` int32 committed rows per request; None commits all.
        rows_per_request: rows of each request, ``T == bs * rows_per_request``.
    """
    if not runs_kernel(kv):
        append_context_reference(
            kv,
            cache,
            positions=positions,
            slots=slots,
            commit_lengths=commit_lengths,
            rows_per_request=rows_per_request,
        )
        return
    count, layers, _, heads, head_dim = kv.shape
    if count == 0:
        return
    first = cache.k_cache[0]
    _append_context_kernel[(count, layers)](
        kv,
        cache.k_pointers,
        cache.v_pointers,
        first,
        cache.k_norm_weight,
        cache.cos_sin_cache,
        positions,
        slots,
        commit_lengths if commit_lengths is not None else slots,
        cache.eps,
        first.stride(0),
        first.stride(1),
        rows_per_request,
        L=layers,
        H=heads,
        D=head_dim,
        R=cache.cos_sin_cache.shape[1],
        NEOX=cache.is_neox,
        PREFIX=commit_lengths is not None,
        HEADS=next_power_of_two(heads),
        DIM=next_power_of_two(head_dim),
        num_warps=4,
    )
