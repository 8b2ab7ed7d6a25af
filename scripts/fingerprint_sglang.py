"""Certify an SGLang release: add its seams' fingerprints to ``sglang_dflash/fingerprints.json``.

SOURCE is a wheel, or the ``sglang`` folder of an unpacked one; without it, the installed
release. ``--diff`` writes nothing and prints what changed since the newest certified release:
read every changed seam before certifying, and run the whole test suite on the release.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dflash import compat
from sglang_dflash.seams import PLATFORM_SEAMS, SEAMS


def main() -> int:
    """Write the table, or print the difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", type=Path, metavar="SOURCE")
    parser.add_argument("--version", help="release of SOURCE where it is a folder")
    parser.add_argument("--diff", action="store_true", help="print what changed, write nothing")
    arguments = parser.parse_args()

    version, read = open_source(arguments.source, arguments.version)
    table = json.loads(compat.FINGERPRINTS.read_text()) if compat.FINGERPRINTS.exists() else {}
    if arguments.diff:
        return print_difference(version, read, table)
    try:
        table[version] = compat.take(read)
    except compat.IncompatibleError as error:
        print(f"sglang {version} cannot be certified: {error}", file=sys.stderr)
        return 1
    ordered = {name: table[name] for name in sorted(table, key=release)}
    compat.FINGERPRINTS.write_text(json.dumps(ordered, indent=1) + "\n")
    print(f"sglang {version}: {len(table[version]['seams'])} seams written")
    return 0


def open_source(
    source: Path | None, version: str | None
) -> tuple[str, Callable[[str], bytes | None]]:
    """The release and a reader of its files below ``sglang/``."""
    if source is None:
        return importlib.metadata.version("sglang"), compat.reader(compat.sglang_root())
    if source.is_dir():
        if version is None:
            sys.exit(f"{source}: --version is needed for a folder")
        return version, compat.reader(source)
    wheel = zipfile.ZipFile(source)
    names = set(wheel.namelist())

    def read(path: str) -> bytes | None:
        return wheel.read(f"sglang/{path}") if f"sglang/{path}" in names else None

    return source.name.split("-")[1], read


def release(version: str) -> list[int]:
    """A release as numbers, for sorting."""
    return [int(part) for part in re.findall(r"\d+", version)]


def print_difference(
    version: str, read: Callable[[str], bytes | None], table: dict[str, Any]
) -> int:
    """Print changed seams; exit status 1 where a signature changed or a seam is gone."""
    try:
        report = compat.compare(
            version,
            read,
            table,
            seams=SEAMS + PLATFORM_SEAMS,
            allow_untested=True,
        )
    except compat.IncompatibleError as error:
        print(error)
        return 1
    for seam in report.changed:
        print(f"source changed: {seam}")
    print(f"sglang {version}: {len(report.changed)} seams changed, no signature")
    return 0


if __name__ == "__main__":
    sys.exit(main())
