"""Fit a drafter: frozen target, sampled blocks, weighted cross entropy.

Everything a step draws (which sequences, which anchors) is a function of the seed, the epoch and
the sequence alone, so that a resumed run continues exactly, and N processes compute what one would.
Several processes are torch's DistributedDataParallel under ``torchrun``.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from sglang_dflash.train import blocks, state
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.features import FrozenTarget, RowCache
from sglang_dflash.train.initialise import initialise, start_from
from sglang_dflash.train.model import DraftModel
from sglang_dflash.train.objective import SoftLabels, Weighting, block_loss, likeliest
from sglang_dflash.train.optimizer import Optimizer
from sglang_dflash.train.records import Record

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Published decays by block size; in between, the next larger block's."""


@dataclass
class Report:
    """What the last steps came to."""

    step: int
    steps: int
    loss: float
    accept_length: float
    """Mean over sampled blocks of the training text; a served figure is the scorer's."""
    gradient_norm: float
    tokens_per_second: float
    """Response tokens visited, counting each once a visit."""
    blocks_per_second: float
    seconds: dict[str, float] = field(default_factory=dict)
    """Time in target forward, draft forward and backward, head and optimiser."""


@dataclass
class Workers:
    """This process among those that train together."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Workers:
        """From torch's process group, where there is one."""
        if not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values


