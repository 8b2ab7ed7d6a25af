"""Projections with weights in oneDNN's blocked layout.

``F.linear`` hands oneDNN a row-major weight, which it reads with strides that waste bandwidth.
Laid out once, the 120 projections of a 135M Llama take 12 instead of 18 ms for up to 8 rows and
18 instead of 27 ms for 64 (2 cores with AMX), and its head of 49,152 tokens 1.5 instead of 3.1 ms
for 8 rows (2 cores without). There float32 gains nothing for one row, and keeps ``F.linear``.

A processor without bfloat16 arithmetic serves in float32, and there float32 is laid out: the same
head takes 4.0 instead of 7.7 ms for one row and 6.0 instead of 18.4 for 8, a projection of 1536 by
576 0.15 instead of 0.27 ms and 0.22 instead of 0.52 (2 cores of an AMD EPYC with AVX2).
"""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch.nn import functional as F

from sglang_dflash.platforms.defaults import has_fast_bfloat16

logger = logging.getLogger(__name__)

EXPECTED_ROWS = 16
"""Rows the layout is chosen for; it serves any number (1 to 64 measured within 5 %)."""

PADDED_STEPS = ((128, 8), (512, 16), (4096, 64))
"""Rows up to the first number of a pair are padded to a multiple of the second. oneDNN keeps
kernels and buffers for the last 1024 shapes it saw: with prompts of every length those of the demo
target grow by 690 MB, with padding by 80, for 5 % more time above 16 rows."""

MEMORY_SHARE = 0.25
"""Share of the free memory the blocked copies may take."""

UPDATE_ERROR = (
    "Weights cannot be updated online on the CPU platform in {packed}: projections are served "
    "from a blocked copy of their weights. Restart the server with the new weights, or serve "
    "with --dtype {unpacked}."
)


def packed_dtype() -> torch.dtype:
    """The dtype whose projections gain from the layout on this processor."""
    return torch.bfloat16 if has_fast_bfloat16() else torch.float32


class PackedWeight:
    """A weight in blocked layout.

    Args:
        weight: ``[out, in]`` of :func:`packed_dtype`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., in] @ weight.T + bias``, as ``[..., out]``."""
        rows = x.numel() // x.shape[-1]
        padding = padded_rows(rows) - rows
        if padding and x.dim() == 2:
            return self._product(F.pad(x, (0, 0, 0, padding)), bias)[:rows]
        return self._product(x, bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


class PackedLinearMethod(UnquantizedLinearMethod):
    """Applies one layer's weight from a blocked copy.

    The row-major weight stays where it is, for whatever else reads it.

    Args:
        weight: ``[out, in]`` of :func:`packed_dtype`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = PackedWeight(weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x [..., in] @ weight.T + bias``, as ``[..., out]``."""
        if x.dtype != self._weight.dtype or x.numel() == 0:
            return F.linear(x, layer.weight, bias)
        return self._weight.product(x, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """Applies an LM head from a blocked copy; a tied embedding goes on reading its rows.

    Args:
        weight: ``[vocabulary, in]`` of :func:`packed_dtype`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = PackedWeight(weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x [T, in] @ weight.T + bias``, as ``[T, vocabulary]`` in the weight's dtype."""
        x = x.to(self._weight.dtype)
        return self._weight.product(x, bias) if x.numel() else F.linear(x, layer.weight, bias)


def greedy_tokens(head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor | None:
    """Likeliest token of each of ``[T, in]`` hidden states under a packed head.

    Returns:
        ``[T]`` int64; None when the head is not packed, or this rank has a part of it only.
    """
    shard = getattr(head, "shard_indices", None)
    whole = getattr(head, "tp_size", 1) == 1 and (shard is None or not shard.num_added_elements)
    if not whole or not isinstance(getattr(head, "quant_method", None), PackedHeadMethod):
        return None
    logits = head.quant_method.apply(head, hidden)
    if shard is not None:
        logits = logits[:, : shard.num_org_elements]
    return logits.max(-1).indices


def padded_rows(rows: int) -> int:
    """Rows computed for ``rows`` rows; see :data:`PADDED_STEPS`."""
    if rows <= EXPECTED_ROWS:
        return rows
    for limit, step in PADDED_STEPS:
        if rows <= limit:
            return -(-rows // step) * step
    return rows


def pack_weights(model: torch.nn.Module) -> int:
    """Serve a model's unquantised weights from blocked copies, where that is faster and fits.

    Args:
        model: a loaded SGLang model.

    Returns:
        How many projections were switched, a head included.
    """
    methods: dict[torch.nn.Module, type] = {
        module: PackedLinearMethod
        for module in model.modules()
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
    }
    head = getattr(model, "lm_head", None)
    plain = type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
    if head is not None and plain and _plain_logits(model):
        methods[head] = PackedHeadMethod
    methods = {m: method for m, method in methods.items() if m.weight.dtype == packed_dtype()}
    if not methods or not torch.backends.mkldnn.is_available():
        return 0
    size = sum(module.weight.nbytes for module in methods)
    free = psutil.virtual_memory().available
    if size > MEMORY_SHARE * free:
        logger.info(
            "Projections stay row-major: blocked copies would take %.1f of %.1f GB free memory.",
            size / 1e9,
            free / 1e9,
        )
        return 0
    names = ("bfloat16", "float32") if has_fast_bfloat16() else ("float32", "bfloat16")
    update_error = UPDATE_ERROR.format(packed=names[0], unpacked=names[1])
    for module, method in methods.items():
        module.quant_method = method(module.weight.data)
        # SGLang's weight updater refuses with this text.
        module._derived_weight_cache_error = update_error  # type: ignore[assignment]
    logger.info("%d projections in blocked layout (%.2f GB).", len(methods), size / 1e9)
    return len(methods)


def _plain_logits(model: torch.nn.Module) -> bool:
    """Whether the launch leaves the precision of the head alone."""
    processor: Any = getattr(model, "logits_processor", None)
    return processor is not None and not (
        processor.use_fp32_lm_head
        or processor.use_fp32_lm_head_output
        or processor.rl_on_policy_target is not None
    )
