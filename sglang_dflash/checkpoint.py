"""Check a target/drafter pair before any weight is loaded.

A mis-wired drafter breaks nothing that SGLang would notice: the output stays right, and the
accept length falls to 1. So whatever can be told from config.json is told here, naming the key, its
value and the remedy; :mod:`sglang_dflash.weights` does the same for the tensors. Keys are looked
up the way SGLang does: in ``dflash_config``, else at the top level.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("sglang_dflash")

FLAG = "--speculative-draft-model-path"

PLAIN = ("DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel")
"""Architectures whose drafted positions are independent of each other; our worker's."""
SELECTORS = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
LILICORR = ("LiLiCorrDraftModel",)
ARCHITECTURES = PLAIN + SELECTORS + LILICORR
"""Everything SGLang serves as DFLASH."""

_PAIRING = "Use a drafter trained for this target."
INCOMPLETE = "Download the checkpoint again, or export it again."
_MASK_SOURCE = (
    "It is the id the drafter was trained with, published in its config.json as "
    "dflash_config.mask_token_id; it must not be invented, since any other id makes every draft "
    "wrong. Take it from the published checkpoint or from whoever trained the drafter."
)
_TAPS_SOURCE = (
    "They are the target layers whose features the drafter was trained on, published in its "
    "config.json as dflash_config.target_layer_ids; they must not be guessed."
)


class CheckpointError(ValueError):
    """A drafter that cannot be used; the message names key, value, reason and remedy."""


@dataclass(frozen=True)
class Target:
    """What a drafter has to fit."""

    path: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_length: int
    """Positions the target is served with."""
    special_ids: Mapping[int, str]
    """End-of-sequence and padding ids, each with its name in the config."""

    @classmethod
    def of(cls, path: str, model_config: Any) -> Target:
        """Read SGLang's ``ModelConfig``."""
        hf_config, text_config = model_config.hf_config, model_config.hf_text_config
        special = dict.fromkeys(model_config.hf_eos_token_id or (), "eos_token_id")
        for config in (hf_config, text_config, model_config.hf_generation_config):
            pad = getattr(config, "pad_token_id", None)
            if isinstance(pad, int):
                special.setdefault(pad, "pad_token_id")
        layers = getattr(text_config, "num_hidden_layers", None)
        if layers is None:
            raise CheckpointError(
                f"--model-path={path}: its config has no num_hidden_layers, so the layers the "
                "drafter reads cannot be told. Serve it without --speculative-algorithm."
            )
        return cls(
            path=path,
            hidden_size=int(model_config.hidden_size),
            vocab_size=int(model_config.vocab_size),
            # Looped models run their layers several times and count every pass.
            num_layers=int(layers) * int(getattr(text_config, "num_loops", 1)),
            context_length=int(model_config.context_len),
            special_ids=special,
        )


@dataclass(frozen=True)
class Drafter:
    """A drafter's config.json and, where it lies on this machine, its folder."""

    path: str
    config: Mapping[str, Any]
    folder: Path | None = None

    def get(self, key: str) -> Any:
        """A key from ``dflash_config``, else from the top level, else None."""
        section = self.config.get("dflash_config")
        if isinstance(section, Mapping) and key in section:
            return section[key]
        return self.text.get(key, self.config.get(key))

    @property
    def text(self) -> Mapping[str, Any]:
        """The part that describes the decoder."""
        return self.config.get("text_config") or self.config

    @property
    def architecture(self) -> str | None:
        """The first architecture that SGLang serves as DFLASH, or None."""
        names = self.config.get("architectures") or ()
        return next((name for name in names if name in ARCHITECTURES), None)

    @property
    def served_by_sglang(self) -> str | None:
        """Why SGLang's own worker serves this drafter, or None where ours does."""
        head = None
        if self.get("projector_type") == "domino":
            head = "a Domino head"
        elif self.architecture in SELECTORS or self.get("selector_top_k"):
            head = "a DFlash 2 candidate selector"
        elif self.architecture in LILICORR:
            head = "a LiLiCorr head"
        return head and f"the drafter has {head}, so its positions are not drafted independently"

    def error(self, text: str) -> CheckpointError:
        """An error about this drafter."""
        return CheckpointError(f"{FLAG}={self.path}: {text}")


