"""Choosing between a kernel and its reference."""

from __future__ import annotations

import os

import torch

from sglang_dflash.kernels._launch import jit, next_power_of_two, tl, triton

__all__ = ["jit", "next_power_of_two", "runs_kernel", "tl"]


def runs_kernel(tensor: torch.Tensor) -> bool:
    """Whether an operation on this tensor launches its Triton kernel.

    True on CUDA. On the CPU only under ``TRITON_INTERPRET=1`` together with
    ``SGLANG_DFLASH_INTERPRET_KERNELS=1``, as the kernel tests set it: interpreted kernels are
    far too slow to serve.
    """
    if tensor.is_cuda:
        return True
    return bool(
        triton is not None
        and os.environ.get("TRITON_INTERPRET") == "1"
        and os.environ.get("SGLANG_DFLASH_INTERPRET_KERNELS") == "1"
    )
