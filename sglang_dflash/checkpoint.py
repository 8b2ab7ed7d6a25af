"""Check a target/drafter pair before any weight is loaded.

A mis-wired drafter is not an error SGLang would notice: output stays right and the accept
length falls to 1. Everything that can be told from config.json and the safetensors headers is
told here, naming the key.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("sglang_dflash")

OURS = ("DFlashDraftModel",)
SGLANGS = ("DFlash2DraftModel", "DominoDraftModel", "LiLiCorrDraftModel")
"""Drafters whose rows are not independent marginals; SGLang's own worker serves them."""
DFLASH_FLAG = "--speculative-draft-model-path"
MASK_HELP = (
    "It is the id the drafter was trained with, published in its config.json as "
    "dflash_config.mask_token_id. It must not be invented: ask for the value used in training."
)


class CheckpointError(ValueError):
    """A drafter that does not fit; the message names the key, its value and the remedy."""


class Pair(NamedTuple):
    """What a checked pair implies."""

    block_size: int
    """The block the drafter was trained for, anchor included."""


def inspect(args: Any, *, block_size: int | None) -> Pair:
    """Check the pair named by resolved arguments.

    Args:
        args: a view of SGLang's arguments (model paths, overrides).
        block_size: the size the user asked for, or None.

    Raises:
        CheckpointError: on the first misfit.
    """
    path = args.speculative_draft_model_path
    if not path:
        raise CheckpointError(
            f"DFLASH: {DFLASH_FLAG} is missing. Name a DFlash drafter trained for this target, "
            "such as z-lab/Qwen3-8B-DFlash-b16 for Qwen/Qwen3-8B."
        )
    drafter = read_config(path, args, flag=DFLASH_FLAG)
    target = read_config(args.model_path, args, flag="--model-path", overrides=True)
    target = target.get("text_config", target)
    check_architecture(drafter, path)
    check_fit(drafter, target, path)
    if Path(path).is_dir():
        check_weights(Path(path), drafter)
    trained = trained_block_size(drafter, path)
    if block_size is not None and block_size > trained:
        logger.warning(
            "DFLASH: block size %d is larger than the %d the drafter was trained for; positions "
            "past it were never trained and will rarely be accepted.",
            block_size,
            trained,
        )
    limit = int(args.context_length or target.get("max_position_embeddings") or 0)
    chosen = block_size or trained
    if limit and 2 * chosen >= limit:
        raise CheckpointError(
            f"DFLASH: block size {chosen} needs two verify windows ({2 * chosen} positions) beside "
            f"the text, but the context length is {limit}. Use a smaller block_size."
        )
    return Pair(trained)


def served_by_sglang(server_args: Any) -> str | None:
    """Why SGLang's own worker serves this drafter, or None if ours does."""
    drafter = read_config(server_args.speculative_draft_model_path, server_args, flag=DFLASH_FLAG)
    own = dflash_section(drafter)
    architecture = architecture_of(drafter)
    kinds = {
        "a Domino head": own.get("projector_type") == "domino",
        "a DFlash 2 candidate selector": bool(own.get("selector_top_k")),
        "a LiLiCorr head": bool(own.get("lilicorr_enabled")),
        f"architecture {architecture}": architecture in SGLANGS,
    }
    for kind, present in kinds.items():
        if present:
            return f"the drafter has {kind}, whose positions are not drafted independently"
    return None


