"""Server arguments on the CPU: what is filled in, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.platforms import NAME

logger = logging.getLogger(__name__)

MAX_TOTAL_TOKENS = 32_768
"""K/V slots when the user sizes nothing: SGLang's own rule is a share of the machine's memory,
which on a CPU host others use too. 0.75 GB for a 135M Llama in bfloat16."""

MAX_RUNNING_REQUESTS = 16
"""Requests decoded together when the user sets no number."""

SERVING_BACKENDS = (NAME, "torch_native")
"""Attention backends that run on the CPU; only the first verifies drafts."""


def has_fast_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 here, rather than PyTorch row by row."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def apply(server_args: Any) -> None:
    """Fill in sizes and switches the user left open.

    Args:
        server_args: SGLang's arguments while they are being resolved; attributes may be set.
    """
    if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
        server_args.max_total_tokens = MAX_TOTAL_TOKENS
    if server_args.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    if server_args.dtype == "auto" and not has_fast_bfloat16():
        server_args.dtype = "float32"
        logger.warning(
            "--dtype auto: serving in float32, because oneDNN finds no bfloat16 arithmetic in this "
            "processor, and a block of rows would cost as much as so many single ones. "
            "--dtype bfloat16 serves in bfloat16 all the same, in half the memory."
        )
    # An idle scheduler that polls takes a core from whatever else runs on the host.
    server_args.sleep_on_idle = True


def resolve_attention_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Choose the attention backend before SGLang's rule for its own CPU build does.

    Args:
        server_args: SGLang's arguments while they are being resolved.
        previous: SGLang's own step.

    Raises:
        ValueError: a flag names a device or an attention backend that cannot run here.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.device != "cpu":
        raise ValueError(
            f"--device {view.device} with SGLANG_PLATFORM={NAME}: this platform serves on the "
            "CPU only. Drop --device, or unset SGLANG_PLATFORM."
        )
    if view.attention_backend is None:
        declare_resolution(server_args, f"platform:{NAME}", attention_backend=NAME)
    usable = SERVING_BACKENDS if view.speculative_algorithm is None else SERVING_BACKENDS[:1]
    for flag in (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    ):
        backend = getattr(view, flag)
        if backend is not None and backend not in usable:
            raise ValueError(
                f"--{flag.replace('_', '-')} {backend} with SGLANG_PLATFORM={NAME}: it does not "
                f"run on the CPU{' with speculative decoding' if len(usable) == 1 else ''}. "
                f"Drop the flag, or use {' or '.join(usable)}."
            )
    previous(server_args)
