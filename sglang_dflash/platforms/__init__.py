"""The CPU platform: real SGLang, with DFLASH, on a machine without a GPU.

SGLang finds :func:`activate` through the entry-point group ``sglang.srt.platforms``. The
platform is opt-in: it is active only where ``SGLANG_PLATFORM=dflash_cpu`` is set, so that
installing the package never takes a CUDA host over.
"""

from __future__ import annotations

import os

NAME = "dflash_cpu"
"""Name of the platform, and of its attention backend."""


def limit_spinning() -> None:
    """Limit how long an OpenMP thread spins at the end of a parallel region before it sleeps.

    GNU OpenMP reads the variable when a process loads it, so call this before torch is imported;
    processes started later inherit it. By default threads spin for milliseconds: beside one busy
    process on two cores a 576 x 3072 product then waits 7.9 ms for the scheduler. Sleeping at once
    costs a third of the speed on an idle machine. This many spins are as fast as the default when
    idle (19.7 against 18.0 tokens/s for the demo target), and beside other work that product takes
    1.3 ms.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def selected() -> bool:
    """Whether this process was told to run on the CPU platform."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """Entry point: the platform class's qualified name, or None unless selected."""
    if selected():
        limit_spinning()
    return "sglang_dflash.platforms.cpu.DFlashCpuPlatform" if selected() else None
