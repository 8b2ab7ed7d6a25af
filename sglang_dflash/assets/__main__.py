"""Prepare the demo pair and print its folders."""

from __future__ import annotations

import sys

from sglang_dflash.assets import AssetError, demo_drafter, demo_target, drafter_is_trained


def main() -> int:
    """Print ``target: FOLDER`` and ``drafter: FOLDER``; returns the exit code."""
    try:
        print(f"target: {demo_target()}")
        print(f"drafter: {demo_drafter()}")
    except AssetError as error:
        print(f"sglang_dflash.assets: {error}", file=sys.stderr)
        return 1
    if not drafter_is_trained():
        print("The drafter is randomly initialised: it guesses at random.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
