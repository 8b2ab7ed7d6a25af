"""Verify a proposal: one batched forward of the target over all its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils import is_npu

from sglang_dflash.draft import Window
from sglang_dflash.proposal import Proposal

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.worker import DFlashWorker


@dataclass
class DFlashTreeVerifyInput(DFlashVerifyInput):
    """SGLang's verify input with rows that see the context and their own ancestors only."""

    ancestors: torch.Tensor | None = None
    """``[bs, N, W]`` int64 bit sets over the rows, as in a ``Proposal``."""


class Verified(NamedTuple):
    """What the target says about every row of a proposal."""

    output: Any
    """SGLang's ``GenerationBatchResult`` of the target forward; its ``logits_output`` holds
    ``[bs*N, V]`` logits, unless ``argmax`` replaces them."""
    argmax: torch.Tensor | None
    """``[bs*N]`` int64 when every request is greedy and only the argmax was gathered across
    tensor-parallel ranks; None otherwise."""
    grammar_mask: Any
    """Constrained requests' vocabulary mask over the rows, or None."""

    @property
    def logits_output(self) -> Any:
        """The target's ``LogitsProcessorOutput``."""
        return self.output.logits_output

    @property
    def features(self) -> torch.Tensor:
        """``[bs*N, K*H]`` residual streams after the K tapped layers."""
        features = self.logits_output.hidden_states
        if features is None:
            raise RuntimeError(
                "DFLASH: the target captured no hidden states during verify; its model class "
                "does not implement set_dflash_layers_to_capture."
            )
        return features


def verify(
    worker: DFlashWorker,
    batch: ScheduleBatch,
    window: Window,
    proposal: Proposal,
    grammar_barrier: Any = None,
) -> Verified:
    """Run the target once over the rows of every request.

    Args:
        worker: the speculative worker.
        batch: the decode batch; its scheduling fields are restored before returning.
        window: the step's slots and positions.
        proposal: the rows to check; a chain is verified causally.
        grammar_barrier: advances the grammar state of the previous, overlapped step.

    Returns:
        The target's output over ``bs*N`` rows, logits finalised on every TP rank.
    """
    # The copy of the drafted ids to the host must be queued ahead of the verify launch.
    grammar_tree = _grammar_tree(proposal) if batch.has_grammar else None
    output = _forward_target(worker, batch, window, proposal)
    argmax = _finish_deferred_gather(worker, batch, output.logits_output)
    grammar_mask = None
    if grammar_tree is not None:
        grammar_mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=grammar_tree,
            sampling_info=batch.sampling_info,
            device=output.logits_output.next_token_logits.device,
            barrier=grammar_barrier,
        )
    return Verified(output, argmax, grammar_mask)


def _grammar_tree(proposal: Proposal) -> GrammarTree:
    if proposal.links is None:
        return GrammarTree.from_linear_chain(proposal.tokens)
    return GrammarTree.from_device(*proposal.links, proposal.tokens)


def _verify_input(window: Window, proposal: Proposal) -> DFlashVerifyInput:
    rows = {
        "draft_token": proposal.tokens.reshape(-1),
        "positions": proposal.positions.reshape(-1),
        "draft_token_num": proposal.rows,
        "capture_hidden_mode": CaptureHiddenMode.FULL,
        "kv_loc_plan": window.plan,
    }
    if proposal.links is None:
        return DFlashVerifyInput(**rows)
    return DFlashTreeVerifyInput(**rows, ancestors=proposal.ancestors)


def _forward_target(
    worker: DFlashWorker, batch: ScheduleBatch, window: Window, proposal: Proposal
) -> Any:
    dp_attention = get_parallel().attn_dp_enabled
    verify_input = _verify_input(window, proposal)
    batch.out_cache_loc = window.slots.reshape(-1)
    # Attention planning needs an upper bound of the lengths it will read, rows included;
    # the batch itself keeps its committed lengths.
    committed = batch.seq_lens_cpu, batch.seq_lens_sum
    batch.seq_lens_cpu = window.lengths_bound
    batch.seq_lens_sum = int(window.lengths_bound.sum())
    forward_batch, _ = verify_input.prepare_for_verify(
        batch, worker.target_worker, defer_metadata_init=dp_attention
    )
    batch.seq_lens_cpu, batch.seq_lens_sum = committed

    if dp_attention:
        # A rank that is idle or prefills counts its rows differently from a rank that replays
        # a padded graph; all run eagerly, so that they agree on the gather's offsets.
        counts = forward_batch.original_global_num_tokens_cpu
        if batch.is_extend_in_batch or (counts is not None and min(counts) == 0):
            forward_batch.can_run_decode_cuda_graph = False

    return worker.target_worker.forward_batch_generation(
        batch=None,
        forward_batch=forward_batch,
        is_verify=True,
        # Under DP attention the runner plans after padding; elsewhere it is planned already.
        skip_attn_backend_init=None if is_npu() or dp_attention else True,
    )


def _finish_deferred_gather(
    worker: DFlashWorker, batch: ScheduleBatch, logits_output: Any
) -> torch.Tensor | None:
    """Complete the vocabulary-parallel gather, or only its argmax where nothing else is read."""
    processor = worker.target_logits_processor
    if processor is None or not processor.is_deferred_shard(logits_output.next_token_logits):
        return None
    if worker.needs_only_argmax(batch):
        argmax = processor.deferred_argmax(logits_output.next_token_logits)
        logits_output.next_token_logits = None
        return argmax
    logits_output.next_token_logits = processor.finish_deferred_gather(
        logits_output.next_token_logits
    )
    return None
