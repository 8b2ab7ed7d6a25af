"""Certified SGLang releases: what runs, what warns and what is refused."""

from __future__ import annotations

import ast
import importlib.metadata
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import compat, seams
from sglang_dflash.compat import IncompatibleError

FILE = "srt/worker.py"
SOURCE = '''
"""A module."""
import os

class Worker(Base):
    """A class."""
    rows: int
    name: str = "w"

    def step(self, batch, *, publish=None):
        """Run a batch."""
        return batch + 1

def helper(a, b=1, *rest, c, **more):
    return a
'''
SEAMS = (f"{FILE}:Worker", f"{FILE}:Worker.step", f"{FILE}:helper")


def reader(source: str | None) -> Callable[[str], bytes | None]:
    return lambda path: None if source is None else source.encode()


def table(source: str = SOURCE, version: str = "1.0") -> dict[str, Any]:
    """The table as it would be written for a release with this source."""
    content = source.encode()
    return {
        version: {
            "files": {FILE: compat._digest(content)},
            "seams": {seam: compat.fingerprint(content, seam) for seam in SEAMS},
        }
    }


def compare(source: str | None, version: str = "1.0", **options: Any) -> compat.Report:
    return compat.compare(version, reader(source), table(), seams=SEAMS, **options)


def test_an_unmodified_release_is_exact() -> None:
    assert compare(SOURCE).exact


def test_comments_docstrings_and_layout_do_not_count() -> None:
    source = SOURCE.replace('"""Run a batch."""', '"""Run it."""\n\n        # a comment')
    source = source.replace("batch, *, publish=None", "batch,\n        *,\n        publish=None")
    assert source != SOURCE
    assert compare(source).exact


def test_changed_source_behind_an_equal_signature_is_reported() -> None:
    report = compare(SOURCE.replace("batch + 1", "batch + 2"))
    assert report.changed == (f"{FILE}:Worker", f"{FILE}:Worker.step")
    assert not report.exact


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("batch, *, publish=None", "batch, *, publish", "was: self, batch, *, publish="),
        ("batch, *, publish=None", "batch, publish=None", "now: self, batch, publish="),
        ("rows: int", "rows: int\n    width: int", "now: width"),
        ("def helper(a, b=1,", "def helper(a, b,", "was: a, b=, *rest, c, **more"),
        ("def helper(", "def another(", f"{FILE}:helper is missing"),
    ],
)
def test_a_changed_signature_is_refused_with_the_change(old: str, new: str, named: str) -> None:
    with pytest.raises(IncompatibleError) as caught:
        compare(SOURCE.replace(old, new))
    message = str(caught.value)
    assert named in message
    assert "sglang 1.0" in message
    assert "pip install sglang==1.0" in message


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"Worker\.step is missing"):
        compare(None)


def test_an_unknown_release_is_refused_with_the_certified_ones_and_the_override() -> None:
    with pytest.raises(IncompatibleError) as caught:
        compare(SOURCE, "2.0")
    message = str(caught.value)
    assert "sglang 2.0 is not certified" in message
    assert "(certified: 1.0)" in message
    assert "SGLANG_DFLASH_ALLOW_UNTESTED=1" in message


def test_the_override_runs_an_unknown_release_whose_signatures_hold() -> None:
    report = compare(SOURCE.replace("batch + 1", "batch + 2"), "2.0", allow_untested=True)
    assert not report.certified
    assert not report.exact
    assert report.changed


def test_the_override_does_not_run_a_release_that_calls_would_fail_on() -> None:
    with pytest.raises(IncompatibleError, match="another signature"):
        compare(SOURCE.replace("self, batch", "self, work"), "2.0", allow_untested=True)


def test_the_newest_certified_release_is_the_measure_of_an_unknown_one() -> None:
    tables = table("", "1.0") | table(SOURCE, "1.1")
    report = compat.compare("2.0", reader(SOURCE), tables, seams=SEAMS, allow_untested=True)
    assert report.changed == ()


def test_the_installed_release_is_certified_and_the_table_is_current() -> None:
    installed = importlib.metadata.version("sglang")
    entry = compat.certified()[installed]
    assert entry == compat.take(compat.reader(compat.sglang_root()))
    for release, entry in compat.certified().items():
        assert set(entry["seams"]) == set(seams.SEAMS + seams.PLATFORM_SEAMS), release


def test_source_and_files_agree_on_the_installed_release() -> None:
    """The fast path by whole files says the same as the comparison of syntax trees."""
    installed = importlib.metadata.version("sglang")
    entry = compat.certified()[installed]
    entry["files"] = dict.fromkeys(entry["files"], "changed")
    report = compat.compare(installed, compat.reader(compat.sglang_root()), {installed: entry})
    assert report.exact


def test_a_difference_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "certified", lambda: {"0.0.1": entry_of_installed()})
    monkeypatch.setenv(compat.OVERRIDE, "1")
    compat.check.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "sglang_dflash"):
            assert not compat.check().exact
            compat.check()
    finally:
        compat.check.cache_clear()
    assert caplog.text.count("was never certified") == 1


def entry_of_installed() -> dict[str, Any]:
    return compat.take(compat.reader(compat.sglang_root()))


def test_the_check_imports_neither_sglang_nor_torch() -> None:
    code = (
        "import sys; from sglang_dflash import compat; assert compat.check().exact; "
        "sys.exit('sglang' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def sglang_imports(file: Path) -> set[tuple[str, str]]:
    """Files below ``sglang/`` and the names a module takes from them when it runs."""
    tree = ast.parse(file.read_text())
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    root, found = compat.sglang_root(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types:
            parts = (node.module or "").split(".")
            if parts[0] == "sglang":
                path = "/".join(parts[1:])
                path += ".py" if (root / f"{path}.py").exists() else "/__init__.py"
                found |= {(path, alias.name) for alias in node.names}
    return found


PACKAGE = Path(compat.__file__).parent


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE / "platforms"], ids=lambda f: f.name)
def test_what_the_package_imports_from_sglang_is_fingerprinted(folder: Path) -> None:
    """Every class and function taken from the file that defines it has a seam."""
    covered = seams.SEAMS + (seams.PLATFORM_SEAMS if folder != PACKAGE else ())
    read = compat.reader(compat.sglang_root())
    imported = {pair for file in folder.glob("*.py") for pair in sglang_imports(file)}
    assert imported
    unguarded = {
        f"{path}:{name}"
        for path, name in imported
        if compat.fingerprint(read(path), f"{path}:{name}") is not None
        and not any(seam.split(".py:")[1].split(".")[0] == name for seam in covered if path in seam)
    }
    assert not unguarded


SCRIPT = Path(__file__).parents[2] / "scripts" / "fingerprint_sglang.py"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--diff"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_script_compares_the_installed_release() -> None:
    result = run_script()
    assert result.returncode == 0, result.stderr
    assert "0 seams changed, no signature" in result.stdout


def test_the_script_reads_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/srt/plugins/__init__.py", "def load_plugins(): pass")
    result = run_script(str(wheel))
    assert result.returncode == 1
    assert "sglang 9.9.9" in result.stdout
    assert "DFlashWorkerV2.__init__ is missing" in result.stdout
    assert "load_plugins is missing" not in result.stdout
