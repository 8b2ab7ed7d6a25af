"""The kernels on a CUDA device; needs torch, Triton and pytest alone.

Where the project is not installed, the checkout's ``kernels/`` is imported under its package's
name, so that the tests run on a machine without SGLang.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = "sglang_dflash.kernels"


def import_from_checkout() -> None:
    """Make ``sglang_dflash.kernels`` the checkout's ``kernels/``."""
    sys.path.insert(0, str(ROOT))
    folder = ROOT / "kernels"
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


try:
    importlib.import_module(PACKAGE)
except ModuleNotFoundError:
    import_from_checkout()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and skip them visibly where there is no CUDA device."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
