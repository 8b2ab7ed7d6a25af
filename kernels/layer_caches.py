"""The caches of all layers as one launch sees them: by address."""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes the kernels may assume each cache's address to be a multiple of."""


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
