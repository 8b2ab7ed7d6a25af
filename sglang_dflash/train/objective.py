"""The loss: cross entropy of drafted positions under the target's frozen head.

Early positions of a block matter more, since a wrong one voids all after it. Two weightings:

* ``exponential``: ``w_k = exp(-(k-1) / gamma)`` (arXiv 2602.06036, section 4);
* ``dpace``: ``w_k = sum_{m>=k} prod_{i<=m} s_i`` with ``s_i = (1-alpha) q_i + alpha`` and ``q_i``
  the probability the drafter gives the label now (D-PACE, arXiv 2605.18810).

The head is a frozen ``[V, H]`` matrix with V large, so logits exist for one chunk of blocks at a
time: the gradient with respect to the hidden states is worked out in the forward pass and kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Weighting(NamedTuple):
    """How drafted positions are weighted."""

    kind: str
    """``exponential`` or ``dpace``."""
    gamma: float = 4.0
    """Decay of ``exponential``, in positions."""
    alpha: float = 0.5
    """Smoothing of ``dpace``."""

    def weights(self, log_q: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
        """``[n, bs-1]`` weights, zero where there is no label.

        Args:
            log_q: ``[n, bs-1]`` log-probabilities of the labels.
            labelled: ``[n, bs-1]`` bool.
        """
        mask = labelled.to(log_q.dtype)
        if self.kind == "exponential":
            k = torch.arange(log_q.shape[1], device=log_q.device, dtype=log_q.dtype)
            return mask * torch.exp(-k / self.gamma)
        smoothed = ((1 - self.alpha) * log_q.exp() + self.alpha) * mask
        reached = smoothed.cumprod(-1)
        return reached.flip(-1).cumsum(-1).flip(-1) * mask


class Outcome(NamedTuple):
    """What a batch of blocks came to."""

    loss: torch.Tensor
    """Weighted cross entropy, summed; differentiable."""
    weight: torch.Tensor
    """Sum of the weights."""
    accepted: torch.Tensor
    """``[n]`` int64: leading drafted tokens that are right, per block."""


def block_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    labelled: torch.Tensor,
    weighting: Weighting,
    chunk: int = 128,
) -> Outcome:
    """Loss of drafted rows.

    Args:
        hidden: ``[n, bs-1, H]`` hidden states of rows ``1 ..``.
        head: ``[V, H]`` the target's head; gets no gradient.
        labels: ``[n, bs-1]`` int64.
        labelled: ``[n, bs-1]`` bool.
        weighting: of positions.
        chunk: blocks whose logits are held at once.
    """
    loss, weight, accepted = _BlockLoss.apply(hidden, head, labels, labelled, weighting, chunk)
    return Outcome(loss, weight, accepted)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, head, labels, labelled, weighting, chunk):  # type: ignore
        loss = torch.zeros((), device=hidden.device)
        weight = torch.zeros((), device=hidden.device)
        accepted = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part].to(head.dtype) @ head.T).float()
            target = labels[part].unsqueeze(-1)
            right = (logits.argmax(-1) == labels[part]) & labelled[part]
            accepted[part] = right.long().cumprod(-1).sum(-1)
            total = logits.logsumexp(-1)
            log_q = logits.gather(-1, target).squeeze(-1) - total
            w = weighting.weights(log_q, labelled[part])
            loss -= (w * log_q).sum()
            weight += w.sum()
            # d(-w log q)/d logits = w (softmax - onehot)
            slope = logits.sub_(total.unsqueeze(-1)).exp_()
            slope.scatter_add_(-1, target, torch.full_like(target, -1, dtype=slope.dtype))
            slope.mul_(w.unsqueeze(-1))
            gradient[part] = (slope.to(head.dtype) @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, accepted)
        return loss, weight, accepted

    @staticmethod
    def backward(ctx: Any, grad_loss, *_):  # type: ignore
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None, None
