"""What the launchers share: Triton where it is installed, and per-layer tensors by address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the references need torch alone
    triton = None  # type: ignore[assignment]
    tl = None  # type: ignore[assignment]


ALIGNMENT = 16
"""Bytes the kernels may assume each cache's address to be a multiple of."""


class _NotInstalled:
    """Stands for a kernel where Triton is missing: importable, an error when launched."""

    def __init__(self, name: str):
        self._name = name

    def __getitem__(self, grid: object) -> Any:
        raise ImportError(
            f"{self._name} runs on the GPU through Triton, which is not installed here: "
            "pip install triton, or pass CPU tensors"
        )


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or a stand-in that raises when launched."""
    return _NotInstalled(function.__name__) if triton is None else triton.jit(function)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``max(value, 1)``."""
    return 1 << max(value - 1, 0).bit_length()


class LayerCaches:
    """Tensors of one layout, one per layer, that a single launch addresses together.

    Their addresses are uploaded once, here, so that a launch allocates and copies nothing. The
    tensors are kept alive; they must not be reallocated behind their addresses.

    Args:
        tensors: at least one cache ``[slots, ..]``; equal shape, dtype, strides and device,
            each row (one slot) contiguous, the first at a multiple of 16 bytes.

    Raises:
        ValueError: the tensors do not share one such layout.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        if not tensors:
            raise ValueError("LayerCaches needs at least one tensor")
        first = tensors[0]
        for index, tensor in enumerate(tensors):
            for name, value, wanted in (
                ("shape", tensor.shape, first.shape),
                ("dtype", tensor.dtype, first.dtype),
                ("strides", tensor.stride(), first.stride()),
                ("device", tensor.device, first.device),
            ):
                if value != wanted:
                    raise ValueError(
                        f"cache {index} has {name} {value}, but cache 0 has {wanted}; give caches "
                        "of another layout a LayerCaches of their own"
                    )
            if tensor.data_ptr() % ALIGNMENT:
                raise ValueError(
                    f"cache {index} starts at an address that is no multiple of {ALIGNMENT} "
                    "bytes; the kernels read and write that many at once"
                )
        if not first[:1].is_contiguous():
            raise ValueError(
                f"a cache row must be contiguous, but shape {tuple(first.shape)} has strides "
                f"{first.stride()}"
            )
        self.tensors = list(tensors)
        self.pointers = torch.tensor(
            [tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=first.device
        )
        """``[len(tensors)]`` int64 addresses, on the tensors' device."""

    @property
    def first(self) -> torch.Tensor:
        """One of the tensors, for shape, dtype and strides."""
        return self.tensors[0]

    def __len__(self) -> int:
        return len(self.tensors)
