"""Certify an SGLang release: add its seams' fingerprints to ``fingerprints.json``.

Usage::

    python scripts/fingerprint_sglang.py                  # the installed release
    python scripts/fingerprint_sglang.py VERSION FOLDER   # an unpacked wheel's sglang/ folder

Run the whole test suite against the release before committing the result.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

from sglang_dflash import compat


def main(arguments: list[str]) -> int:
    """Write the table; fail where a seam is missing."""
    if len(arguments) not in (0, 2):
        print(__doc__, file=sys.stderr)
        return 2
    version = arguments[0] if arguments else importlib.metadata.version("sglang")
    root = Path(arguments[1]) if arguments else compat.sglang_root()
    found = {seam: compat.fingerprint(root, seam) for seam in compat.SEAMS}
    missing = [seam for seam, value in found.items() if value is None]
    if missing:
        print(f"sglang {version} lacks: {', '.join(missing)}", file=sys.stderr)
        return 1
    table = json.loads(compat.FINGERPRINTS.read_text()) if compat.FINGERPRINTS.exists() else {}
    table[version] = found
    compat.FINGERPRINTS.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"sglang {version}: {len(found)} seams")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
