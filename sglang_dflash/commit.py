"""Commit: keep what was accepted, in the target's cache and in the drafter's context.

The drafter conditions on the target's features of every committed token, injected as K/V into
each of its layers (arXiv 2602.06036). That K/V depends only on the token's features and its
position, so it is computed once, when the token is committed, and lies in the drafter's pool at
the token's own slot. After every step the drafter's context is exactly as long as the
committed text.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dflash_utils import can_dflash_slice_qkv_weight

from sglang_dflash.kernels.append_context import ContextCache, append_context, valid_rows
from sglang_dflash.kernels.layer_caches import LayerCaches
from sglang_dflash.kernels.move_rows import move_rows


def along_path(rows: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Rows of the accepted path, one per output column.

    Args:
        rows: ``[bs*N, ..]`` by verify row.
        path: ``[bs, D]`` int32 accepted rows, -1 past the end.

    Returns:
        ``[bs*D, ..]``; past the end of a path stands the request's root.
    """
    requests = len(path)
    first = torch.arange(requests, device=path.device).unsqueeze(1) * (len(rows) // requests)
    return rows[(first + path.clamp(min=0)).flatten()]


class TargetCache:
    """The target's K/V pool, where a tree's accepted rows move to the places of their positions.

    Args:
        pool: SGLang's K/V pool of the target.

    Raises:
        ValueError: it does not store K/V by token slot.
    """

    def __init__(self, pool: Any):
        k_buffer, v_buffer = (getattr(pool, name, None) for name in ("k_buffer", "v_buffer"))
        if not isinstance(k_buffer, list) or not isinstance(v_buffer, list):
            raise ValueError(
                f"DFLASH: tree_rows: the target keeps its K/V in a {type(pool).__name__}, whose "
                "rows cannot be moved when a branch is accepted. Remove tree_rows to verify chains."
            )
        same = k_buffer[0].shape[1:] == v_buffer[0].shape[1:]
        groups = [[*k_buffer, *v_buffer]] if same else [k_buffer, v_buffer]
        self._caches = [LayerCaches(group) for group in groups]

    def keep(self, slots: torch.Tensor, path: torch.Tensor, accept_lengths: torch.Tensor) -> None:
        """Move the K/V of accepted rows to the front of their windows.

        Args:
            slots: ``[bs, N]`` slots of the verify rows in this pool.
            path: ``[bs, D]`` int32 accepted rows.
            accept_lengths: ``[bs]`` int32.
        """
        for caches in self._caches:
            move_rows(caches, slots, path, accept_lengths)


def unsupported_reason(draft_model: Any, pool: Any) -> str | None:
    """Why this drafter's context cannot be written by our kernel, or None if it can.

    SGLang's own writer serves such a drafter instead; the reason is logged once at start-up.
    """
    if not getattr(draft_model, "supports_fused_context_kv", True):
        return f"{type(draft_model).__name__} prepares its context in its own way"
    buffers = getattr(pool, "k_buffer", None)
    if not isinstance(buffers, list) or buffers[0].dim() != 3:
        return f"{type(pool).__name__} does not store K/V by token slot"
    if buffers[0].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the draft K/V cache has dtype {buffers[0].dtype}"
    first = draft_model.layers[0].self_attn
    for index, layer in enumerate(draft_model.layers):
        attention = layer.self_attn
        sliceable, reason = can_dflash_slice_qkv_weight(attention.qkv_proj)
        if not sliceable:
            return f"layer {index}: {reason}"
        if attention.rotary_emb is not first.rotary_emb and not torch.equal(
            attention.rotary_emb.cos_sin_cache, first.rotary_emb.cos_sin_cache
        ):
            return f"layer {index} has its own rotary table"
        for scale in (attention.attn.k_scale, attention.attn.v_scale):
            if scale is not None and float(scale) != 1.0:
                return f"layer {index} scales its K/V cache"
    return None


class DraftContext:
    """Writes the drafter's context K/V, all layers at once.

    Args:
        draft_model: SGLang's ``DFlashDraftModel`` with L layers.
        pool: the drafter's K/V pool.
    """

    def __init__(self, draft_model: Any, pool: Any):
        self._model = draft_model
        attentions = [layer.self_attn for layer in draft_model.layers]
        first = attentions[0]
        rotary = first.rotary_emb
        self._shape = (len(attentions), 2, first.num_kv_heads, first.head_dim)
        kv_rows = slice(first.q_size, first.q_size + 2 * first.kv_size)
        self._projections = [
            (a.qkv_proj.weight, a.qkv_proj.bias, kv_rows, a.v_scale) for a in attentions
        ]
        first_layer = getattr(pool, "start_layer", 0) or 0
        layer_ids = [a.attn.layer_id - first_layer for a in attentions]
        self._cache = ContextCache(
            k_cache=[pool.k_buffer[i] for i in layer_ids],
            v_cache=[pool.v_buffer[i] for i in layer_ids],
            k_norm_weight=torch.stack([a.k_norm.weight.detach() for a in attentions]),
            eps=float(first.k_norm.variance_epsilon),
            cos_sin_cache=rotary.cos_sin_cache,
            is_neox=bool(rotary.is_neox_style),
        )

    def append(
        self,
        features: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        commit_lengths: torch.Tensor | None = None,
        rows_per_request: int = 1,
    ) -> None:
        """Extend the drafter's context by committed tokens.

        Args:
            features: ``[T, K*H]`` tapped residual streams of the target.
            slots: ``[T]`` slots in the drafter's pool.
            positions: ``[T]`` int64 absolute positions.
            commit_lengths: ``[bs]`` int32; of each request's ``rows_per_request`` rows the
                first ``commit_lengths`` are written. None writes all rows (prefill).
            rows_per_request: N, the rows per request when ``commit_lengths`` is given.
        """
        if commit_lengths is not None and not features.is_cuda:
            # On the host the lengths are known: project only what will be kept.
            keep = valid_rows(commit_lengths, rows_per_request)
            features, slots, positions = features[keep], slots[keep], positions[keep]
            commit_lengths = None
        context = self._model.project_target_hidden(features)
        kv = torch.empty(
            (context.shape[0], *self._shape), dtype=context.dtype, device=context.device
        )
        flat = kv.view(context.shape[0], len(self._projections), -1)
        for layer, (weight, bias, rows, v_scale) in enumerate(self._projections):
            # Straight into the layer's columns: no stacked copy of the weights to keep in step
            # with a weight update, and no copy of the product.
            torch.mm(context, weight[rows].T, out=flat[:, layer])
            if bias is not None:
                flat[:, layer] += bias[rows]
            if v_scale is not None:
                kv[:, layer, 1] *= v_scale
        append_context(
            kv,
            self._cache,
            positions=positions,
            slots=slots,
            commit_lengths=commit_lengths,
            rows_per_request=rows_per_request,
        )
