"""The accept length a drafter reaches on given answers: the figure a server gives, without one.

At temperature 0 a server's rounds are determined by the answer: a block at anchor ``a`` is
accepted up to its first token that differs from the answer's, and the next anchor is the token
after. So all positions of an answer are drafted at once, and the rounds walked afterwards
(arXiv 2602.06036, section 5: accept length = committed tokens per round, bonus token included).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_dflash.kernels.accept import accept
from sglang_dflash.kernels.merge_topk import Candidates, merge_topk
from sglang_dflash.kernels.topk import topk
from sglang_dflash.proposal import TreeProposer, TreeShape
from sglang_dflash.train import blocks
from sglang_dflash.train.features import FrozenTarget
from sglang_dflash.train.fit import autocast
from sglang_dflash.train.model import DraftModel
from sglang_dflash.train.records import Record

NO_TOKEN = -1
"""Where an answer has ended; no drafted token equals it."""


@dataclass
class Score:
    """Rounds over a set of answers."""

    rounds: int = 0
    tokens: int = 0
    """Answer tokens after the first, which the prefill gives."""
    offered: list[int] = field(default_factory=list)
    """Rounds in which position ``k+1`` of the block was drafted and had a token to meet."""
    accepted: list[int] = field(default_factory=list)
    """Rounds in which it was accepted."""

    @property
    def accept_length(self) -> float:
        """Mean tokens a round commits; 1.0 is plain decoding's."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """Share of rounds that accept each drafted position."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    def add(self, lengths: Sequence[int], block_size: int) -> None:
        """Walk one answer.

        Args:
            lengths: right drafted tokens at every position of the answer but the last.
            block_size: rows of a block, anchor included.
        """
        drafted = block_size - 1
        self.offered = self.offered or [0] * drafted
        self.accepted = self.accepted or [0] * drafted
        at, last = 0, len(lengths)
        while at < last:
            right = min(lengths[at], last - at)
            for k in range(min(drafted, last - at)):
                self.offered[k] += 1
                self.accepted[k] += k < right
            self.rounds += 1
            at += right + 1
        self.tokens += last

    def merge(self, other: Score) -> None:
        """Add another set's rounds."""
        self.rounds += other.rounds
        self.tokens += other.tokens
        size = max(len(self.offered), len(other.offered))
        for mine, theirs in ((self.offered, other.offered), (self.accepted, other.accepted)):
            mine.extend([0] * (size - len(mine)))
            for k, value in enumerate(theirs):
                mine[k] += value

    def to_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "accept_length": round(self.accept_length, 4),
            "by_position": [round(share, 4) for share in self.by_position],
            "rounds": self.rounds,
            "tokens": self.tokens,
        }


def score(
    model: DraftModel,
    target: FrozenTarget,
    records: Sequence[Record],
    *,
    dtype: str = "bfloat16",
    rows: int = 256,
    tree: TreeShape | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Score]:
    """Accept lengths on answers the target gave at temperature 0.

    Args:
        model: the drafter.
        target: its target.
        records: prompts with answers.
        dtype: of autocast, as served.
        rows: block rows computed at once; their logits stay in a CPU's caches.
        tree: what is verified of a block; None is the chain of likeliest tokens.
        advance: told how many records are done.

    Returns:
        A score by source, and ``all``.
    """
    return replay(model, target, records, [tree], dtype=dtype, rows=rows, advance=advance)[0]


def replay(
    model: DraftModel,
    target: FrozenTarget,
    records: Sequence[Record],
    shapes: Sequence[TreeShape | None],
    *,
    dtype: str = "bfloat16",
    rows: int = 256,
    advance: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Score]]:
    """What :func:`score` gives for each of several shapes, drafting every block once."""
    found: list[dict[str, Score]] = [{"all": Score()} for _ in shapes]
    for number, record in enumerate(records, 1):
        lengths = accept_lengths(model, target, record, dtype, rows, shapes)
        for scores, right in zip(found, lengths, strict=True):
            one = Score()
            one.add(right, model.block_size)
            scores.setdefault(record.source, Score()).merge(one)
            scores["all"].merge(one)
        advance(number)
    return found


@torch.no_grad()
def accept_lengths(
    model: DraftModel,
    target: FrozenTarget,
    record: Record,
    dtype: str,
    rows: int,
    shapes: Sequence[TreeShape | None] = (None,),
) -> list[list[int]]:
    """Right drafted tokens at every position of an answer but the last, shape by shape."""
    device, size = target.device, model.block_size
    tokens = torch.tensor([record.tokens], device=device)
    start, end = len(record.prompt_ids), tokens.shape[1]
    in_response = torch.arange(end, device=device).unsqueeze(0) >= start
    features = target.features(tokens)
    found: list[list[int]] = [[] for _ in shapes]
    for anchors in torch.arange(start, end - 1, device=device).split(max(1, rows // size)):
        kept = torch.ones(1, len(anchors), dtype=torch.bool, device=device)
        made = blocks.build(
            tokens, in_response, anchors.unsqueeze(0), kept, size, model.mask_token_id
        )
        with autocast(dtype, device):
            hidden = model(target.embed(made.tokens), features, made.anchors)[0, :, 1:]
        # Two dimensions: torch would multiply block by block, reading the head anew for each.
        logits = hidden.flatten(0, 1).to(target.head.dtype) @ target.head.T
        labels = made.labels[0].masked_fill(~made.labelled[0], NO_TOKEN)
        for right, count in zip(found, right_tokens(logits, labels, shapes), strict=True):
            right += count.tolist()
    return found


def right_tokens(
    logits: torch.Tensor, labels: torch.Tensor, shapes: Sequence[TreeShape | None]
) -> list[torch.Tensor]:
    """How far the text is followed in the chain or tree of every block, shape by shape.

    Args:
        logits: ``[T*D, V]`` of the drafted positions, block by block.
        labels: ``[T, D]`` int64 tokens of the text, :data:`NO_TOKEN` past its end.
        shapes: how trees are grown; None is the chain.

    Returns:
        ``[T]`` accepted drafted tokens for each shape.
    """
    chain = (logits.argmax(-1).view(labels.shape) == labels).long().cumprod(-1).sum(-1)
    widest = max((shape.candidates for shape in shapes if shape is not None), default=0)
    best = merge_topk(topk(logits, widest), widest) if widest else None
    return [
        chain if shape is None or best is None else _right_in_tree(best, labels, shape)
        for shape in shapes
    ]


def _right_in_tree(best: Candidates, labels: torch.Tensor, tree: TreeShape) -> torch.Tensor:
    count, depths = labels.shape
    columns = slice(0, tree.candidates)
    few = best._replace(
        ids=best.ids[:, columns].contiguous(), log_q=best.log_q[:, columns].contiguous()
    )
    anywhere = labels.new_zeros(count)
    grown = TreeProposer(tree).propose(anywhere, anywhere.unsqueeze(1), few)
    # After a row at depth d the text goes on with label d, whatever the row holds.
    following = torch.nn.functional.pad(labels, (0, 1), value=NO_TOKEN)
    choice = following.gather(1, grown.depths.long())
    links = grown.parents, grown.depths, grown.ancestors
    accepted = accept(grown.tokens, *links, choice, anywhere, output_width=depths + 1)
    return accepted.accept_lengths - 1
