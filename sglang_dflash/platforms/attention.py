"""The CPU platform's attention backend: SGLang's interface on top of :mod:`.tiles`.

One forward is described once and every layer runs the same few SDPA calls. What a query row
may see:

* prefill, decode and the verification of a chain: everything up to its own position;
* the verification of a tree: the committed context and its own ancestors;
* the drafter's block, full-attention layers (``AttentionType.ENCODER_ONLY``): the context and
  the whole block (arXiv 2602.06036, section 3); its sliding layers: causal, within the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

from sglang_dflash.platforms import NAME
from sglang_dflash.platforms.kv_pool import CpuKVPool
from sglang_dflash.platforms.tiles import (
    MAX_PADDING,
    Plan,
    Queries,
    Sight,
    as_slice,
    attend,
    plan,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuAttentionBackend(AttentionBackend):
    """Attention over the K/V pool of one model runner.

    Trees come in through the attribute ``ancestors`` of the verify input: ``[bs, N, W]`` int64
    bit sets over the verify rows, each row's own bit included, W = ceil(N / 64). Without it,
    or when it is None, verification is causal.

    Args:
        runner: the model runner whose layers this backend serves.

    Raises:
        ValueError: the runner's K/V pool is not a plain multi-head pool in the model's dtype.
    """

    def __init__(self, runner: ModelRunner):
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, CpuKVPool) or pool.dtype != runner.dtype:
            raise ValueError(
                f"attention backend {NAME}: this model keeps its K/V in a "
                f"{type(pool).__name__} of {pool.dtype}; only dense multi-head attention with "
                f"K/V in the model's own dtype ({runner.dtype}) runs on the CPU. Leave "
                "--kv-cache-dtype at auto, and use a Llama- or Qwen3-style model."
            )
        self._pool = pool
        self._table = runner.req_to_token_pool.req_to_token
        # Padding leaves a row's values alone but changes the shape of the products it is
        # computed in, and with it their rounding.
        deterministic = runner.server_args.enable_deterministic_inference
        self._max_padding = 1 if deterministic else MAX_PADDING

    def support_triton(self) -> bool:
        """No Triton kernel runs on this device."""
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Describe one forward; every layer of it reuses the description."""
        self._queries = _queries_of(forward_batch, self._table)
        self._plans: dict[tuple[Sight, int], Plan] = {}
        self._write_slots = as_slice(forward_batch.out_cache_loc)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: object,
    ) -> torch.Tensor:
        """Store the new K/V rows, then attend.

        Args:
            q: ``[rows, Hq * D]``.
            k: ``[rows, Hk, D]``, or None when the rows are already stored.
            v: ``[rows, Hk, D]``, likewise.
            layer: the layer; its scaling, window and attention type apply.
            forward_batch: the forward that :meth:`init_forward_metadata` described.
            save_kv_cache: False leaves the pool as it is.
            kwargs: per-layer extras of other backends; none is supported here.

        Returns:
            ``[rows, Hq * D]``.

        Raises:
            NotImplementedError: the layer asks for something this backend does not do.
        """
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        if kwargs or layer.is_cross_attention or layer.logit_cap:
            extras = sorted(kwargs) or ["cross attention or logit capping"]
            raise NotImplementedError(
                f"attention backend {NAME}: layer {layer.layer_id} needs "
                f"{', '.join(extras)}, which is not implemented on the CPU."
            )
        if save_kv_cache and k is not None and v is not None:
            self._pool.write_rows(layer.layer_id, self._write_slots, k, v)
        sight = Sight(layer.attn_type != AttentionType.ENCODER_ONLY, layer.sliding_window_size)
        group = layer.tp_q_head_num // layer.tp_k_head_num
        tiles = self._plans.get((sight, group))
        if tiles is None:
            tiles = plan(self._queries, sight, q.dtype, self._max_padding, group)
            self._plans[sight, group] = tiles
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return attend(tiles, query, keys, values, layer.scaling).flatten(1)


def _queries_of(batch: ForwardBatch, table: torch.Tensor) -> Queries:
    """The query rows of SGLang's description of a forward."""
    mode, rows = batch.forward_mode, batch.req_pool_indices
    if mode.is_decode():
        return Queries(table, rows, batch.seq_lens - 1, [1] * batch.batch_size)
    if not mode.is_target_verify():
        return Queries(table, rows, batch.extend_prefix_lens, batch.extend_seq_lens.tolist())
    width = batch.spec_info.num_tokens_per_req
    ancestors = getattr(batch.spec_info, "ancestors", None)
    return Queries(
        table,
        rows,
        batch.seq_lens,
        [width] * batch.batch_size,
        None if ancestors is None else batch.positions.view(-1, width),
        ancestors,
    )
