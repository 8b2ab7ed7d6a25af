"""The small layers as few torch ops as they can be.

SGLang's portable implementations upcast, slice and concatenate in ten or more ops a call;
with 30 layers of a small model that is most of a decode step (measured: 28 against 17 us for a
residual norm, 35 against 10 us for rotary embedding, one row of hidden size 576). Registered
with SGLang's operator registry under this platform's dispatch key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F


def rms_norm(
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``RMSNorm.forward``: add the residual, scale by the root mean square.

    Args:
        norm: the SGLang layer.
        x: ``[..., H]``.
        residual: ``[..., H]`` added first, or None.
        post_residual_addition: ``[..., H]`` added as well, or None.
        quant_linear: the consumer whose input quantisation CUDA fuses; unused.

    Returns:
        The normed rows, with the sum as the new residual when one was given.
    """
    plain = norm.variance_size_override is None and norm.weight.dtype == x.dtype
    if not plain or norm.fp32_residual or norm.cast_x_before_out_mul:
        return norm.forward_native(x, residual, post_residual_addition)
    if residual is None:
        return F.rms_norm(x, (norm.hidden_size,), norm.weight, norm.variance_epsilon)
    residual = x + residual
    if post_residual_addition is not None:
        residual += post_residual_addition
    return F.rms_norm(residual, (norm.hidden_size,), norm.weight, norm.variance_epsilon), residual


def silu_and_mul(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """``SiluAndMul.forward``: ``silu(gate) * up`` of ``x = [gate | up]``, ``[..., 2I]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _Rotation(NamedTuple):
    """Angles of one forward's positions, shared by all its layers."""

    positions: torch.Tensor
    cos: torch.Tensor
    """``[rows, 1, 2, D/2]``."""
    sin: torch.Tensor
    """Likewise, negated for the first half."""

    @classmethod
    def at(cls, positions: torch.Tensor, cache: torch.Tensor, dtype: torch.dtype) -> _Rotation:
        """Look the angles up in ``cache [max positions, D]`` = ``[cos | sin]``."""
        rows = cache.index_select(0, positions).to(dtype).unflatten(1, (2, 1, -1))
        cos, sin = rows[:, 0], rows[:, 1]
        return cls(
            positions.clone(),
            torch.cat((cos, cos), dim=1).unsqueeze(1),
            torch.cat((-sin, sin), dim=1).unsqueeze(1),
        )

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate ``heads [rows, heads, 2, D/2]``."""
        return torch.addcmul(heads * self.cos, heads.flip(2), self.sin)


def rotary_embedding(
    rope: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.forward`` for halves that rotate together (NeoX style).

    Args:
        rope: the SGLang layer; other styles and partial rotation use its own implementation.
        positions: ``[rows]`` int64.
        query: ``[rows, Hq * D]``.
        key: ``[rows, Hk * D]``. Where it lies right behind the query, as in a fused
            projection, both are rotated by the same ops.
        offsets: added to the positions, or None.
        fused_set_kv_buffer_arg: K/V store fused on CUDA; must be None.

    Returns:
        Rotated query and key, shaped like the inputs.
    """
    dim = rope.head_size
    whole = rope.is_neox_style and rope.rotary_dim == dim and query.ndim == key.ndim == 2
    if not whole or offsets is not None or fused_set_kv_buffer_arg is not None:
        return rope.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    angles = rope.__dict__.get("_dflash_cpu_angles")
    if (
        angles is None
        or angles.cos.dtype != query.dtype
        or not torch.equal(angles.positions, positions)
    ):
        angles = _Rotation.at(positions, rope.cos_sin_cache, query.dtype)
        rope.__dict__["_dflash_cpu_angles"] = angles
    rows, halves = query.shape[0], (2, dim // 2)
    split = query.shape[1]
    behind = query.data_ptr() + split * query.element_size()
    if key.data_ptr() == behind and key.stride() == query.stride() and query.stride(1) == 1:
        heads = (split + key.shape[1]) // dim
        both = query.as_strided((rows, heads, *halves), (query.stride(0), dim, dim // 2, 1))
        rotated = angles.apply(both).view(rows, heads * dim)
        return rotated[:, :split], rotated[:, split:]
    return (
        angles.apply(query.reshape(rows, -1, *halves)).view(query.shape),
        angles.apply(key.reshape(rows, -1, *halves)).view(key.shape),
    )


def register(dispatch_key: str) -> None:
    """Make SGLang's layers use these functions.

    Args:
        dispatch_key: the platform's operator dispatch key.
    """
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    replacements: list[tuple[type, Callable]] = [
        (RMSNorm, rms_norm),
        (SiluAndMul, silu_and_mul),
        *((rope, rotary_embedding) for rope in _ropes(RotaryEmbedding)),
    ]
    for layer, function in replacements:
        BaseFusedOp.register_oot_forward(layer, function, dispatch_key)


def _ropes(base: Any) -> Iterator[type]:
    """``base`` and those of its subclasses that only compute other angles."""
    yield base
    for rope in base.__subclasses__():
        if rope.forward_native is base.forward_native:
            yield from _ropes(rope)
