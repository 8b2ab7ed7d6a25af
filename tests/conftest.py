"""Order of the suite and what every folder shares."""

from __future__ import annotations

import pytest

FOLDERS = ("kernels", "unit", "gpu", "train", "server")
"""Fast folders first: a broken formula should not wait for a server to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[int, bool]:
        folder = item.path.parent.name
        index = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
        return index, item.get_closest_marker("slow") is not None

    items.sort(key=order)
