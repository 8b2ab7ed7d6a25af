"""The weights a run starts from."""

from __future__ import annotations

import torch
from torch import nn

from sglang_dflash.train.features import FrozenTarget
from sglang_dflash.train.model import DraftModel, Layer


@torch.no_grad()
def initialise(model: DraftModel, target: FrozenTarget, kind: str) -> None:
    """Set a drafter's first weights.

    Args:
        model: the drafter.
        target: what it drafts for. Its final norm is taken over in any case: the head behind it is
            the target's.
        kind: ``random``: matrices normal with the target's ``initializer_range``; ``target``:
            besides, layers copied from the target's last ones, and ``fc`` passing the last tap
            through, so that the context's keys and values start as nearly the target's own.
    """
    std = getattr(target.config, "initializer_range", 0.02)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=std)
    model.norm.weight.copy_(target.final_norm)
    if kind == "target":
        _copy_layers(model, target)


def _copy_layers(model: DraftModel, target: FrozenTarget) -> None:
    hidden = model.config.hidden_size
    sources = target.layers[-len(model.layers) :]
    model.fc.weight.mul_(0.1)
    model.fc.weight[:, -hidden:] += torch.eye(hidden, device=model.fc.weight.device)
    model.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)  # type: ignore[union-attr]
    for layer, source in zip(model.layers, sources, strict=True):
        assert isinstance(layer, Layer)
        found = dict(source.named_parameters())
        for name, parameter in layer.named_parameters():
            if name in found and found[name].shape == parameter.shape:
                parameter.copy_(found[name])