def read_drafter(
    path: str | None,
    *,
    revision: str | None = None,
    config_file: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Drafter | None:
    """Read a drafter's config.json; runs no code of the checkpoint's.

    Args:
        path: a local folder or a hub id.
        revision: of the hub id.
        config_file: name or path of the file where it is not ``config.json``.
        overrides: top-level keys that replace the file's (``--json-model-override-args``).

    Returns:
        The drafter, or None where only SGLang can read it (an object store's URL).

    Raises:
        CheckpointError: there is no such checkpoint, or its config cannot be read.
    """
    if not path:
        raise CheckpointError(
            f"DFLASH: {FLAG} is missing. Name a DFlash drafter trained for this target, such as "
            "z-lab/Qwen3-8B-DFlash-b16 for Qwen/Qwen3-8B."
        )
    if "://" in path:
        logger.warning("%s=%s is not checked before it loads: it is a URL.", FLAG, path)
        return None
    folder = Path(path)
    if folder.is_dir():
        config = read_json(folder / (config_file or "config.json"), path)
    elif folder.exists():
        raise CheckpointError(
            f"{FLAG}={path}: is a file, not a folder. Give the folder that holds config.json and "
            "the .safetensors files."
        )
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise CheckpointError(
            f"{FLAG}={path}: there is no such folder. Check the path; a hub id has the form "
            "owner/name."
        )
    else:
        config = _fetch_config(path, revision)
    return Drafter(path, {**config, **(overrides or {})}, folder if folder.is_dir() else None)


def read_json(file: Path, path: str) -> dict[str, Any]:
    """A mapping from a JSON file of the checkpoint at ``path``.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{FLAG}={path}: cannot read {file.name} ({error.strerror}). Give a checkpoint folder "
            "in the Hugging Face layout."
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{FLAG}={path}: {file.name} is not valid JSON ({error}). {INCOMPLETE}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{FLAG}={path}: {file.name} holds a {type(content).__name__}, not a mapping. "
            f"{INCOMPLETE}"
        )
    return content


def _fetch_config(path: str, revision: str | None) -> dict[str, Any]:
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{FLAG}={path}: neither a local folder nor a hub checkpoint that can be read "
            f"({reason[:300]}). Check the name, the revision ({revision}) and the network."
        ) from error
    if not config:
        raise CheckpointError(
            f"{FLAG}={path}: the hub checkpoint has no config.json. Name a DFlash drafter."
        )
    return config


def check_pair(drafter: Drafter, target: Target) -> None:
    """Refuse a checkpoint that is no DFlash drafter or does not fit the target.

    Raises:
        CheckpointError: on the first misfit.
    """
    _check_architecture(drafter)
    _check_equal(drafter, "hidden_size", target.hidden_size, target)
    # Drafters that borrow the target's vocabulary may leave its size out.
    if drafter.get("vocab_size") is not None:
        extended = f"--json-model-override-args '{{\"vocab_size\": {target.vocab_size}}}'"
        _check_equal(
            drafter,
            "vocab_size",
            target.vocab_size,
            target,
            f" If the target's vocabulary was only extended by new tokens, add {extended}.",
        )
    if drafter.get("num_target_layers") is not None:
        _check_equal(drafter, "num_target_layers", target.num_layers, target)
    _check_taps(drafter, target)
    _check_mask_token(drafter, target)


def _check_architecture(drafter: Drafter) -> None:
    if drafter.architecture is not None:
        return
    names = drafter.config.get("architectures")
    hint = "Name a DFlash drafter, not a target or an EAGLE head."
    if any("DSpark" in str(name) for name in names or ()):
        hint = "Serve a DSpark drafter with --speculative-algorithm DSPARK."
    raise drafter.error(
        f"architectures={names!r} is not a DFlash drafter ({', '.join(ARCHITECTURES)}). {hint}"
    )


def _check_equal(
    drafter: Drafter, key: str, expected: int, target: Target, remedy: str = ""
) -> None:
    value = drafter.get(key)
    if type(value) is not int or value != expected:
        raise drafter.error(
            f"{key}={value!r}, but {target.path} has {expected}. {_PAIRING}{remedy}"
        )


def _check_taps(drafter: Drafter, target: Target) -> None:
    taps, key = drafter.get("target_layer_ids"), "dflash_config.target_layer_ids"
    last = target.num_layers - 1
    if taps is None:
        raise drafter.error(f"{key} is missing. {_TAPS_SOURCE}")
    reason = None
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        reason = "is not a list of integers"
    elif not taps:
        reason = "is empty"
    elif not all(0 <= tap <= last for tap in taps):
        reason = f"names layers that {target.path} does not have (it has 0 to {last})"
    elif sorted(set(taps)) != taps:
        # SGLang concatenates features in the order the layers run.
        reason = "does not increase strictly"
    if reason:
        raise drafter.error(f"{key}={taps!r} {reason}. {_TAPS_SOURCE}")


def _check_mask_token(drafter: Drafter, target: Target) -> None:
    mask, key = drafter.get("mask_token_id"), "dflash_config.mask_token_id"
    if mask is None:
        raise drafter.error(f"{key} is missing. {_MASK_SOURCE}")
    reason = None
    if type(mask) is not int:
        reason = "is not an integer"
    elif not 0 <= mask < target.vocab_size:
        reason = f"is outside the vocabulary of {target.path} (0 to {target.vocab_size - 1})"
    elif mask in target.special_ids:
        reason = (
            f"is also the {target.special_ids[mask]} of {target.path}, a token that real text "
            "contains"
        )
    if reason:
        raise drafter.error(f"{key}={mask!r} {reason}. {_MASK_SOURCE}")


def trained_block_size(drafter: Drafter) -> int | None:
    """Rows of the block the drafter was trained for, anchor included; None where unpublished.

    Raises:
        CheckpointError: the value is no usable size.
    """
    size = drafter.get("block_size")
    if size is not None and (type(size) is not int or size < 2):
        raise drafter.error(
            f"block_size={size!r} is not usable: a block is the anchor and at least one drafted "
            "token. Take the value from the published checkpoint."
        )
    return size
