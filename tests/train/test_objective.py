"""The loss equals its formula, in chunks or at once, with its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from sglang_dflash.train.objective import SoftLabels, Weighting, block_loss

BLOCKS, DRAFTED, HIDDEN, VOCABULARY = 7, 3, 8, 20


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BLOCKS, DRAFTED, HIDDEN, generator=generator, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(VOCABULARY, (BLOCKS, DRAFTED), generator=generator)
    labelled = torch.tensor([[True] * 3] * 4 + [[True, True, False]] * 2 + [[False] * 3])
    return hidden, head, labels, labelled


@pytest.mark.parametrize("kind", ["exponential", "dpace"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_loss_and_gradient_equal_autograds(kind: str, chunk: int) -> None:
    hidden, head, labels, labelled = case()
    weighting = Weighting(kind)
    got = block_loss(hidden, head, labels, labelled, weighting, chunk)
    (3 * got.loss).backward()
    gradient, hidden.grad = hidden.grad, None

    entropy = F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten(), reduction="none")
    entropy = entropy.view_as(labels)
    weights = weighting.weights(-entropy.detach(), labelled)
    want = (weights * entropy).sum()
    (3 * want).backward()
    torch.testing.assert_close(got.loss, want)
    torch.testing.assert_close(got.weight, weights.sum())
    torch.testing.assert_close(gradient, hidden.grad)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [2, 100])
def test_distillation_equals_autograds_cross_entropy(share: float, chunk: int) -> None:
    hidden, head, labels, labelled = case()
    thought = torch.randn(BLOCKS, DRAFTED, VOCABULARY, generator=torch.Generator().manual_seed(1))
    best = thought.topk(4)
    soft = SoftLabels(best.indices, best.values.softmax(-1))
    weighting = Weighting("dpace")
    got = block_loss(hidden, head, labels, labelled, weighting, chunk, soft, share)
    got.loss.backward()
    gradient, hidden.grad = hidden.grad, None

    aim = (1 - share) * F.one_hot(labels, VOCABULARY).float()
    aim = aim + share * torch.zeros_like(thought).scatter(-1, soft.ids, soft.probabilities)
    log_q = (hidden @ head.T).log_softmax(-1)
    chosen = log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1).detach()
    want = -(weighting.weights(chosen, labelled) * (aim * log_q).sum(-1)).sum()
    want.backward()
    torch.testing.assert_close(got.loss, want)
    torch.testing.assert_close(gradient, hidden.grad)


def test_exponential_weights_decay_along_the_block() -> None:
    labelled = torch.tensor([[True, True, False]])
    weights = Weighting("exponential", gamma=4.0).weights(torch.zeros(1, 3), labelled)
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(-0.25), 0.0]]))


def test_dpace_weights_are_the_expected_continuation() -> None:
    q = torch.tensor([[0.8, 0.4, 0.6]])
    labelled = torch.ones(1, 3, dtype=torch.bool)
    weights = Weighting("dpace", alpha=0.5).weights(q.log(), labelled)
    s1, s2, s3 = 0.9, 0.7, 0.8  # (1 - alpha) q + alpha
    reached = [s1, s1 * s2, s1 * s2 * s3]
    want = torch.tensor([[sum(reached), reached[1] + reached[2], reached[2]]])
    torch.testing.assert_close(weights, want)


def test_accepted_counts_right_tokens_up_to_the_first_wrong_one() -> None:
    head = torch.eye(4)
    labels = torch.tensor([[0, 1, 2], [0, 1, 2], [3, 1, 2]])
    said = torch.tensor([[0, 1, 2], [0, 3, 2], [0, 1, 2]])
    labelled = torch.ones(3, 3, dtype=torch.bool)
    outcome = block_loss(head[said], head, labels, labelled, Weighting("dpace"))
    assert outcome.accepted.tolist() == [3, 1, 0]
