"""bfloat16 projections with weights in oneDNN's blocked layout.

``F.linear`` hands oneDNN a row-major weight, which it reads with strides that waste bandwidth.
Laid out once, the 120 projections of a 135M Llama take 12 instead of 18 ms for up to 8 rows and
18 instead of 27 ms for 64 (2 cores with AMX). float32 gains nothing for one row, and keeps
``F.linear``.
"""

from __future__ import annotations

import logging

import psutil
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch.nn import functional as F

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
    "Weights cannot be updated online on the CPU platform in bfloat16: projections are served "
    "from a blocked copy of their weights. Restart the server with the new weights, or serve "
    "with --dtype float32."
)


class PackedLinearMethod(UnquantizedLinearMethod):
    """Applies one layer's weight from a blocked copy.

    The row-major weight stays where it is, for whatever else reads it.

    Args:
        weight: ``[out, in]`` bfloat16.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x [..., in] @ weight.T + bias``, as ``[..., out]``."""
        if x.dtype != torch.bfloat16 or x.numel() == 0:
            return F.linear(x, layer.weight, bias)
        rows = x.numel() // x.shape[-1]
        padding = padded_rows(rows) - rows
        if padding and x.dim() == 2:
            x = F.pad(x, (0, 0, 0, padding))
            return self._apply_packed(x, bias)[:rows]
        return self._apply_packed(x, bias)

    def _apply_packed(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


def padded_rows(rows: int) -> int:
    """Rows computed for ``rows`` rows; see :data:`PADDED_STEPS`."""
    if rows <= EXPECTED_ROWS:
        return rows
    for limit, step in PADDED_STEPS:
        if rows <= limit:
            return -(-rows // step) * step
    return rows


def pack_weights(model: torch.nn.Module) -> int:
    """Serve a model's unquantised bfloat16 projections from blocked copies, if memory allows.

    Args:
        model: a loaded SGLang model.

    Returns:
        How many projections were switched.
    """
    layers = [
        module
        for module in model.modules()
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
        and module.weight.dtype == torch.bfloat16
    ]
    if not layers or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    size = sum(layer.weight.nbytes for layer in layers)
    free = psutil.virtual_memory().available
    if size > MEMORY_SHARE * free:
        logger.info(
            "Projections stay row-major: blocked copies would take %.1f of %.1f GB free memory.",
            size / 1e9,
            free / 1e9,
        )
        return 0
    for layer in layers:
        layer.quant_method = PackedLinearMethod(layer.weight.data)
        # SGLang's weight updater refuses with this text.
        layer._derived_weight_cache_error = UPDATE_ERROR
    logger.info("%d projections in blocked layout (%.2f GB).", len(layers), size / 1e9)
    return len(layers)
