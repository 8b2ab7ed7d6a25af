"""The seams: every class and function of SGLang this package rests on.

Each is named ``file:qualified name``, the file below ``sglang/``. :mod:`sglang_dflash.compat`
compares them with the certified releases; a test keeps the list complete.
"""

from __future__ import annotations


def _members(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}{name}" for name in names)


SEAMS: tuple[str, ...] = (
    # Overridden by the worker, or re-implemented by its step.
    *_members(
        "srt/speculative/dflash_worker_v2.py:DFlashWorkerV2.",
        "__init__",
        "__getattr__",
        "_accept_block",
        "_append_target_hidden_to_draft_kv_by_loc",
        "_cache_full_embed_weight",
        "_can_skip_verify_logits",
        "_compute_compact_draft_seq_lens",
        "_defer_target_verify_gather",
        "_draft_write_ids",
        "_ensure_draft_block_buffers",
        "_fill_compact_seq_lens_cpu_bound",
        "_greedy_sample_from_vocab_parallel_head",
        "_init_fused_kv_helper",
        "_maybe_build_draft_sampler",
        "_rebuild_compact_draft_cache",
        "_resolve_mask_token_id",
        "_update_target_mamba_state_after_verify",
        "_validate_phase1_sampling_support",
        "alloc_memory_pool",
        "draft_worker",
        "forward_batch_generation",
        "init_attention_backends",
        "init_cuda_graphs",
        "prewarm_sampling",
    ),
    "srt/speculative/dflash_worker_v2.py:_resolve_dflash_embedding_module",
    "srt/speculative/base_spec_worker.py:BaseSpecWorker",
    # What a step passes around.
    "srt/speculative/dflash_info.py:DFlashVerifyInput",
    "srt/speculative/dflash_info_v2.py:DFlashDraftInputV2",
    "srt/speculative/draft_worker_common.py:make_draft_input_v2",
    "srt/managers/tokenizer_manager.py:TokenizerManager._validate_one_request",
    "srt/managers/overlap_utils.py:RelayPayload",
    "srt/managers/schedule_batch.py:ScheduleBatch",
    "srt/managers/utils.py:GenerationBatchResult",
    "srt/mem_cache/kv_index_translator.py:KVIndexTranslator.plan",
    "srt/mem_cache/kv_loc_plan.py:KVLocPlan",
    *_members(
        "srt/model_executor/forward_batch_info.py:",
        "CaptureHiddenMode",
        "ForwardBatch",
        "ForwardMode",
        "enable_num_token_non_padded",
    ),
    # Called by the step.
    "srt/managers/tp_worker.py:TpModelWorker.forward_batch_generation",
    "srt/layers/logits_processor.py:LogitsProcessor.deferred_argmax",
    "srt/layers/logits_processor.py:LogitsProcessor.finish_deferred_gather",
    "srt/layers/logits_processor.py:LogitsProcessor.is_deferred_shard",
    "srt/layers/logprob_processor.py:compute_spec_logprobs",
    "srt/layers/sampler.py:Sampler.forward",
    "srt/lora/layers.py:unwrap_lora_layer",
    "srt/sampling/sampling_batch_info.py:SamplingBatchInfo",
    "srt/speculative/dflash_utils.py:apply_dflash_simulated_acceptance",
    "srt/speculative/dflash_utils.py:apply_dflash_verify_logits_adjustments",
    "srt/speculative/dflash_utils.py:can_dflash_slice_qkv_weight",
    "srt/speculative/dflash_utils.py:is_dense_head_weight",
    "srt/speculative/spec_sampling_mask.py:SpeculativeSamplingMaskCapture",
    "srt/speculative/spec_tp_sync.py:SpecTpSync.sync",
    "srt/speculative/spec_tp_sync.py:SpecTpSyncSite",
    "srt/speculative/spec_utils.py:GrammarTree",
    "srt/speculative/spec_utils.py:build_grammar_vocab_mask",
    "srt/speculative/spec_utils.py:draft_tp_context",
    # The drafter, whose context K/V is written outside its own forward.
    "srt/models/dflash.py:DFlashAttention",
    "srt/models/dflash.py:DFlashDraftModel",
    "srt/speculative/dflash_utils.py:parse_dflash_draft_config",
    # Launch: arguments, hooks, sizes.
    "srt/arg_groups/model_override_base.py:model_config_of",
    "srt/arg_groups/model_override_base.py:resolving_view",
    "srt/arg_groups/overrides.py:declare_resolution",
    "srt/arg_groups/resolution_hooks.py:register_resolution_hook",
    "srt/arg_groups/speculative_hook.py:_handle_dflash",
    "srt/mem_cache/allocation_sizing.py:get_alloc_len_per_decode",
    "srt/mem_cache/allocation_sizing.py:get_alloc_page_size",
    "srt/mem_cache/allocation_sizing.py:get_alloc_reserve_per_decode",
    "srt/mem_cache/allocation_sizing.py:get_req_to_token_extra_context_len",
    "srt/plugins/__init__.py:load_plugins",
    "srt/plugins/hook_registry.py:HookRegistry",
    "srt/plugins/hook_registry.py:HookType",
    "srt/runtime_context.py:get_parallel",
    "srt/runtime_context.py:get_spec",
    *_members(
        "srt/server_args.py:ServerArgs.",
        "__reduce__",
        "__setattr__",
        "add_cli_args",
        "from_cli_args",
        "resolve_once",
    ),
    *_members(
        "srt/speculative/spec_info.py:SpeculativeAlgorithm.",
        "create_worker",
        "get_num_tokens_per_req_for_target_verify",
        "handle_server_args",
        "is_dflash",
    ),
    "srt/utils/hf_transformers/common.py:get_context_length",
)
"""What the plugin touches on every device: ``file:qualified name`` below ``sglang/``."""

PLATFORM_SEAMS: tuple[str, ...] = (
    "kernels/fused_op.py:BaseFusedOp",
    "srt/distributed/bootstrap.py:_bind_threads_if_cpu",
    "srt/distributed/bootstrap.py:_init_cpu_threads_env",
    *_members(
        "srt/distributed/parallel_state.py:",
        "GroupCoordinator.all_gather_into_tensor",
        "reg_all_gather_into_tensor",
        "reg_all_to_all_single",
        "reg_reduce_scatter_tensor",
    ),
    "srt/layers/attention/attention_registry.py:register_attention_backend",
    "srt/layers/attention/base_attn_backend.py:AttentionBackend",
    "srt/layers/activation.py:SiluAndMul",
    "srt/layers/quantization/unquant.py:UnquantizedEmbeddingMethod",
    "srt/layers/quantization/unquant.py:UnquantizedLinearMethod",
    "srt/plugins/hook_registry.py:HookSource",
    "srt/layers/layernorm.py:RMSNorm",
    "srt/layers/radix_attention.py:AttentionType",
    "srt/layers/radix_attention.py:RadixAttention",
    "srt/mem_cache/allocation.py:assign_req_to_token_pool_func",
    "srt/mem_cache/allocation.py:get_last_loc",
    "srt/mem_cache/memory_pool.py:MHATokenToKVPool",
    "srt/platforms/cpu.py:CpuDeviceMixin",
    "srt/platforms/device_mixin.py:PlatformEnum",
    "srt/platforms/interface.py:PlatformCapabilities",
    "srt/platforms/interface.py:SRTPlatform",
    "srt/runtime_context.py:get_device",
)
"""What the CPU platform touches besides; checked where it is selected."""
