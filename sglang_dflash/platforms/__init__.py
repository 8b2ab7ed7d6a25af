"""The CPU platform: real SGLang, with DFLASH, on a machine without a GPU.

SGLang finds :func:`activate` through the entry-point group ``sglang.srt.platforms``. The
platform is opt-in: it is active only where ``SGLANG_PLATFORM=dflash_cpu`` is set, so that
installing the package never takes a CUDA host over.
"""

from __future__ import annotations

import os

NAME = "dflash_cpu"
"""Name of the platform, and of its attention backend."""


def selected() -> bool:
    """Whether this process was told to run on the CPU platform."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """Entry point: the platform class's qualified name, or None unless selected."""
    if selected():
        # OpenMP reads this when a process loads it, so it is set for the processes SGLang is
        # about to start. By default a thread that waits at the end of a parallel region spins;
        # where anything else runs on the cores, each of a forward's few hundred regions then
        # waits for the scheduler (measured: a 576 x 3072 product takes 7.9 ms instead of 0.3
        # beside one busy process on two cores).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return "sglang_dflash.platforms.cpu.DFlashCpuPlatform" if selected() else None
