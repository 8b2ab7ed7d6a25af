"""Prepare and run the drafter's block pass.

The drafter reads the context K/V it already holds for positions ``0 .. s-1`` and fills the
block ``[anchor, MASK, ...]`` at ``s .. s+B-1`` in one forward (arXiv 2602.06036). On CUDA the
forward, with the head's argmax as its tail, replays SGLang's captured draft graph.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_dflash.kernels.merge_topk import Candidates
from sglang_dflash.kernels.prepare_block import prepare_block

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.worker import DFlashWorker


class Window(NamedTuple):
    """The part of every request's context that one step drafts, verifies and writes.

    It is captured before the step's results are published: whatever the scheduler does to
    ``req_to_token`` afterwards, the step writes only the slots named here.
    """

    anchors: torch.Tensor
    """``[bs]`` int64, the last committed token, whose K/V is in no cache yet."""
    lengths: torch.Tensor
    """``[bs]`` committed lengths s; also the positions of the anchors."""
    lengths_bound: torch.Tensor
    """``[bs]`` on the host: an upper bound of ``s + N``, for planning without a sync."""
    block_ids: torch.Tensor
    """``[bs, B]`` int64, the anchor followed by MASK."""
    positions: torch.Tensor
    """``[bs, N]`` int64, ``s .. s+N-1``."""
    slots: torch.Tensor
    """``[bs, N]`` int64, the KV slots of those positions, as the scheduler names them."""
    plan: KVLocPlan
    """The same slots as each KV pool indexes them."""

    @property
    def batch_size(self) -> int:
        """Number of requests in the step."""
        return self.anchors.shape[0]


def prepare(worker: DFlashWorker, batch: ScheduleBatch) -> Window:
    """Lay out one step: block ids, positions, KV slots and host-side bounds.

    Args:
        worker: the speculative worker.
        batch: a decode batch whose ``spec_info`` carries the anchors.

    Returns:
        The step's :class:`Window`. Nothing here waits for the device.
    """
    draft_input = batch.spec_info
    if batch.seq_lens.is_cuda:
        # Produced on the scheduler's stream by the previous iteration.
        batch.seq_lens.record_stream(torch.cuda.current_stream())
    anchors = draft_input.bonus_tokens.view(-1)
    lengths = batch.seq_lens
    rows = worker.verify_rows

    block = prepare_block(
        anchors,
        lengths,
        batch.req_pool_indices,
        worker.model_runner.req_to_token_pool.req_to_token,
        mask_token_id=worker.mask_token_id,
        block_size=worker.block_size,
        verify_rows=rows,
    )
    if batch.seq_lens_cpu is not None:
        host_lengths = batch.seq_lens_cpu
        lengths_bound = host_lengths + rows
    else:
        # Device-only attention backends: the reservation bounds the length from above.
        host_lengths = lengths_bound = draft_input.nxt_kv_lens_cpu
    plan = worker.model_runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        seq_lens_cpu=host_lengths,
        write_virtual=block.slots.reshape(-1),
        read_extent=rows,
    )
    return Window(anchors, lengths, lengths_bound, block.ids, block.positions, block.slots, plan)


def draft(worker: DFlashWorker, batch: ScheduleBatch, window: Window) -> torch.Tensor | Candidates:
    """Run the block pass and take what the worker's proposer needs of every drafted position.

    Returns:
        For chains ``[bs, B-1]`` int64 likeliest tokens at positions ``s+1 .. s+B-1``; for trees
        ``bs * (B-1)`` rows of K candidates each.
    """
    bs, block_size = window.batch_size, worker.block_size
    forward_batch = _block_forward_batch(worker, batch, window)
    with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
        output = worker.draft_model_runner.forward(forward_batch)
        if worker.tree is None and worker.draft_sampler is not None and output.can_run_graph:
            # The captured graph ends with the head's argmax into a static buffer.
            return worker.draft_sampler.out[: bs * (block_size - 1)].view(bs, block_size - 1)
        hidden = output.logits_output.hidden_states.view(bs, block_size, -1)
        drafted = hidden[:, 1:].flatten(0, 1)
        if worker.tree is not None:
            return worker.draft_candidates(drafted, worker.tree.candidates)
        return worker.draft_argmax(drafted).view(bs, block_size - 1)


def _block_forward_batch(
    worker: DFlashWorker, batch: ScheduleBatch, window: Window
) -> ForwardBatch:
    """Describe the block pass to SGLang's model runner."""
    bs, block_size = window.batch_size, worker.block_size
    columns = slice(0, block_size)
    lengths, lengths_bound, plan = window.lengths, window.lengths_bound, window.plan
    translator = worker.draft_model_runner.kv_index_translator
    if worker.use_compact_draft_cache:
        # A draft window keeps its own request table over the last tokens only.
        lengths, lengths_bound = worker.rebuild_draft_window(batch, window)
        plan = plan.reads_from(
            translator, seq_lens=lengths, seq_lens_cpu=lengths_bound, read_extent=block_size
        )
    tokens = bs * block_size
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=bs,
        input_ids=window.block_ids.reshape(-1),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        out_cache_loc=window.slots[:, columns].reshape(-1),
        seq_lens_sum=int(lengths_bound.sum()),
        seq_lens_cpu=lengths_bound,
        positions=window.positions[:, columns].reshape(-1),
        input_embeds=worker.embed_block(window.block_ids),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=worker.draft_block_spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=(
            torch.full((), tokens, dtype=torch.int32, device=worker.device)
            if enable_num_token_non_padded()
            else None
        ),
        global_num_token_non_padded_cpu=tokens,
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
    whole = worker.verify_rows == block_size
    plan.bind(forward_batch, translator, cols=None if whole else columns)
    return forward_batch


def accept_any_dtype(draft_model: torch.nn.Module) -> None:
    """Let a drafter run in float32 or float16; safe to repeat.

    SGLang's eager runner hands every model its ``input_embeds`` in bfloat16; a drafter in another
    dtype would stop at its first matrix product.
    """
    if getattr(draft_model, "_dflash_any_dtype", False):
        return
    draft_model._dflash_any_dtype = True  # type: ignore[assignment]

    # SGLang calls ``forward`` itself, so a module hook would not be seen.
    forward = draft_model.forward

    @functools.wraps(forward)
    def forward_in_own_dtype(*args: Any, **kwargs: Any) -> Any:
        embeds = kwargs.get("input_embeds")
        if embeds is not None:
            kwargs["input_embeds"] = embeds.to(next(draft_model.parameters()).dtype)
        return forward(*args, **kwargs)

    draft_model.forward = forward_in_own_dtype  # type: ignore[method-assign]


def unwrapped_head(target_model: torch.nn.Module) -> torch.nn.Module:
    """The target's LM head, out of any LoRA wrapper.

    Raises:
        RuntimeError: the target exposes no head the drafter can borrow.
    """
    head = unwrap_lora_layer(getattr(target_model, "lm_head", None))
    quant_apply = getattr(getattr(head, "quant_method", None), "apply", None)
    if head is None or not (hasattr(head, "weight") or callable(quant_apply)):
        raise RuntimeError(
            f"DFLASH: {type(target_model).__name__} exposes no lm_head with a weight or a "
            "quant_method; the drafter has no head of its own and cannot run on this target."
        )
    return head
