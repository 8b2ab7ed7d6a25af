"""What the training file may say. One YAML file drives every stage.

Defaults are DFlash's published recipe (arXiv 2602.06036, section 5 and appendix; D-PACE,
arXiv 2605.18810) unless a comment says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from sglang_dflash import yaml_file

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the file. Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Data(Section):
    """Where training text comes from."""

    files: list[str]
    """JSONL files; a line holds ``messages``, ``prompt``, or ``prompt_ids`` (and, where the target
    has answered already, ``output_ids``)."""
    exclude: list[str] = []
    """JSONL files whose prompts must not be trained on (evaluation sets)."""
    held_out: Share = 0.03
    """Share of the sequences kept for scoring."""
    max_length: Positive = 3072
    """Tokens of a sequence; longer ones are cut at the end."""


class Generate(Section):
    """How the target answers prompts: as it will be served."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 1024
    concurrency: Positive = 32
    server_arguments: list[str] = []
    """Further flags of ``sglang.launch_server``."""
    server_url: str | None = None
    """A running SGLang server of the target; None starts one."""


class DrafterShape(Section):
    """The network. Sizes default to the target's."""

    num_hidden_layers: Positive = 5
    block_size: Annotated[int, Field(ge=2)] = 16
    mask_token_id: int | None = None
    """Id of MASK: a row of the embedding that no text uses. There is no default."""
    target_layer_ids: list[int] | None = None
    """Tapped layers; None spaces them by the published rule, one per draft layer."""
    intermediate_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    sliding_window: Positive | None = None
    """Window of every layer, which then is causal inside the block; None is full attention."""


class Objective(Section):
    """The loss; see :mod:`sglang_dflash.train.objective`."""

    weighting: Literal["exponential", "dpace"] = "dpace"
    gamma: Annotated[float, Field(gt=0)] | None = None
    """Decay of ``exponential``; None takes 7, 5 and 4 for blocks of 16, 10 and 8."""
    alpha: Share = 0.5
    """Smoothing of ``dpace``."""
    distillation: Share = 0.0
    """Share of the aim that is the target's own distribution; the rest is the label."""
    distilled_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens of that distribution that are kept per position."""


class Fit(Section):
    """The optimisation."""

    start_from: str | None = None
    """Folder of a drafter of the same shape whose weights to start from, such as an earlier run's
    export or a published checkpoint; None starts from new ones."""
    steps: Positive | None = None
    """Optimiser steps; None runs ``epochs`` over the data."""
    epochs: Positive = 6
    sequences: Positive = 8
    """Sequences of one optimiser step, over all processes."""
    anchors: Positive = 512
    """Blocks drawn from a sequence at each visit."""
    micro_batch_tokens: Positive = 4096
    """Largest number of block rows, and of context tokens, computed at once in a process."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """``muon`` is for matrices; norms have AdamW always. After 100 steps on the demo pair Muon is
    at 1.39, AdamW at 1.08 (docs/training.md)."""
    learning_rate: Annotated[float, Field(gt=0)] = 6e-4
    """Of AdamW."""
    muon_learning_rate: Annotated[float, Field(gt=0)] = 0.02
    """Of Muon; 0.05 is worse on the demo pair."""
    warmup: Share = 0.04
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the target and of autocast; master weights are float32 always."""
    head_chunk: Positive = 128
    """Blocks whose logits exist at once."""
    head_vocabulary: Positive | None = None
    """Train against this many of the answers' most frequent tokens; None against all. The head is
    most of a step where the vocabulary is large and the drafter small."""
    feature_cache_gib: Annotated[float, Field(ge=0)] = 8.0
    """Disk for what is read from the target; 0 computes it anew every time."""
    save_every: Positive = 200
    """Steps between saved states."""
    log_every: Positive = 10


class TrainConfig(Section):
    """The whole file."""

    target: str
    """Hugging Face folder or id of the target."""
    output: str
    """Folder of everything the stages write."""
    data: Data
    generate: Generate = Generate()
    drafter: DrafterShape
    objective: Objective = Objective()
    fit: Fit = Fit()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output)


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a training file.

    Args:
        path: the YAML file.
        overrides: ``section.key=value`` each, which win over the file; values are YAML.

    Raises:
        ConfigError: the file cannot be used, or an override names no key.
    """
    content = yaml_file.content(path, TrainConfig, where=os.fspath(path), remedy="name another")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise yaml_file.ConfigError(
                f"--set {override}: no '='. Write section.key=value, such as fit.steps=100."
            )
        place: Any = content
        *sections, last = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise yaml_file.ConfigError(f"--set {override}: {section!r} is not a section.")
        try:
            place[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise yaml_file.ConfigError(f"--set {override}: the value is not YAML.") from error
    return yaml_file.parse(TrainConfig, content, where=os.fspath(path))
