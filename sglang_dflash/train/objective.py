"""The loss: cross entropy of drafted positions under the target's frozen head.

Early positions of a block matter more, since a wrong one voids all after it. Two weightings:

* ``exponential``: ``w_k = exp(-(k-1) / gamma)`` (arXiv 2602.06036, section 4);
* ``dpace``: ``w_k = sum_{m>=k} prod_{i<=m} s_i`` with ``s_i = (1-alpha) q_i + alpha`` and ``q_i``
  the probability the drafter gives the label now (D-PACE, arXiv 2605.18810).

The label may be softened by what the target thought (distillation): a row's aim is then
``(1 - share) * onehot(label) + share * p``, with p the target's distribution over its K likeliest
tokens. A label says which token came; p says what else might have.

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


class SoftLabels(NamedTuple):
    """The target's distribution at drafted rows, over its K likeliest tokens."""

    ids: torch.Tensor
    """``[.., K]`` int64 rows of the head."""
    probabilities: torch.Tensor
    """``[.., K]``, summing to 1."""


class Outcome(NamedTuple):
    """What a batch of blocks came to."""

    loss: torch.Tensor
    """Weighted cross entropy, summed; differentiable."""
    weight: torch.Tensor
    """Sum of the weights."""
    accepted: torch.Tensor
    """``[n]`` int64: leading drafted tokens that are right, per block."""


@torch.no_grad()
def likeliest(hidden: torch.Tensor, head: torch.Tensor, count: int) -> SoftLabels:
    """The target's distributions, cut to their likeliest tokens and renormalised.

    Args:
        hidden: ``[B, S, H]`` decoder outputs.
        head: ``[V, H]``.
        count: K.

    Returns:
        ``[B, S, K]`` each.
    """
    best = [(rows @ head.T).float().topk(count) for rows in hidden.flatten(0, 1).split(256)]
    ids = torch.cat([part.indices for part in best])
    probabilities = torch.cat([part.values for part in best]).softmax(-1)
    shape = (*hidden.shape[:2], count)
    return SoftLabels(ids.view(shape), probabilities.view(shape))


def block_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    labelled: torch.Tensor,
    weighting: Weighting,
    chunk: int = 128,
    soft: SoftLabels | None = None,
    share: float = 0.0,
) -> Outcome:
    """Loss of drafted rows.

    Args:
        hidden: ``[n, bs-1, H]`` hidden states of rows ``1 ..``.
        head: ``[V, H]`` the target's head; gets no gradient.
        labels: ``[n, bs-1]`` int64.
        labelled: ``[n, bs-1]`` bool.
        weighting: of positions.
        chunk: blocks whose logits are held at once.
        soft: ``[n, bs-1, K]`` each; None when the labels are all there is.
        share: of the aim that ``soft`` has, 0 to 1.
    """
    ids, aim = labels.unsqueeze(-1), torch.ones(*labels.shape, 1, device=labels.device)
    if soft is not None:
        ids = torch.cat((ids, soft.ids), -1)
        aim = torch.cat(((1 - share) * aim, share * soft.probabilities), -1)
    loss, weight, accepted = _BlockLoss.apply(hidden, head, ids, aim, labelled, weighting, chunk)
    return Outcome(loss, weight, accepted)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, head, ids, aim, labelled, weighting, chunk):  # type: ignore
        # The first id of a row is its label.
        labels = ids[..., 0]
        loss = torch.zeros((), device=hidden.device)
        weight = torch.zeros((), device=hidden.device)
        accepted = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part].to(head.dtype) @ head.T).float()
            right = (logits.argmax(-1) == labels[part]) & labelled[part]
            accepted[part] = right.long().cumprod(-1).sum(-1)
            total = logits.logsumexp(-1)
            log_q = logits.gather(-1, ids[part]) - total.unsqueeze(-1)
            w = weighting.weights(log_q[..., 0], labelled[part])
            loss -= (w * (aim[part] * log_q).sum(-1)).sum()
            weight += w.sum()
            # d(-w sum aim log q)/d logits = w (softmax - aim)
            slope = logits.sub_(total.unsqueeze(-1)).exp_()
            slope.scatter_add_(-1, ids[part], -aim[part])
            slope.mul_(w.unsqueeze(-1))
            gradient[part] = (slope.to(head.dtype) @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, accepted)
        return loss, weight, accepted

    @staticmethod
    def backward(ctx: Any, grad_loss, *_):  # type: ignore
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None, None, None
