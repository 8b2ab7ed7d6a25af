"""Is the installed SGLang one whose internals this package was written against?

Every seam (:mod:`sglang_dflash.seams`) has a fingerprint per certified release, read from
SGLang's source with ``ast``: its signature, and a hash of its whole source without comments,
docstrings and layout. Equal hashes run. Equal signatures over changed source run with a warning,
and the report says so, for features that rest on more than signatures. A changed signature, a
missing seam or a release that was never certified is refused.

Nothing of SGLang is imported. An unmodified release is recognised by the hashes of its files
alone, in a few milliseconds.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash import platforms
from sglang_dflash.seams import PLATFORM_SEAMS, SEAMS

logger = logging.getLogger("sglang_dflash")

OVERRIDE = "SGLANG_DFLASH_ALLOW_UNTESTED"
"""Set to 1 to run on a release that was never certified, at one's own risk."""
FINGERPRINTS = Path(__file__).with_name("fingerprints.json")


class IncompatibleError(RuntimeError):
    """The installed SGLang is not one this package can drive."""


@dataclass(frozen=True)
class Report:
    """How the installed SGLang compares with a certified release."""

    version: str
    changed: tuple[str, ...] = ()
    """Seams whose source changed behind an unchanged signature."""
    certified: bool = True
    """False on a release outside the table, allowed by :data:`OVERRIDE`."""

    @property
    def exact(self) -> bool:
        """Whether every seam is the certified one, byte for byte but for comments."""
        return self.certified and not self.changed


@functools.cache
def check() -> Report:
    """Compare the installed SGLang with the certified releases; logs once what differs.

    Raises:
        IncompatibleError: naming the release or the seams, and the remedy.
    """
    seams = SEAMS + PLATFORM_SEAMS if platforms.selected() else SEAMS
    report = compare(
        importlib.metadata.version("sglang"),
        reader(sglang_root()),
        certified(),
        seams=seams,
        allow_untested=os.environ.get(OVERRIDE) == "1",
    )
    if not report.certified:
        logger.warning(
            "DFLASH: sglang %s was never certified for sglang-dflash; it runs because %s=1.",
            report.version,
            OVERRIDE,
        )
    if report.changed:
        logger.warning(
            "DFLASH: sglang %s has changed source behind unchanged signatures in %s. It runs, "
            "but this combination was not tested.",
            report.version,
            ", ".join(report.changed),
        )
    return report


def compare(
    version: str,
    read: Callable[[str], bytes | None],
    table: Mapping[str, Any],
    *,
    seams: Iterable[str] = SEAMS,
    allow_untested: bool = False,
) -> Report:
    """Compare one SGLang with the table.

    Args:
        version: its release.
        read: gives a file below ``sglang/`` as bytes, or None where it is missing.
        table: as :func:`certified` returns it; the newest release last.
        seams: those to compare.
        allow_untested: compare an unknown release with the newest certified one instead of
            refusing it. A changed signature is refused all the same: calls would fail.

    Raises:
        IncompatibleError: the release or one of the seams cannot be used.
    """
    newest = list(table)[-1]
    install = f"pip install sglang=={newest}"
    known = version in table
    if not known and not allow_untested:
        raise IncompatibleError(
            f"DFLASH: sglang {version} is not certified for sglang-dflash (certified: "
            f"{', '.join(table)}). Install a certified release ({install}), set {OVERRIDE}=1 to "
            "try this one, or uninstall sglang-dflash to use SGLang's own worker."
        )
    entry = table[version if known else newest]
    changed: list[str] = []
    broken: list[str] = []
    for seam in seams:
        expected = entry["seams"][seam]
        content = read(seam.partition(":")[0])
        if content is not None and _digest(content) == entry["files"][seam.partition(":")[0]]:
            continue
        found = fingerprint(content, seam)
        if found is None:
            broken.append(f"{seam} is missing")
        elif found["signature"] != expected["signature"]:
            change = _signature_change(expected["signature"], found["signature"])
            broken.append(f"{seam} has another signature ({change})")
        elif found["sha256"] != expected["sha256"]:
            changed.append(seam)
    if broken:
        raise IncompatibleError(
            f"DFLASH: sglang {version} does not offer what sglang-dflash is built on: "
            f"{'; '.join(broken)}. Install a certified, unmodified release ({install}), or "
            "uninstall sglang-dflash to use SGLang's own worker."
        )
    return Report(version, tuple(changed), certified=known)


