"""Folders that are made once: built aside, renamed into place, checked before reuse."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "SGLANG_DFLASH_CACHE"
MANIFEST = "manifest.json"


class AssetError(RuntimeError):
    """A demo asset that cannot be made; the message says why and what to do."""


def root() -> Path:
    """The cache: ``SGLANG_DFLASH_CACHE``, else ``sglang-dflash`` in the user's cache folder."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-dflash"


def once(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """A cached folder, built if it is missing, incomplete or of another recipe.

    Args:
        name: of the folder.
        recipe: identifies what ``build`` makes; another one rebuilds.
        build: fills an empty folder.

    Raises:
        AssetError: the cache cannot be written.
    """
    folder = root() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _whole(folder, recipe):
                _rebuild(folder, recipe, build)
    except OSError as error:
        raise AssetError(
            f"cannot write the cache folder {folder}: {error}. Set {ENVIRONMENT} to a folder with "
            "1 GB of free space."
        ) from error
    return folder


def _rebuild(folder: Path, recipe: str, build: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(work)
        sizes = {str(p.relative_to(work)): p.stat().st_size for p in work.rglob("*") if p.is_file()}
        (work / MANIFEST).write_text(json.dumps({"recipe": recipe, "sizes": sizes}, indent=1))
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _whole(folder: Path, recipe: str) -> bool:
    """Whether every file of the recipe is there in its size: cheap, and finds cut-off files."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["recipe"] == recipe and all(
            (folder / file).stat().st_size == size for file, size in manifest["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
