"""Optimiser and schedule, as one object whose state is tensors."""

from __future__ import annotations

import math

import torch
from torch import nn

from sglang_dflash.train.config import Fit

FLOOR = 0.03
"""Share of the peak learning rate the cosine ends at."""


class Optimizer:
    """AdamW on every parameter, or Muon on the matrices and AdamW on the rest.

    Args:
        model: float32 master weights.
        settings: learning rates, schedule and clipping.
        total_steps: length of the schedule.
    """

    def __init__(self, model: nn.Module, settings: Fit, total_steps: int):
        self._settings = settings
        self._total = total_steps
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        matrices = [p for p in self._names if p.dim() == 2 and settings.optimizer == "muon"]
        rest = [p for p in self._names if p.dim() != 2 or settings.optimizer != "muon"]
        decay = settings.weight_decay
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                rest, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=decay
            )
        ]
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=settings.muon_learning_rate, momentum=0.95, weight_decay=decay
            )
            self._parts.append(muon)
        self._peaks = [part.param_groups[0]["lr"] for part in self._parts]

    def rate(self, step: int) -> float:
        """Share of the peak learning rate at a step: linear warm-up, then a cosine."""
        warmup = max(1, round(self._settings.warmup * self._total))
        if step < warmup:
            return (step + 1) / warmup
        along = (step - warmup) / max(1, self._total - warmup)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))

    def step(self, step: int) -> float:
        """Clip, update and clear the gradients; returns the gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(list(self._names), self._settings.clip)
        for part, peak in zip(self._parts, self._peaks, strict=True):
            part.param_groups[0]["lr"] = peak * self.rate(step)
            part.step()
            part.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, torch.Tensor]:
        """Every state tensor, named ``parameter|key``."""
        return {
            f"{self._names[parameter]}|{key}": torch.as_tensor(value)
            for part in self._parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take up a state from :meth:`state`."""
        owners = {name: p for p, name in self._names.items()}
        parts = {p: part for part in self._parts for p in part.param_groups[0]["params"]}
        for name, tensor in tensors.items():
            parameter, key = name.split("|")
            owner = owners[parameter]
            on = "cpu" if tensor.dim() == 0 else owner.device
            parts[owner].state[owner][key] = tensor.to(on)