def certified() -> dict[str, Any]:
    """The shipped table: release -> ``files`` (path -> hash) and ``seams`` (seam -> print)."""
    return json.loads(FINGERPRINTS.read_text(encoding="utf-8"))


def sglang_root() -> Path:
    """The installed ``sglang`` package folder, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise IncompatibleError("DFLASH: sglang is not installed. Run: pip install sglang-dflash")
    return Path(next(iter(spec.submodule_search_locations)))


def reader(root: Path) -> Callable[[str], bytes | None]:
    """Reads files below a ``sglang`` folder; None where there is none."""

    @functools.cache
    def read(path: str) -> bytes | None:
        file = root / path
        return file.read_bytes() if file.is_file() else None

    return read


def take(read: Callable[[str], bytes | None]) -> dict[str, Any]:
    """The table entry of an SGLang release.

    Raises:
        IncompatibleError: seams are missing from it.
    """
    seams = {seam: fingerprint(read(seam.partition(":")[0]), seam) for seam in _all_seams()}
    missing = [seam for seam, value in seams.items() if value is None]
    if missing:
        raise IncompatibleError(f"missing from this release: {', '.join(missing)}")
    files = sorted({seam.partition(":")[0] for seam in seams})
    return {
        "files": {path: _digest(content) for path in files if (content := read(path)) is not None},
        "seams": seams,
    }


def _all_seams() -> list[str]:
    return sorted(SEAMS + PLATFORM_SEAMS)


def fingerprint(content: bytes | None, seam: str) -> dict[str, str] | None:
    """A seam's ``signature`` and ``sha256`` in its file's content, or None where it is missing.

    The signature of a function is its parameters, ``=`` marking those with a default; that of
    a class its annotated fields and its methods. Annotations and default values count as source.
    """
    if content is None:
        return None
    node: ast.AST | None = _parse(content)
    for name in seam.partition(":")[2].split("."):
        node = _child(node, name)
    if node is None:
        return None
    return {"signature": _signature(node), "sha256": _digest(_canonical(node).encode())}


@functools.lru_cache(maxsize=1)
def _parse(content: bytes) -> ast.Module:
    return ast.parse(content)


def _child(node: ast.AST | None, name: str) -> ast.AST | None:
    """The last definition of a name in a module or class: an overload's implementation."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for child in reversed(getattr(node, "body", [])):
        if isinstance(child, definitions) and child.name == name:
            return child
    return None


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        fields = [
            f"{ast.unparse(item.target)}{'=' if item.value else ''}"
            for item in node.body
            if isinstance(item, ast.AnnAssign)
        ]
        methods = [
            f"{item.name}({_signature(item)})"
            for item in node.body
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        return "; ".join(fields + methods)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    args = node.args
    positional = args.posonlyargs + args.args
    required = len(positional) - len(args.defaults)
    parts = [f"{a.arg}{'=' if i >= required else ''}" for i, a in enumerate(positional)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if args.vararg:
        parts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        parts.append("*")
    parts += [
        f"{a.arg}{'=' if default else ''}"
        for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parts.append(f"**{args.kwarg.arg}")
    return ", ".join(parts)


def _signature_change(expected: str, found: str) -> str:
    """What differs, member by member for a class."""
    old, new = expected.split("; "), found.split("; ")
    gone = [member for member in old if member not in new]
    added = [member for member in new if member not in old]
    return f"was: {'; '.join(gone) or 'without'}, now: {'; '.join(added) or 'gone'}"


def _canonical(node: Any) -> str:
    """A syntax tree as text, without docstrings.

    ``ast.dump`` will not do: Python releases differ in the empty fields they print.
    """
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
            value = value[1:]
        if value is not None and value != []:
            fields.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
