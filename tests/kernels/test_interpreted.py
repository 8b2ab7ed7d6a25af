"""Every Triton kernel equals its reference, proven without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "operation", ["prepare_block", "accept", "append_context", "move_rows"]
)
def test_kernel_equals_reference_under_the_interpreter(operation):
    file = Path(__file__).with_name("interpreted.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"{file}::test_{operation}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^1 passed", result.stdout, re.MULTILINE), result.stdout
