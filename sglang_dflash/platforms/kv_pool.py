"""The K/V pool: SGLang's multi-head pool, with torch ops where it launches Triton."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """Per-layer ``[slots, heads, head_dim]`` K and V buffers in main memory."""

    def write_rows(
        self, layer_id: int, slots: slice | torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store K/V rows that already have the pool's dtype.

        Args:
            layer_id: the layer, counted over the whole model.
            slots: ``[rows]`` int64, or a slice of that length.
            k: ``[rows, heads, head_dim]``.
            v: ``[rows, heads, v_head_dim]``.
        """
        layer = layer_id - self.start_layer
        if isinstance(slots, slice):
            self.k_buffer[layer][slots] = k
            self.v_buffer[layer][slots] = v
        else:
            self.k_buffer[layer].index_copy_(0, slots, k)
            self.v_buffer[layer].index_copy_(0, slots, v)

    def _store_kv_layer(
        self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        self.write_rows(layer_idx + self.start_layer, loc, cache_k, cache_v)

    def _init_kv_copy_and_warmup(self) -> None:
        """Skip the set-up of the Triton copy kernel that :meth:`_move_kv_cache_impl` replaces."""
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        # Sources may be targets of other rows, so each layer is read before it is written.
        targets, sources = tgt_loc.flatten().to(torch.int64), src_loc.flatten().to(torch.int64)
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer.index_copy_(0, targets, buffer.index_select(0, sources))