class Trainer:
    """One fit.

    Args:
        config: the training file.
        shape: the drafter's config.json.
        records: answered prompts to train on.
        target: the frozen target.
    """

    def __init__(
        self,
        config: TrainConfig,
        shape: dict[str, Any],
        records: Sequence[Record],
        target: FrozenTarget,
    ):
        self.config, self.target = config, target
        self.settings = config.fit
        self.workers = Workers.current()
        self.device = target.device
        self.sequences = [r.tokens[: config.data.max_length] for r in records]
        self.prompts = [len(r.prompt_ids) for r in records]
        torch.manual_seed(self.settings.seed)
        model = DraftModel(shape)
        initialise(model, target)
        if self.settings.start_from is not None:
            start_from(model, Path(self.settings.start_from))
        self.model = model.to(self.device)
        self.wrapped: nn.Module = self.model
        if self.workers.count > 1:
            self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        visits = len(records) * self.settings.epochs
        self.steps = self.settings.steps or max(1, visits // self.settings.sequences)
        self.optimizer = Optimizer(self.model, self.settings, self.steps)
        self.head, self.head_rows = self._head()
        objective = config.objective
        gamma = objective.gamma or default_gamma(model.block_size)
        self.weighting = Weighting(objective.weighting, gamma, objective.alpha)
        self.distilled = objective.distilled_tokens if objective.distillation else 0
        width = len(target.layer_ids) * model.config.hidden_size
        dtype = getattr(torch, self.settings.dtype)
        # A position's row: features, then ids and probabilities of the target's likeliest tokens.
        row = width * dtype.itemsize + 8 * self.distilled
        limit = self.settings.feature_cache_gib * 2**30 / row
        folder = config.folder / "features" / str(self.workers.rank)
        lengths = [len(tokens) for tokens in self.sequences]
        self.features = RowCache(
            folder / "features.bin", lengths, width, int(limit * width * dtype.itemsize), dtype
        )
        self.soft = RowCache(
            folder / "soft.bin",
            lengths,
            2 * self.distilled,
            int(limit * 8 * self.distilled),
            torch.int32,
        )
        self.identity = {
            "drafter": shape,
            "records": len(records),
            "tokens": sum(map(len, self.sequences)),
            "objective": {
                **self.weighting._asdict(),
                "distillation": objective.distillation,
                "distilled_tokens": self.distilled,
            },
            "fit": self.settings.model_dump(
                exclude={"save_every", "log_every", "feature_cache_gib", "head_chunk"}
            ),
        }
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.seconds = dict.fromkeys(("target", "draft", "head", "optimizer"), 0.0)

    # ---- the loop --------------------------------------------------------------------------

    def run(
        self, report: Callable[[Report], None], stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Train to the last step, from a saved state where there is one.

        Args:
            report: told every ``log_every`` steps.
            stop: asked after each step; True saves and returns.

        Raises:
            TrainError: the saved state is of another configuration, or the loss is not finite; the
                last good state is kept.
        """
        self.resume()
        started, blocks_seen, tokens_seen = time.perf_counter(), 0, 0
        recent: list[tuple[float, float]] = []
        while self.step < self.steps:
            batch = self.batch_of(self.step)
            loss, accepted, count, norm = self.train_step(batch)
            self.step += 1
            recent.append((loss, accepted))
            blocks_seen += count
            tokens_seen += sum(len(self.sequences[i]) - self.prompts[i] for i in batch)
            if self.step % self.settings.log_every == 0 or self.step == self.steps:
                elapsed = time.perf_counter() - started
                mean_loss, mean_accept = (sum(x) / len(recent) for x in zip(*recent, strict=True))
                made = Report(
                    self.step,
                    self.steps,
                    mean_loss,
                    mean_accept,
                    norm,
                    tokens_seen / elapsed,
                    blocks_seen / elapsed,
                    dict(self.seconds),
                )
                self.curve.append(
                    {"step": self.step, "loss": mean_loss, "accept_length": mean_accept}
                )
                recent = []
                report(made)
            stopping = stop()
            if self.step % self.settings.save_every == 0 or self.step == self.steps or stopping:
                self.save()
            if stopping:
                return

    def batch_of(self, step: int) -> list[int]:
        """Sequences of a step, over all processes: shuffled once an epoch, drawn in order."""
        total, size = len(self.sequences), self.settings.sequences
        picked = []
        for position in range(step * size, (step + 1) * size):
            epoch, offset = divmod(position, total)
            picked.append(int(self._order(epoch)[offset]))
        return picked

    def _order(self, epoch: int) -> torch.Tensor:
        if getattr(self, "_ordered", (None, None))[0] != epoch:
            generator = _generator(self.settings.seed, epoch)
            self._ordered = (epoch, torch.randperm(len(self.sequences), generator=generator))
        return self._ordered[1]

    def train_step(self, batch: Sequence[int]) -> tuple[float, float, int, float]:
        """One optimiser step over a batch of sequences.

        Returns:
            Weighted mean loss, mean accept length of the blocks, blocks, and gradient norm.
        """
        mine = list(batch)[self.workers.rank :: self.workers.count]
        parts = list(self._micro_batches(mine))
        totals = torch.zeros(4, dtype=torch.float64)
        for number, (indices, anchors) in enumerate(parts):
            last = number == len(parts) - 1
            sync = nullcontext() if last or self.workers.count == 1 else self.wrapped.no_sync()  # type: ignore[operator]
            with sync:
                outcome = self._forward(indices, anchors)
                started = time.perf_counter()
                outcome.loss.backward()
                self.seconds["draft"] += time.perf_counter() - started
            accepted = outcome.accepted
            totals += torch.tensor(
                [
                    outcome.loss.item(),
                    outcome.weight.item(),
                    accepted.sum().item() + len(accepted),
                    len(accepted),
                ],
                dtype=torch.float64,
            )
        self.workers.sum(totals)
        loss, weight, accepted_tokens, count = totals.tolist()
        if not math.isfinite(loss):
            raise TrainError(
                f"fit: the loss is {loss} at step {self.step} (sequences {list(batch)}). The state "
                f"of the last save is kept in {self.config.folder / state.FOLDER}. Lower "
                "fit.learning_rate, or look at those sequences."
            )
        started = time.perf_counter()
        # Parts were summed, and DistributedDataParallel averages over processes.
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.workers.count / max(weight, 1e-12))
        norm = self.optimizer.step(self.step)
        self.seconds["optimizer"] += time.perf_counter() - started
        return loss / max(weight, 1e-12), accepted_tokens / max(count, 1), int(count), norm

    def _micro_batches(self, indices: list[int]) -> Any:
        """Sequences with their anchors, in parts that bound rows and context tokens alike."""
        limit, size = self.settings.micro_batch_tokens, self.model.block_size
        chosen = {index: self._anchors(index) for index in indices}
        part: list[int] = []
        for index in sorted(indices, key=lambda i: len(self.sequences[i])):
            candidate = [*part, index]
            longest = len(candidate) * len(self.sequences[index])
            rows = len(candidate) * size * max(len(chosen[i]) for i in candidate)
            if part and (longest > limit or rows > limit):
                yield part, [chosen[i] for i in part]
                candidate = [index]
            part = candidate
            # One sequence may need several parts of its own.
            most = max(1, limit // size)
            while len(part) == 1 and len(chosen[index]) > most:
                yield part, [chosen[index][:most]]
                chosen[index] = chosen[index][most:]
        if part:
            yield part, [chosen[i] for i in part]

    def _anchors(self, index: int) -> torch.Tensor:
        epoch = self.step * self.settings.sequences // len(self.sequences)
        tokens, prompt = self.sequences[index], self.prompts[index]
        in_response = torch.arange(len(tokens)) >= prompt
        generator = _generator(self.settings.seed, epoch, index)
        return blocks.sample_anchors(in_response, self.settings.anchors, generator)

    def _forward(self, indices: list[int], anchors: list[torch.Tensor]) -> Any:
        device = self.device
        lengths = [len(self.sequences[i]) for i in indices]
        tokens = torch.zeros(len(indices), max(lengths), dtype=torch.int64)
        in_response = torch.zeros_like(tokens, dtype=torch.bool)
        for row, index in enumerate(indices):
            tokens[row, : lengths[row]] = torch.tensor(self.sequences[index])
            in_response[row, self.prompts[index] : lengths[row]] = True
        starts = nn.utils.rnn.pad_sequence(anchors, batch_first=True)
        kept = nn.utils.rnn.pad_sequence(
            [torch.ones(len(a), dtype=torch.bool) for a in anchors], batch_first=True
        )
        clock = time.perf_counter()
        features, soft = self._read(indices, tokens, lengths)
        self.seconds["target"] += time.perf_counter() - clock
        clock = time.perf_counter()
        made = blocks.build(
            tokens.to(device),
            in_response.to(device),
            starts.to(device),
            kept.to(device),
            self.model.block_size,
            self.model.mask_token_id,
        )
        with autocast(self.settings.dtype, device):
            hidden = self.wrapped(self.target.embed(made.tokens), features, made.anchors)
        mask = kept.to(device).flatten()
        hidden = hidden[:, :, 1:].flatten(0, 1)[mask]
        labels, labelled = made.labels.flatten(0, 1)[mask], made.labelled.flatten(0, 1)[mask]
        self.seconds["draft"] += time.perf_counter() - clock
        clock = time.perf_counter()
        aims = None
        if soft is not None:
            before = blocks.before_labels(made.anchors, self.model.block_size, soft.shape[1])
            batch = torch.arange(len(soft), device=device)[:, None, None]
            ids, chances = soft[batch, before].flatten(0, 1)[mask].chunk(2, -1)
            aims = SoftLabels(ids.long(), chances.contiguous().view(torch.float32))
        if self.head_rows is not None:
            labels = self.head_rows[labels]
            labelled &= labels >= 0
        outcome = block_loss(
            hidden,
            self.head,
            labels.clamp(min=0),
            labelled,
            self.weighting,
            self.settings.head_chunk,
            aims,
            self.config.objective.distillation,
        )
        self.seconds["head"] += time.perf_counter() - clock
        return outcome

    def _head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of the head trained against, and each token's row among them or -1."""
        count, head = self.settings.head_vocabulary, self.target.head
        if count is None or count >= len(head):
            return head, None
        answers = [t[p:] for t, p in zip(self.sequences, self.prompts, strict=True)]
        seen = torch.tensor([token for answer in answers for token in answer])
        kept = torch.bincount(seen, minlength=len(head)).topk(count).indices.sort().values
        rows = torch.full((len(head),), -1)
        rows[kept] = torch.arange(count)
        return head[kept.to(self.device)].contiguous(), rows.to(self.device)

    def _read(
        self, indices: list[int], tokens: torch.Tensor, lengths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[B, S, K * H]`` features and, when distilling, ``[B, S, 2 * tokens]`` soft labels."""
        features = [self.features.get(index) for index in indices]
        soft = [self.soft.get(index) for index in indices]
        if all(rows is not None for rows in (*features, *(soft if self.distilled else ()))):
            pad = nn.utils.rnn.pad_sequence
            kept = pad(features, batch_first=True).to(self.device)  # type: ignore[arg-type]
            if not self.distilled:
                return kept, None
            return kept, pad(soft, batch_first=True).to(self.device)  # type: ignore[arg-type]
        taps, hidden = self.target.read(tokens)
        labels = None
        if self.distilled:
            best = likeliest(hidden, self.head, self.distilled)
            labels = torch.cat((best.ids.int(), best.probabilities.view(torch.int32)), -1)
        for row, index in enumerate(indices):
            self.features.put(index, taps[row, : lengths[row]])
            if labels is not None:
                self.soft.put(index, labels[row, : lengths[row]])
        return taps, labels

    # ---- state -----------------------------------------------------------------------------

    def save(self) -> None:
        """Replace the saved state; the first process writes."""
        if self.workers.rank == 0:
            progress = {"step": self.step, "identity": self.identity, "curve": self.curve}
            state.save(
                self.config.folder, self.model.state_dict(), self.optimizer.state(), progress
            )
        if self.workers.count > 1:
            distributed.barrier()

    def resume(self) -> None:
        """Take up the saved state, where there is one.

        Raises:
            TrainError: it is of another configuration.
        """
        saved = state.load(self.config.folder)
        if saved is None:
            return
        weights, optimizer, progress = saved
        mine = json.loads(json.dumps(self.identity))
        if progress["identity"] != mine:
            differing = _differences(progress["identity"], mine)
            raise TrainError(
                f"fit: {self.config.folder / state.FOLDER} was trained with another configuration "
                f"({'; '.join(differing)}). Set output to a new folder, or delete that one."
            )
        self.model.load_state_dict(weights)
        self.optimizer.restore(optimizer)
        self.step, self.curve = progress["step"], progress["curve"]


def autocast(dtype: str, device: torch.device) -> Any:
    """Autocast to ``bfloat16``, or nothing for ``float32``."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def default_gamma(block_size: int) -> float:
    """The published decay for a block size."""
    larger = [size for size in sorted(GAMMA) if size >= block_size]
    return GAMMA[larger[0]] if larger else GAMMA[max(GAMMA)]


def _generator(*parts: int) -> torch.Generator:
    """Randomness that depends on these numbers alone, on every machine."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _differences(saved: Any, mine: Any, prefix: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(mine, dict):
        return [
            line
            for key in sorted({*saved, *mine})
            for line in _differences(saved.get(key), mine.get(key), f"{prefix}{key}.")
        ]
    return [] if saved == mine else [f"{prefix[:-1]} was {saved!r}, is {mine!r}"]
