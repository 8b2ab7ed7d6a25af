"""Triton where it is installed, and what every launcher needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # the references need torch alone
    triton = None  # type: ignore[assignment]
    tl = None  # type: ignore[assignment]


class _NotInstalled:
    """Stands for a kernel where Triton is missing: importable, an error when launched."""

    def __init__(self, name: str):
        self._name = name

    def __getitem__(self, grid: object) -> Any:
        raise ImportError(
            f"{self._name} runs on the GPU through Triton, which is not installed here: "
            "pip install triton, or pass CPU tensors"
        )


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or a stand-in that raises when launched."""
    return _NotInstalled(function.__name__) if triton is None else triton.jit(function)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``max(value, 1)``."""
    return 1 << max(value - 1, 0).bit_length()
