"""The four stages of training, as functions of the training file.

``generate`` -> ``fit`` -> ``score`` -> ``export``; each reads what the one before left in the run's
folder, and can be run again alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_dflash import provenance
from sglang_dflash.train import export as exporting
from sglang_dflash.train import generate as generating
from sglang_dflash.train import records, state
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.features import FrozenTarget
from sglang_dflash.train.fit import Report, Trainer
from sglang_dflash.train.model import DraftModel
from sglang_dflash.train.records import Record
from sglang_dflash.train.score import Score, score

SCORES = "scores.json"
CURVE = "curve.jsonl"


class Run:
    """A training file with its target's config and tokenizer.

    Args:
        config: the training file.

    Raises:
        TrainError: the target cannot be read, or the drafter does not fit it.
    """

    def __init__(self, config: TrainConfig):
        from transformers import AutoConfig, AutoTokenizer

        self.config = config
        try:
            self.target_config: Any = AutoConfig.from_pretrained(config.target)
        except Exception as error:
            raise TrainError(
                f"target: {config.target} has no config that can be read "
                f"({' '.join(str(error).split())[:300]}). Name a Hugging Face folder or id."
            ) from error
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(config.target)
        except Exception:
            self.tokenizer = None  # token ids need none; framing text says so
        self.shape = exporting.drafter_config(config, self.target_config)
        _check_target(config.target, self.target_config)
        check_fit(config.target, self.target_config, self.shape)

    @property
    def device(self) -> torch.device:
        """This process's device."""
        import os

        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device("cpu")

    def prompts(self) -> list[Record]:
        """Records of ``data.files``, deduplicated, without the excluded ones."""
        vocab = self.target_config.get_text_config().vocab_size
        excluded: list[Record] = []
        if self.config.data.exclude:
            excluded = records.read(self.config.data.exclude, self.tokenizer, vocab)
        found = records.read(self.config.data.files, self.tokenizer, vocab)
        kept = records.deduplicate(found, excluded)
        if not kept:
            raise TrainError("data.exclude: excludes every prompt of data.files.")
        return kept

    def answers(self) -> tuple[list[Record], list[Record]]:
        """Answered records for training and for scoring.

        Raises:
            TrainError: nothing was generated, or every answer is shorter than two tokens.
        """
        file = self.config.folder / generating.FILE
        if file.exists():
            vocab = self.target_config.get_text_config().vocab_size
            found = records.read([file], self.tokenizer, vocab)
        else:
            found = [record for record in self.prompts() if record.output_ids]
        limit = self.config.data.max_length
        usable = [r for r in found if len(r.output_ids) > 1 and len(r.prompt_ids) + 2 <= limit]
        if not usable:
            raise TrainError(
                f"fit: none of {len(found)} records has an answer of two tokens or more within "
                f"data.max_length={limit}. Run the generate stage first, or give output_ids."
            )
        mask = self.config.drafter.mask_token_id
        if any(mask in record.tokens for record in usable):
            raise TrainError(
                f"drafter.mask_token_id={mask} occurs in the training text. Choose an id that no "
                "text holds."
            )
        return records.split(usable, self.config.data.held_out, self.config.fit.seed)

    def frozen_target(self, *, whole: bool = False) -> FrozenTarget:
        """The target, loaded for features, or ``whole`` for its distributions too."""
        taps = self.shape["dflash_config"]["target_layer_ids"]
        dtype = getattr(torch, self.config.fit.dtype)
        return FrozenTarget(self.config.target, taps, dtype, self.device, whole)

    def trained(self) -> tuple[DraftModel, dict[str, Any]]:
        """The drafter of the last saved state, and how far it got.

        Raises:
            TrainError: nothing was fitted.
        """
        saved = state.load(self.config.folder)
        if saved is None:
            raise TrainError(f"{self.config.folder} holds no fitted drafter. Run the fit stage.")
        weights, _, progress = saved
        model = DraftModel(progress["identity"]["drafter"])
        model.load_state_dict(weights)
        return model.to(self.device).eval(), progress


def generate(run: Run, advance: Callable[[int, int], None]) -> Path:
    """Answer every prompt; see :func:`sglang_dflash.train.generate.generate`."""
    return generating.generate(run.config, run.prompts(), advance)


def fit(run: Run, report: Callable[[Report], None], stop: Callable[[], bool]) -> Trainer:
    """Fit the drafter; see :class:`sglang_dflash.train.fit.Trainer`."""
    training, _ = run.answers()
    if not training:
        raise TrainError(f"data.held_out={run.config.data.held_out} leaves nothing to train on.")
    check_room(run, training)
    target = run.frozen_target(whole=run.config.objective.distillation > 0)
    trainer = Trainer(run.config, run.shape, training, target)
    curve = run.config.folder / CURVE

    def note(made: Report) -> None:
        if trainer.workers.rank == 0:
            with curve.open("a", encoding="utf-8") as output:
                output.write(json.dumps(vars(made)) + "\n")
            report(made)

    trainer.run(note, stop)
    return trainer


def score_held_out(
    run: Run, files: list[str] | None, advance: Callable[[int, int], None]
) -> dict[str, Score]:
    """Score the fitted drafter on held-out answers, or on those of other files."""
    if files:
        vocab = run.target_config.get_text_config().vocab_size
        chosen = [r for r in records.read(files, run.tokenizer, vocab) if len(r.output_ids) > 1]
        if not chosen:
            raise TrainError(f"score: {', '.join(files)} hold no answers (output_ids).")
    else:
        _, chosen = run.answers()
        if not chosen:
            raise TrainError("data.held_out=0 keeps nothing to score. Name files with --data.")
    model, _ = run.trained()
    target = run.frozen_target()
    scores = score(
        model,
        target,
        chosen,
        dtype=run.config.fit.dtype,
        advance=lambda done: advance(done, len(chosen)),
    )
    report = {source: one.to_json() for source, one in scores.items()}
    (run.config.folder / SCORES).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return scores