def read_config(path: str, args: Any, *, flag: str, overrides: bool = False) -> dict[str, Any]:
    """A checkpoint's config.json as a dictionary; never runs code of the checkpoint's.

    Args:
        path: local folder or hub id.
        args: for the revision and, with ``overrides``, ``--json-model-override-args``.
        flag: that named the path, for messages.

    Raises:
        CheckpointError: the config cannot be read.
    """
    folder = Path(path)
    if folder.is_dir():
        file = folder / "config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"{flag}={path}: cannot read config.json ({error.strerror}). Give a checkpoint "
                "folder in the Hugging Face layout."
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{flag}={path}: config.json is not valid JSON ({error}). Download it again."
            ) from error
    elif folder.exists() or path.startswith((".", "/", "~")):
        raise CheckpointError(f"{flag}={path}: no such folder. Check the path.")
    else:
        from transformers import PretrainedConfig

        drafter = flag == DFLASH_FLAG
        revision = args.speculative_draft_model_revision if drafter else args.revision
        try:
            found, _ = PretrainedConfig.get_config_dict(path, revision=revision)
        except Exception as error:
            raise CheckpointError(
                f"{flag}={path}: neither a local folder nor a readable hub checkpoint "
                f"({' '.join(str(error).split())[:300]}). Check the name and the network."
            ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{flag}={path}: config.json holds no mapping. Download it again.")
    if overrides:
        found = {**found, **json.loads(args.json_model_override_args or "{}")}
    return found


def architecture_of(config: dict[str, Any]) -> str:
    """The first entry of ``architectures``, or an empty string."""
    architectures = config.get("architectures") or [""]
    return str(architectures[0])


def dflash_section(drafter: dict[str, Any]) -> dict[str, Any]:
    """``dflash_config`` of a drafter; empty where the keys lie at the top level."""
    section = drafter.get("dflash_config") or {}
    return section if isinstance(section, dict) else {}


def value_of(drafter: dict[str, Any], key: str) -> Any:
    """A DFlash key from ``dflash_config``, else from the top level, as SGLang reads it."""
    return dflash_section(drafter).get(key, drafter.get(key))


def check_architecture(drafter: dict[str, Any], path: str) -> None:
    """Refuse a checkpoint that is no DFlash drafter."""
    architecture = architecture_of(drafter)
    if architecture not in (*OURS, *SGLANGS) and "DFlash" not in architecture:
        raise CheckpointError(
            f"{DFLASH_FLAG}={path}: architectures is {drafter.get('architectures')!r}, not a "
            f"DFlash drafter ({', '.join((*OURS, *SGLANGS))}). Name a DFlash drafter, not a "
            "target or an EAGLE head."
        )


def check_fit(drafter: dict[str, Any], target: dict[str, Any], path: str) -> None:
    """Refuse a drafter whose shapes, taps or mask id do not fit the target."""

    def misfit(key: str, value: Any, reason: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{DFLASH_FLAG}={path}: {key}={value!r} {reason}. {remedy}")

    pairing = "Use a drafter trained for this target."
    hidden = value_of(drafter, "target_hidden_size") or drafter.get("hidden_size")
    if hidden != target.get("hidden_size"):
        raise misfit(
            "hidden_size", hidden, f"but the target's is {target.get('hidden_size')}", pairing
        )
    vocabulary, own = target.get("vocab_size"), drafter.get("vocab_size")
    if own is not None and own != vocabulary:
        raise misfit("vocab_size", own, f"but the target's is {vocabulary}", pairing)
    layers = target.get("num_hidden_layers")
    expected = value_of(drafter, "num_target_layers")
    if expected is not None and layers is not None and expected != layers:
        raise misfit("num_target_layers", expected, f"but the target has {layers}", pairing)

    key = "dflash_config.target_layer_ids"
    taps = value_of(drafter, "target_layer_ids")
    help_taps = (
        "They are the target layers the drafter was trained on; take them from its published "
        "config.json."
    )
    if not isinstance(taps, list) or not taps:
        raise misfit(key, taps, "is missing or empty; guessing it gives a drafter that is never "
                     "right", help_taps)
    if not all(type(tap) is int for tap in taps):
        raise misfit(key, taps, "must be a list of integers", help_taps)
    if layers is not None and not all(0 <= tap < layers for tap in taps):
        raise misfit(key, taps, f"names layers outside 0..{layers - 1}", help_taps)
    if sorted(set(taps)) != taps:
        raise misfit(key, taps, "must increase strictly", help_taps)
    check_mask_token(drafter, target, path)


def check_mask_token(drafter: dict[str, Any], target: dict[str, Any], path: str) -> None:
    """Refuse a missing, impossible or doubly used mask id."""
    mask = value_of(drafter, "mask_token_id")
    name = f"{DFLASH_FLAG}={path}: dflash_config.mask_token_id"
    if mask is None:
        raise CheckpointError(f"{name} is missing. {MASK_HELP}")
    if type(mask) is not int:
        raise CheckpointError(f"{name}={mask!r} is not an integer. {MASK_HELP}")
    vocabulary = target.get("vocab_size")
    if not 0 <= mask < (vocabulary or mask + 1):
        raise CheckpointError(f"{name}={mask} is outside the vocabulary (0..{vocabulary - 1}). "
                              + MASK_HELP)
    for role in ("eos_token_id", "pad_token_id"):
        ids = target.get(role)
        if mask in (ids if isinstance(ids, list) else [ids]):
            raise CheckpointError(f"{name}={mask} is also the target's {role}. {MASK_HELP}")


def trained_block_size(drafter: dict[str, Any], path: str) -> int:
    """The drafter's block size.

    Raises:
        CheckpointError: it is missing or below 2.
    """
    size = value_of(drafter, "block_size")
    if type(size) is not int or size < 2:
        raise CheckpointError(
            f"{DFLASH_FLAG}={path}: block_size={size!r} is not a usable block: it counts the "
            "anchor and at least one drafted token. Take it from the drafter's published "
            "config.json."
        )
    return size


def check_weights(folder: Path, drafter: dict[str, Any]) -> None:
    """Check a local drafter's safetensors headers; no weight is read.

    Raises:
        CheckpointError: no safetensors file, a damaged one, or a missing or misshapen tensor.
    """
    where = f"{DFLASH_FLAG}={folder}"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{where}: holds no .safetensors file. Checkpoints are loaded with safetensors only, "
            "never with pickle; convert .bin or .pt files first."
        )
    shapes: dict[str, list[int]] = {}
    for file in files:
        shapes.update(_header(file, where))
    # A native export prefixes what encodes the target's features.
    names = {name.removeprefix("model.").removeprefix("encoder."): s for name, s in shapes.items()}
    needed = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    needed |= {
        f"layers.{layer}.self_attn.o_proj.weight"
        for layer in range(int(drafter["num_hidden_layers"]))
    }
    missing = sorted(needed - names.keys())
    if missing:
        raise CheckpointError(
            f"{where}: tensors are missing: {', '.join(missing)}. The checkpoint is incomplete or "
            "of another format; download it again."
        )
    taps, hidden = len(value_of(drafter, "target_layer_ids")), int(drafter["hidden_size"])
    source = int(value_of(drafter, "target_hidden_size") or hidden)
    if names["fc.weight"] != [hidden, taps * source]:
        raise CheckpointError(
            f"{where}: fc.weight has shape {names['fc.weight']}, but {taps} target_layer_ids and "
            f"hidden_size {hidden} need {[hidden, taps * source]}. config.json and weights are not "
            "of one drafter."
        )


def _header(file: Path, where: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes in one safetensors file, after checking that it is whole."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            size = file.stat().st_size
            if length > size - 8:
                raise ValueError("header is cut off")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes on disk, {8 + length + end} expected")
        return iter([(name, tensor["shape"]) for name, tensor in header.items()])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"{where}: {file.name} is not a whole safetensors file ({error}). Download it again."
        ) from error
