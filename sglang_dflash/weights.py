"""Check a drafter's safetensors files by their headers, before any weight is loaded.

SGLang skips tensors it does not expect and never asks for those it misses, which stay as they
were initialised: an incomplete or mismatched checkpoint loads cleanly and drafts nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint import INCOMPLETE, Drafter, read_json


def check_weights(drafter: Drafter) -> None:
    """Check a local drafter; one on the hub is checked by its download.

    Raises:
        CheckpointError: no safetensors file, a damaged one, or a missing or misshapen tensor.
    """
    if drafter.folder is None:
        return
    found = {
        _parameter_name(name): shape
        for file in _weight_files(drafter, drafter.folder)
        for name, shape in _read_shapes(drafter, file)
    }
    if drafter.get("quantization_config") or any(name.endswith("_scale") for name in found):
        # Packed tensors have other names and shapes, which are the loader's business.
        return
    for name, shape in _expected_shapes(drafter).items():
        if name not in found and not _is_fused(name, found):
            raise drafter.error(
                f"no tensor {name} of shape {list(shape)} in its .safetensors files, as "
                f"config.json implies. {INCOMPLETE}"
            )
        if name in found and found[name] != shape:
            raise drafter.error(
                f"{name} has shape {list(found[name])}, but config.json implies {list(shape)}: "
                f"config and weights are not of one drafter. {INCOMPLETE}"
            )


def _weight_files(drafter: Drafter, folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(read_json(index, drafter.path).get("weight_map", {}).values()))
        if absent := [shard for shard in shards if not (folder / shard).is_file()]:
            raise drafter.error(
                f"{', '.join(absent)} named by {index.name} is not there. {INCOMPLETE}"
            )
        return [folder / shard for shard in shards]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt"))
        holds = f"only {', '.join(pickles)}" if pickles else "no weights"
        raise drafter.error(
            f"the folder holds {holds}, and no .safetensors file. Weights are read from "
            "safetensors only, since a pickle can run any code: convert them, or download the "
            "safetensors version."
        )
    return files


def _read_shapes(drafter: Drafter, file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tuple(tensors.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        with file.open("rb") as stream:
            pointer = stream.read(32).startswith(b"version https://git-lfs")
        remedy = "It is a Git LFS pointer: run git lfs pull." if pointer else INCOMPLETE
        raise drafter.error(
            f"{file.name} is not a whole safetensors file ({error}). {remedy}"
        ) from error


def _parameter_name(name: str) -> str:
    """A checkpoint's tensor name as SGLang resolves it."""
    name = name.removeprefix("model.")
    return {
        "encoder.fc.weight": "fc.weight",
        "encoder.output_norm_enc.weight": "hidden_norm.weight",
    }.get(name, name)


def _expected_shapes(drafter: Drafter) -> dict[str, tuple[int, ...]]:
    """Tensors of a DFlash decoder with K taps, from its config (arXiv 2602.06036, section 3)."""
    hidden = _dimension(drafter, "hidden_size")
    inner = _dimension(drafter, "intermediate_size")
    heads = _dimension(drafter, "num_attention_heads")
    kv_heads = _dimension(drafter, "num_key_value_heads", default=heads)
    head_dim = _dimension(drafter, "head_dim", default=hidden // heads)
    layers = _dimension(drafter, "num_hidden_layers")
    taps = len(drafter.get("target_layer_ids"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(layers):
        for name, shape in layer_shapes.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return shapes


def _dimension(drafter: Drafter, key: str, default: int | None = None) -> int:
    value = drafter.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise drafter.error(
            f"{key}={value!r} in config.json is no positive integer. Take the file from the "
            "published checkpoint."
        )
    return value


def _is_fused(name: str, found: Mapping[str, Any]) -> bool:
    """Whether a checkpoint stores the projection fused with its neighbours, as SGLang does."""
    for parts, fused in (
        (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        (("gate_proj", "up_proj"), "gate_up_proj"),
    ):
        for part in parts:
            if f".{part}." in name:
                return name.replace(part, fused) in found
    return False
