"""The DFLASH worker: SGLang's scheduler calls it, and one decode step is written here.

Everything around the step stays SGLang's: loading the drafter, tensor parallelism, pools,
graph capture, prefill, idle data-parallel ranks. The step itself is :meth:`DFlashWorker._step`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import (
    apply_dflash_simulated_acceptance,
    is_dense_head_weight,
)
from sglang.srt.speculative.dflash_worker_v2 import (
    DFlashWorkerV2,
    _resolve_dflash_embedding_module,
)
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    draft_tp_context,
)

from sglang_dflash import provenance
from sglang_dflash.arguments import launch_of, require_block_fits
from sglang_dflash.commit import DraftContext, TargetCache, along_path, unsupported_reason
from sglang_dflash.draft import Window, accept_any_dtype, draft, prepare, unwrapped_head
from sglang_dflash.head import DraftHead, Gather
from sglang_dflash.invariants import ContextLedger, checks_enabled
from sglang_dflash.kernels.accept import Accepted, accept
from sglang_dflash.kernels.merge_topk import Candidates
from sglang_dflash.metrics import AcceptMonitor, describe_device, memory_statement
from sglang_dflash.platforms.linear import greedy_tokens
from sglang_dflash.proposal import ChainProposer, Proposal, TreeProposer
from sglang_dflash.sampling import choose
from sglang_dflash.verify import Verified, verify

logger = logging.getLogger("sglang_dflash")


class DFlashWorker(DFlashWorkerV2):
    """DFlash drafting and verification behind SGLang's speculative worker interface.

    Args:
        server_args: the resolved arguments of the launch.
        gpu_id: device index of this rank.
        nccl_port: port of the drafter's process group.
        target_worker: SGLang's worker of the target, weights loaded.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        settings = launch_of(server_args).settings
        # SGLang knows one width, that of a verify pass. Its base class takes it for the block's.
        with get_spec().override(speculative_num_draft_tokens=settings.block_size):
            super().__init__(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_worker=target_worker,
            )
        accept_any_dtype(self.draft_model)
        self.tree = settings.tree_shape
        self.verify_rows: int = self.tree.rows if self.tree else self.block_size
        self._proposer: ChainProposer | TreeProposer = (
            TreeProposer(self.tree) if self.tree else ChainProposer(self.block_size, self.device)
        )
        target_model = target_worker.model_runner.model
        self._head = unwrapped_head(target_model)
        self._draft_head = DraftHead(self._head, _gather_of(self._head))
        self._embedding = unwrap_lora_layer(
            _resolve_dflash_embedding_module(self.draft_model, target_model)
        )
        self._context: DraftContext | None = None
        self._target_cache: TargetCache | None = None
        self._ledger: ContextLedger | None = None
        self._monitor = AcceptMonitor(settings.log_every, enabled=self._target_tp_rank == 0)
        self._warned_penalties = False

    # ---- the step ------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one batch: SGLang's prefill and idle paths, or one decode step of ours.

        Args:
            batch: requests to advance.
            on_publish: called with the new committed lengths as soon as they are enqueued;
                afterwards the scheduler may rewrite the request table.
            grammar_barrier: advances grammar state of the overlapped previous step.
            pp_proxy_tensors: unused; pipeline parallelism is refused at launch.
        """
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            return super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
        if batch.spec_info is None:
            batch.spec_info = DFlashDraftInputV2.create_idle_input(device=self.device)
        return self._step(batch, on_publish, grammar_barrier)

    def _step(
        self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any
    ) -> GenerationBatchResult:
        """Draft a block, verify its chain or tree in one pass, commit the longest path the target
        agrees with.
        """
        self._warn_once_about_penalties(batch.sampling_info)
        draft_input = batch.spec_info

        window = prepare(self, batch)
        if self._ledger is not None:
            self._ledger.check(batch, window)
        drafted = draft(self, batch, window)
        proposal = self._proposer.propose(window.anchors, window.positions, drafted)  # type: ignore[arg-type]
        verified = verify(self, batch, window, proposal, grammar_barrier)
        choice = choose(self, batch, window, proposal, verified)
        accepted = accept(
            proposal.tokens,
            proposal.parents,
            proposal.depths,
            proposal.ancestors,
            choice,
            window.lengths,
            output_width=self.block_size,
        )
        accepted = self._simulated(accepted, window, proposal, choice)
        self._finish_outputs(batch, draft_input, proposal, verified, accepted)
        self._commit_recurrent_state(batch, window, accepted)
        if on_publish is not None:
            on_publish(accepted.new_lengths)
        self._commit(window, verified, accepted)
        return self._result(verified, accepted)

    def _commit(self, window: Window, verified: Verified, accepted: Accepted) -> None:
        """Keep the accepted rows, in the target's cache and in the drafter's context.

        Runs after publish, and therefore writes only to slots named by the window.
        """
        rows, columns = window.slots.shape, accepted.path.shape[1]
        features = verified.features
        if self._target_cache is not None:
            slots = window.plan.write_ids(self.model_runner.kv_index_translator)
            self._target_cache.keep(slots.view(rows), accepted.path, accepted.accept_lengths)
            features = along_path(features[: rows.numel()], accepted.path)
        slots = self._draft_write_ids(window.plan).view(rows)[:, :columns]
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=features,
            cache_loc=slots.reshape(-1),
            cache_loc_2d=slots,
            positions=window.positions[:, :columns].reshape(-1),
            commit_lens=accepted.accept_lengths,
        )
        # One shared buffer, read in this step only; nothing of it travels to the host.
        verified.logits_output.hidden_states = None

    def _result(self, verified: Verified, accepted: Accepted) -> GenerationBatchResult:
        output = verified.output
        return GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=accepted.output_tokens.reshape(-1),
            accept_lens=accepted.accept_lengths,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=make_draft_input_v2(
                bonus_tokens=accepted.bonus, new_seq_lens=accepted.new_lengths
            ),
            speculative_num_draft_tokens=self.verify_rows,
            speculative_output_stride=self.block_size,
            new_seq_lens=accepted.new_lengths,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
        )

    # ---- what else a step owes its requests ------------------------------------------------

    def _finish_outputs(
        self,
        batch: ScheduleBatch,
        draft_input: DFlashDraftInputV2,
        proposal: Proposal,
        verified: Verified,
        accepted: Accepted,
    ) -> None:
        """Log-probabilities and sampling masks of the emitted tokens, where asked for."""
        masks_asked = getattr(batch.sampling_info, "sampling_mask_batch_indices", None) is not None
        if not (batch.return_logprob or masks_asked):
            return
        if self.tree is not None:
            # From here on it is a chain: the logits every emitted token was chosen from.
            logits = along_path(verified.logits_output.next_token_logits, accepted.path)
            verified.logits_output.next_token_logits = logits
        mask = SpeculativeSamplingMaskCapture.from_logits(
            batch.sampling_info,
            next_token_logits=verified.logits_output.next_token_logits,
            draft_input=draft_input,
            draft_token_num=self.block_size,
            bs=proposal.tokens.shape[0],
        )
        if mask is not None:
            verified.logits_output.sampling_mask_output = mask.build_output(
                out_tokens=accepted.output_tokens, commit_lens=accepted.accept_lengths
            )
        if batch.return_logprob:
            compute_spec_logprobs(
                batch,
                verified.logits_output,
                accepted.output_tokens.reshape(-1),
                chain_stride=self.block_size,
            )

    def _commit_recurrent_state(
        self, batch: ScheduleBatch, window: Window, accepted: Accepted
    ) -> None:
        """Promote the recurrent state of hybrid targets to the last accepted row."""
        if self._need_mamba_verify_commit:
            self._update_target_mamba_state_after_verify(
                batch=batch,
                seq_lens_pre_verify=window.lengths,
                seq_lens_post_verify=accepted.new_lengths,
                commit_lens=accepted.accept_lengths,
            )

    def _simulated(
        self, accepted: Accepted, window: Window, proposal: Proposal, choice: torch.Tensor
    ) -> Accepted:
        """Force the accept length SGLANG_SIMULATE_ACC_LEN asks for (benchmarks only)."""
        if SIMULATE_ACC_LEN <= 0:
            return accepted
        apply_dflash_simulated_acceptance(
            candidates=proposal.tokens,
            target_predict=choice,
            accept_len=accepted.accept_lengths - 1,
            commit_lens=accepted.accept_lengths,
            bonus=accepted.bonus,
            out_tokens=accepted.output_tokens,
            simulate_acc_len=SIMULATE_ACC_LEN,
            simulate_acc_method=SIMULATE_ACC_METHOD,
            simulate_acc_token_mode=SIMULATE_ACC_TOKEN_MODE,
        )
        lengths = window.lengths
        return accepted._replace(new_lengths=lengths + accepted.accept_lengths.to(lengths.dtype))

    def _warn_once_about_penalties(self, info: Any) -> None:
        if self._warned_penalties or info is None:
            return
        if info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None:
            self._warned_penalties = True
            logger.warning(
                "DFLASH: frequency_penalty, presence_penalty, repetition_penalty and "
                "min_new_tokens are not applied to drafted rows yet, as in SGLang's own DFLASH "
                "worker. Launch without --speculative-algorithm to have them."
            )

    # ---- what the step's functions read ----------------------------------------------------

    @property
    def mask_token_id(self) -> int:
        """The id that fills the block's undecided positions."""
        return int(self._mask_token_id)

    @property
    def draft_sampler(self) -> Any:
        """The head's argmax inside the captured draft graph, or None when it runs eagerly."""
        return self._draft_sampler

    @property
    def draft_block_spec_info(self) -> Any:
        """What the drafter's attention backend is told about the block."""
        return self._draft_block_spec_info

    @property
    def target_logits_processor(self) -> LogitsProcessor | None:
        """The target's processor when it leaves its vocabulary shards ungathered."""
        return self._target_logits_processor

    @property
    def tp_sync(self) -> Any:
        """Broadcasts a decision of rank 0 to the tensor-parallel group."""
        return self._tp_sync

    def needs_only_argmax(self, batch: ScheduleBatch) -> bool:
        """Whether nothing but each row's argmax will be read from the logits."""
        return self._can_skip_verify_logits(batch, batch.sampling_info)

    def embed_block(self, block_ids: torch.Tensor) -> torch.Tensor:
        """The target's embedding of the block's ids.

        Args:
            block_ids: ``[bs, B]`` int64.

        Returns:
            ``[bs*B, H]`` in the target's dtype.
        """
        if self._full_embed_gpu is not None:
            # Under DP attention the shared module's collectives would wait for idle ranks.
            embedded = torch.nn.functional.embedding(block_ids, self._full_embed_gpu)
        else:
            embedded = self._embedding(block_ids)
        if self._noise_embed_scale != 1.0:
            embedded = embedded * self._noise_embed_scale
        return embedded.view(-1, embedded.shape[-1])

    def draft_argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """Likeliest token of each of ``[T, H]`` hidden states over the target's head.

        Safe for vocabulary-parallel and quantised heads. Returns ``[T]`` int64.
        """
        tokens = greedy_tokens(self._head, hidden) if hidden.is_cpu else None
        if tokens is not None:
            return tokens
        return self._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden, lm_head=self._head
        )

    def draft_candidates(self, hidden: torch.Tensor, count: int) -> Candidates:
        """The ``count`` likeliest tokens after ``[T, H]`` hidden states, over the target's head.

        Returns ``[T, count]`` ids and log-probabilities, equal on every tensor-parallel rank.
        """
        return self._draft_head.candidates(hidden, count)

    def rebuild_draft_window(
        self, batch: ScheduleBatch, window: Window
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Point the drafter's own request table at the last tokens of each request.

        Used with ``--speculative-draft-window-size``.

        Returns:
            The windowed lengths ``[bs]`` and their upper bound on the host.
        """
        bs = window.batch_size
        self._ensure_draft_block_buffers(bs)
        bound = self._draft_seq_lens_cpu_buf[:bs]
        self._fill_compact_seq_lens_cpu_bound(
            batch_seq_lens_cpu=batch.seq_lens_cpu,
            nxt_kv_lens_cpu=batch.spec_info.nxt_kv_lens_cpu,
            out=bound,
        )
        lengths = self._compute_compact_draft_seq_lens(window.lengths)
        self._rebuild_compact_draft_cache(
            req_pool_indices=batch.req_pool_indices,
            prefix_lens=window.lengths,
            draft_prefix_lens=lengths,
            verify_out_cache_loc_2d=window.slots[:, : self.block_size],
            bs=bs,
            block_size=self.block_size,
        )
        return lengths, bound

    # ---- start-up, and SGLang's hooks ------------------------------------------------------

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the drafter's K/V pool and prepare its context writer."""
        require_block_fits(
            2 * self.verify_rows, self.model_runner.max_total_num_tokens, "the K/V pool"
        )
        super().alloc_memory_pool(*args, **kwargs)
        if self.tree is not None:
            self._target_cache = TargetCache(self.model_runner.token_to_kv_pool)
        pool = self.draft_model_runner.token_to_kv_pool
        reason = unsupported_reason(self.draft_model, pool)
        if reason is None:
            self._context = DraftContext(self.draft_model, pool)
        if checks_enabled():
            self._ledger = ContextLedger(
                slots=self.model_runner.max_total_num_tokens + self.page_size,
                req_to_token=self.model_runner.req_to_token_pool.req_to_token,
                device=self.device,
            )
        if self._target_tp_rank == 0:
            logger.info(
                "DFLASH worker %s on %s: block size %d, verify rows %d, draft context %s",
                type(self).__name__,
                describe_device(self.device),
                self.block_size,
                self.verify_rows,
                "fused" if reason is None else f"written layer by layer ({reason})",
            )
            logger.info(memory_statement(self.model_runner, self.draft_model_runner))
            self._warn_about_other_training()

    def _warn_about_other_training(self) -> None:
        """Say so when the drafter was made for another target or chat template."""
        arguments, target = self.server_args, None
        weights: list[Any] = [
            getattr(module, "weight", None) for module in (self._head, self._embedding)
        ]
        if arguments.tp_size == 1 and all(map(is_dense_head_weight, weights)):
            # SGLang pads the vocabulary.
            vocabulary = self.target_worker.model_config.vocab_size
            target = provenance.fingerprint(*(weight[:vocabulary] for weight in weights))
        template = None
        if arguments.chat_template is None:
            template = provenance.template_hash(self.target_worker.tokenizer)
        config = self.draft_model_runner.model_config.hf_config
        for reason in provenance.mismatches(getattr(config, "training", None), target, template):
            logger.warning(
                "DFLASH: --speculative-draft-model-path=%s: %s Output is not affected, but expect "
                "a low accept length.",
                arguments.speculative_draft_model_path,
                reason,
            )

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """SGLang's hook: accept counts have reached the host on their own."""
        self._monitor.observe(num_correct_drafts_per_req)

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: torch.Tensor,
        cache_loc: torch.Tensor,
        positions: torch.Tensor,
        cache_loc_2d: torch.Tensor | None = None,
        commit_lens: torch.Tensor | None = None,
        extend_lens: torch.Tensor | None = None,
    ) -> None:
        """Extend the drafter's context; prefill (SGLang's path) and the step both end here."""
        if self._ledger is not None:
            self._ledger.record(cache_loc, positions, commit_lens)
        if self._context is None:
            super()._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=target_hidden,
                cache_loc=cache_loc,
                positions=positions,
                cache_loc_2d=cache_loc_2d,
                commit_lens=commit_lens,
                extend_lens=extend_lens,
            )
            return
        rows = cache_loc.numel()
        if rows == 0:
            return
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            self._context.append(
                # Rows past the slots pad the batch for tensor parallelism; they are nobody's.
                target_hidden[:rows],
                cache_loc,
                positions,
                commit_lengths=commit_lens,
                rows_per_request=1 if cache_loc_2d is None else cache_loc_2d.shape[1],
            )

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        # Upstream warns here that sampled requests are answered greedily where its CUDA verify
        # kernel is missing. Ours are sampled on every device.
        pass

    def _init_fused_kv_helper(self) -> None:
        # The context is written by DraftContext, which needs the pool and is built after it.
        self._use_fused_kv_materialize = False


def _gather_of(head: Any) -> Gather | None:
    """How this rank's part of the head joins the others', or None when it has the whole head."""
    group = get_parallel().tp_group
    if group.world_size == 1 or getattr(head, "shard_indices", None) is None:
        return None
    return lambda part: group.all_gather(part.unsqueeze(1), dim=1)
