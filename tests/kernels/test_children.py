"""Tests that need a fresh interpreter: what they prove depends on the environment at import."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python from the repository's root with variables added to the environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def assert_all_pass(file: str, tests: int, **environment: str) -> None:
    path = str(Path(__file__).with_name(file))
    result = child("-m", "pytest", "-q", "-p", "no:cacheprovider", path, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf"^{tests} passed", result.stdout, re.MULTILINE), result.stdout


def test_kernels_equal_their_references_under_the_interpreter():
    assert_all_pass("interpreted.py", 8, TRITON_INTERPRET="1")


def test_context_keys_equal_sglangs():
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("compares with SGLang's own norm and rope, and SGLang is not installed")
    assert_all_pass("against_sglang.py", 12, SGLANG_PLATFORM="dflash_cpu")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None                      # any import of it raises ImportError
import torch
from sglang_dflash.kernels import append_context, move_rows, prepare_block
from sglang_dflash.kernels.accept import Accepted, accept, chain_links, launch_accept
inputs = (torch.tensor([[5, 6]]), *chain_links(2, "cpu"), torch.tensor([[6, 9]]))
out = accept(*inputs, torch.tensor([10]), output_width=2)
assert out.output_tokens.tolist() == [[6, 9]]
assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]
try:
    launch_accept(*inputs, torch.tensor([10]), out=out)
except ImportError as error:
    print(error)
"""


def test_references_need_neither_triton_nor_sglang():
    result = child("-c", WITHOUT_TRITON)
    assert result.returncode == 0, result.stderr
    assert "_accept_kernel" in result.stdout
    assert "pip install triton" in result.stdout
