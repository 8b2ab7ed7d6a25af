"""The platform class: what SGLang asks of a device, answered for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_dflash.platforms import NAME, defaults, patches

# SGLang imports this module while it is itself being imported: whatever needs more of SGLang
# than its platform interface is imported where it is used.


class DFlashCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Serves models on the CPU with torch kernels alone, DFLASH included.

    Raises:
        RuntimeError: a CUDA device is visible; SGLang would mix its kernels with ours.
    """

    _enum = PlatformEnum.OOT
    device_name = NAME
    device_type = "cpu"
    # No Triton, no graph capture, no PyNccl: the defaults.
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        super().__init__()
        if torch.cuda.is_available():
            raise RuntimeError(
                f"SGLANG_PLATFORM={NAME}: a CUDA device is visible. Unset SGLANG_PLATFORM to "
                "serve on it, or hide it with CUDA_VISIBLE_DEVICES='' to serve on the CPU."
            )
        for extend in (
            choices.add_attention_backend_choices,
            choices.add_draft_attention_backend_choices,
            choices.add_deterministic_attention_backend_choices,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ):
            extend([NAME])
        register_resolution_hook("handle_cpu_backends")(defaults.resolve_attention_backend)
        patches.register()

    # -- configuration ---------------------------------------------------------------------

    def get_device(self, device_id: int = 0) -> Any:
        """SGLang's ``--device`` when the user gives none."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open."""
        defaults.apply(server_args)

    def get_default_attention_backend(self) -> str:
        """The attention backend of every model role."""
        return NAME

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """The drafter's attention backend."""
        return NAME

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Whether the algorithm was made to run here."""
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Whether a drafter may use the attention backend."""
        return backend == NAME

    # -- what the model runs on ------------------------------------------------------------

    def init_backend(self) -> None:
        """Register the attention backend and the layers; called before a model is built."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_dflash.platforms import layers

        register_attention_backend(NAME)(_create_attention_backend)
        layers.register(self.get_dispatch_key_name())
        patches.verify()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Switch the drafter off Triton and let it run in any dtype; pack weights."""
        from sglang_dflash.platforms.linear import pack_weights

        pack_weights(model)
        if hasattr(model, "project_target_hidden"):
            from sglang_dflash.draft import accept_any_dtype

            accept_any_dtype(model)
        for module in model.modules():
            if hasattr(module, "use_table_qk_norm_rope"):
                module.use_table_qk_norm_rope = False

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """The K/V pool of dense multi-head models; other kinds stay SGLang's."""
        from sglang_dflash.platforms.kv_pool import CpuKVPool

        return CpuKVPool if kind == "mha" else None

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Slots of the verify window."""
        return patches.assign_extend_cache_locs

    def get_dispatch_key_name(self) -> str:
        """Key of this platform's layers in SGLang's operator registry."""
        return NAME

    def get_compile_backend(self, mode: str | None = None) -> str:
        """``torch.compile`` runs the function as it is."""
        return "eager"

    # -- profiling -------------------------------------------------------------------------

    def get_torch_profiler_activity_str(self) -> str:
        """Name ``/start_profile`` knows this device by."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """The torch activity of that name."""
        return torch.profiler.ProfilerActivity.CPU


def _create_attention_backend(runner: Any) -> Any:
    from sglang_dflash.platforms.attention import CpuAttentionBackend

    return CpuAttentionBackend(runner)