def export(run: Run) -> Path:
    """Write the fitted drafter as a checkpoint; returns its folder."""
    model, progress = run.trained()
    training, held = run.answers()
    file = run.config.folder / SCORES
    target = run.frozen_target()
    made = {
        "target": _public_name(run.config.target),
        "target_fingerprint": provenance.fingerprint(target.head, target.embedding.weight),
        "chat_template_sha256": provenance.template_hash(run.tokenizer),
        "sequences": len(training),
        "held_out_sequences": len(held),
        "response_tokens": sum(len(record.output_ids) for record in training),
        "steps": progress["step"],
        "started_from": run.config.fit.start_from and _public_name(run.config.fit.start_from),
        "seed": run.config.fit.seed,
        "scores": json.loads(file.read_text(encoding="utf-8")) if file.exists() else None,
    }
    folder = run.config.folder / exporting.FOLDER
    dtype = getattr(torch, run.config.fit.dtype)
    exporting.export(folder, run.shape, model.state_dict(), made, dtype)
    return folder


def _public_name(target: str) -> str:
    """A target's name as others may read it: of a local folder its last part."""
    folder = Path(target)
    return folder.resolve().name if folder.is_dir() else target


def check_fit(path: str, target: Any, shape: dict[str, Any]) -> None:
    """Refuse a drafter that could not be served.

    Raises:
        TrainError: naming the key of the training file.
    """
    text = target.get_text_config()
    taps, last = shape["dflash_config"]["target_layer_ids"], text.num_hidden_layers - 1
    if not taps or taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= last:
        raise TrainError(
            f"drafter.target_layer_ids={taps} is no increasing list of layers of {path} (0 to "
            f"{last}). Correct it, or remove it to space the taps by the published rule."
        )
    mask = shape["dflash_config"]["mask_token_id"]
    source = (
        "Give the id of a token that no text holds: an unused or reserved row of the target's "
        "vocabulary. It is frozen into the drafter."
    )
    if mask is None:
        raise TrainError(f"drafter.mask_token_id is missing. {source}")
    if not 0 <= mask < text.vocab_size:
        raise TrainError(
            f"drafter.mask_token_id={mask} is outside the vocabulary of {path} (0 to "
            f"{text.vocab_size - 1}). {source}"
        )
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(target, key, None)
        if mask in (value if isinstance(value, list) else [value]):
            raise TrainError(f"drafter.mask_token_id={mask} is the {key} of {path}. {source}")


def _check_target(path: str, config: Any) -> None:
    text = config.get_text_config()
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(getattr(text, key, None), int):
            raise TrainError(
                f"target: {path} has no {key} in its config, so a drafter's shape cannot be told. "
                "Name a causal language model."
            )
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(text, key, None) not in (None, 1, 1.0):
            raise TrainError(
                f"target: {path} sets {key}, which training does not apply yet. Use another target."
            )


def check_room(run: Run, training: list[Record]) -> None:
    """Refuse a fit that would run out of disk or memory.

    Raises:
        TrainError: with the estimate.
    """
    import psutil

    model = DraftModel(run.shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    hidden = run.shape["hidden_size"]
    width = len(run.shape["dflash_config"]["target_layer_ids"]) * hidden
    tokens = sum(min(len(record.tokens), run.config.data.max_length) for record in training)
    row = getattr(torch, run.config.fit.dtype).itemsize * width
    if run.config.objective.distillation:
        row += 8 * run.config.objective.distilled_tokens
    cache = min(run.config.fit.feature_cache_gib * 2**30, tokens * row)
    disk = int(cache + 3 * 12 * parameters)
    folder = run.config.folder
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if disk > free:
        raise TrainError(
            f"fit: needs about {disk / 2**30:.1f} GiB of disk in {folder} (features "
            f"{cache / 2**30:.1f}), {free / 2**30:.1f} are free. Lower fit.feature_cache_gib, or "
            "set output to another disk."
        )
    if run.device.type != "cpu":
        return
    needed, available = memory_estimate(run, parameters), psutil.virtual_memory().available
    if needed > available:
        raise TrainError(
            f"fit: needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} are "
            "free. Lower fit.micro_batch_tokens or fit.head_chunk."
        )


def memory_estimate(run: Run, parameters: int) -> int:
    """Bytes a fit holds at its peak, about: target, weights with optimiser, one micro batch."""
    text, shape, fit = run.target_config.get_text_config(), run.shape, run.config.fit
    hidden, inner, layers = text.hidden_size, shape["intermediate_size"], shape["num_hidden_layers"]
    vocab = text.vocab_size
    per_layer = 4 * hidden * hidden + 3 * hidden * text.intermediate_size
    target = (2 if fit.dtype == "bfloat16" else 4) * (
        text.num_hidden_layers * per_layer + 2 * vocab * hidden
    )
    rows = fit.micro_batch_tokens
    heads = shape["num_attention_heads"]
    attention = 8 * heads * rows * min(run.config.data.max_length, rows)
    activations = layers * (4 * rows * (8 * hidden + 4 * inner) + attention)
    logits = 10 * fit.head_chunk * (shape["block_size"] - 1) * vocab
    return int(target + 16 * parameters + activations + logits)
