"""Folders that are made once: built aside, renamed into place, checked before reuse."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "SGLANG_DFLASH_CACHE"
MANIFEST = "manifest.json"
CHECKED_BYTES = 4 << 20
"""Bytes hashed of every file: all of a config or tokenizer, the header of the weights."""


class AssetError(RuntimeError):
    """A demo asset that cannot be made; the message says why and what to do."""


def root() -> Path:
    """The cache: ``SGLANG_DFLASH_CACHE``, else ``sglang-dflash`` in the user's cache folder."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-dflash"


def progress(line: str) -> None:
    """Tell the user what takes time; standard output stays free for results."""
    print(line, file=sys.stderr, flush=True)


def once(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """A cached folder, built if it is missing, damaged or of another recipe.

    Processes that ask at the same time wait for one build. Reuse takes no lock, so that a cache
    made by another user can be read-only.

    Args:
        name: of the folder.
        recipe: identifies what ``build`` makes; another one rebuilds.
        build: fills an empty folder.

    Raises:
        AssetError: the cache cannot be written.
    """
    folder = root() / name
    if _is_whole(folder, recipe):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(folder, recipe):
                _rebuild(folder, recipe, build)
    except OSError as error:
        raise AssetError(
            f"cannot write the cache folder {folder}: {error}. Set {ENVIRONMENT} to a folder that "
            "can be written and has 0.5 GB of free space."
        ) from error
    return folder


def _rebuild(folder: Path, recipe: str, build: Callable[[Path], None]) -> None:
    # One name, used under the lock: what a killed build left is cleared by the next.
    work = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        build(work)
        files = sorted(path for path in work.rglob("*") if path.is_file())
        for file in files:
            file.chmod(0o644)  # safetensors leaves its files to their owner alone
        manifest = {str(file.relative_to(work)): _fingerprint(file) for file in files}
        (work / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": manifest}, indent=1))
        if folder.is_dir():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_whole(folder: Path, recipe: str) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["recipe"] == recipe and all(
            _fingerprint(folder / name) == expected for name, expected in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # no manifest, or not one of ours


def _fingerprint(file: Path) -> str:
    """Size and the hash of the first bytes: cheap, and tells a cut-off or edited file."""
    with file.open("rb") as stream:
        start = hashlib.sha256(stream.read(CHECKED_BYTES)).hexdigest()
    return f"{file.stat().st_size} {start}"
