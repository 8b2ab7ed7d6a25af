"""The frozen target, its tapped layers, and a bounded cache of what was read from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class FrozenTarget:
    """The target in evaluation mode, run for its hidden states alone.

    Args:
        path: Hugging Face folder or id of a causal LM.
        layer_ids: layers whose output residual stream is tapped, increasing.
        dtype: of the weights; use the dtype the target is served in.
        device: where it runs.
        whole: keep the layers behind the last tap too, for :meth:`read`'s hidden states.

    Raises:
        TrainError: the model does not expose what a drafter needs.
    """

    def __init__(
        self,
        path: str,
        layer_ids: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        whole: bool = False,
    ):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
        self.model = model.eval().requires_grad_(False).to(device)
        self.config = model.config
        self.device = device
        self.layer_ids = list(layer_ids)
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: torch.Tensor = model.get_output_embeddings().weight
        decoder = model.get_decoder()
        self.final_norm: torch.Tensor = decoder.norm.weight
        if not whole:
            # Layers after the last tap cannot change a feature.
            decoder.layers = decoder.layers[: self.layer_ids[-1] + 1]
            decoder.norm = nn.Identity()
        self._decoder = decoder
        self._taps: dict[int, torch.Tensor] = {}
        for layer in self.layer_ids:
            decoder.layers[layer].register_forward_hook(self._tap(layer))

    def _tap(self, layer: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._taps[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Features of right-padded sequences.

        Args:
            tokens: ``[B, S]`` int64; padding is behind the text, where causality keeps it harmless.

        Returns:
            ``[B, S, K * H]``: the residual stream after each tapped layer, side by side.
        """
        return self.read(tokens)[0]

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`features`, and the hidden states that come out of the decoder.

        Returns:
            ``[B, S, K * H]`` and ``[B, S, H]``; the second is what the head reads, when the target
            was loaded ``whole``.
        """
        output = self._decoder(input_ids=tokens.to(self.device), use_cache=False)
        taps = [self._taps[layer] for layer in self.layer_ids]
        self._taps.clear()
        return torch.cat(taps, -1), output.last_hidden_state

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[..]`` token ids to ``[.., H]`` input embeddings, scaled as the target scales them."""
        return self.embedding(tokens)


class RowCache:
    """Rows of whole sequences on disk, up to a limit; the rest are computed every time.

    Args:
        file: it is working data and starts empty.
        lengths: rows of every sequence, one a token.
        width: values of a row.
        limit_bytes: largest size of the file.
        dtype: of the values, which are kept exactly.
    """

    def __init__(
        self,
        file: Path,
        lengths: Sequence[int],
        width: int,
        limit_bytes: int,
        dtype: torch.dtype,
    ):
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        row = dtype.itemsize * width
        self._rows = (
            int(np.searchsorted(offsets * row, limit_bytes, side="right") - 1) if row else 0
        )
        self._offsets = offsets
        self._done = np.zeros(len(lengths), dtype=bool)
        self._dtype = dtype
        # numpy has no bfloat16: values are stored as integers of their size.
        self._bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        self._store: np.memmap | None = None
        if self._rows > 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._store = np.memmap(
                file,
                dtype=f"i{dtype.itemsize}",
                mode="w+",
                shape=(int(offsets[self._rows]), width),
            )

    @property
    def share(self) -> float:
        """Share of all tokens that fit."""
        return float(self._offsets[self._rows] / self._offsets[-1])

    def get(self, index: int) -> torch.Tensor | None:
        """``[S, width]`` rows of a sequence, or None."""
        if self._store is None or not self._done[index]:
            return None
        rows = self._store[self._offsets[index] : self._offsets[index + 1]]
        return torch.from_numpy(np.array(rows)).view(self._dtype)

    def put(self, index: int, values: torch.Tensor) -> None:
        """Keep a sequence's rows if its place is within the limit."""
        if self._store is None or index >= self._rows:
            return
        rows = values.to("cpu", self._dtype).contiguous().view(self._bits).numpy()
        self._store[self._offsets[index] : self._offsets[index + 1]] = rows
        self._done[index] = True
