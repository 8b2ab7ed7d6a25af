"""Compile every kernel ahead of time for the supported GPUs; needs Triton, but no GPU and no CUDA.

    python scripts/compile_kernels.py                    all architectures, as a table
    python scripts/compile_kernels.py --arch 90 --json   one of them, for a program

What is compiled is what would be launched: each case calls the operation's own launcher with
tensors of a served model's shapes while the kernels are replaced by recorders, and every recorded
launch is compiled with the arguments, specialisations and options it was made with. Registers,
local memory (where spilled registers go) and shared memory are read from the resulting cubin.

Exits with 1 when a kernel spills, when an operation takes more than one launch, or when a kernel
of the package is reached by no case.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from sglang_dflash.kernels import (
    accept,
    append_context,
    grow_tree,
    merge_topk,
    move_rows,
    prepare_block,
    topk,
    tree_mask,
)
from sglang_dflash.kernels.layer_caches import LayerCaches
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 89, 90, 100, 120)
MODULES: tuple[ModuleType, ...] = (
    prepare_block,
    accept,
    append_context,
    move_rows,
    topk,
    merge_topk,
    grow_tree,
    tree_mask,
)
LENGTHS = {"int32": torch.int32, "int64": torch.int64}
POINTERS = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Case:
    """One operation at one set of shapes."""

    operation: str
    shapes: str
    launch: Callable[[], object]


@dataclass(frozen=True)
class Launch:
    """One recorded launch of a kernel."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """What one compiled launch needs; the fields are the table's columns."""

    operation: str
    shapes: str
    arch: str
    launches: int
    warps: int
    registers: int
    spill_bytes: int
    """Local memory per thread: spilled registers, and arrays that did not fit registers."""
    shared_bytes: int


def prepare_block_case(lengths: str, block: int, rows: int) -> Case:
    """One step of 8 requests."""
    length = torch.zeros(8, dtype=LENGTHS[lengths])
    table = torch.zeros(16, 4096, dtype=torch.int32)
    out = prepare_block.DraftBlock.empty(8, block, rows, "cpu")
    return Case(
        "prepare_block",
        f"B={block} N={rows} {lengths}",
        lambda: prepare_block.launch_prepare_block(
            torch.zeros(8, dtype=torch.int64), length, length, table, mask_token_id=151669, out=out
        ),
    )


def accept_case(lengths: str, rows: int, width: int, *, chain: bool) -> Case:
    """Rows of 8 requests; a chain's links are one row expanded over the batch."""
    links = [
        link.expand(8, *link.shape[1:]) if chain else link.repeat(8, *[1] * (link.dim() - 1))
        for link in accept.chain_links(rows, "cpu")
    ]
    tokens = torch.zeros(8, rows, dtype=torch.int64)
    length = torch.zeros(8, dtype=LENGTHS[lengths])
    out = accept.Accepted.empty(8, width, length.dtype, "cpu")
    return Case(
        "accept",
        f"{'chain' if chain else 'tree'} N={rows} D={width} {lengths}",
        lambda: accept.launch_accept(tokens, *links, tokens, length, out=out),
    )


def append_context_case(
    dtype: torch.dtype,
    layers: int,
    heads: int,
    head_dim: int,
    *,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    prefill: bool = False,
) -> Case:
    """8 requests of 16 rows, or one prefill of 128 tokens."""
    rotary_dim = rotary_dim or head_dim
    caches = [torch.zeros(32, heads, head_dim, dtype=dtype) for _ in range(2 * layers)]
    cache = append_context.ContextCache(
        k_cache=caches[:layers],
        v_cache=caches[layers:],
        k_norm_weight=torch.ones(layers, head_dim, dtype=dtype),
        eps=1e-6,
        cos_sin_cache=torch.zeros(64, rotary_dim),
        is_neox=is_neox,
    )
    rows = torch.zeros(128, dtype=torch.int64)
    commit_lengths = None if prefill else torch.ones(8, dtype=torch.int32)
    return Case(
        "append_context",
        f"{name(dtype)} L={layers} H={heads} D={head_dim} R={rotary_dim} "
        f"{'neox' if is_neox else 'interleaved'} {'prefill' if prefill else 'step'}",
        lambda: append_context.launch_append_context(
            torch.zeros(128, layers, 2, heads, head_dim, dtype=dtype),
            cache,
            positions=rows,
            slots=rows,
            commit_lengths=commit_lengths,
            rows_per_request=1 if prefill else 16,
        ),
    )


def move_rows_case(dtype: torch.dtype, heads: int, head_dim: int, rows: int, width: int) -> Case:
    """The target's K/V of 8 requests; the number of layers is in the grid alone."""
    caches = LayerCaches([torch.zeros(32, heads, head_dim, dtype=dtype) for _ in range(4)])
    slots = torch.zeros(8, rows, dtype=torch.int64)
    path = torch.zeros(8, width, dtype=torch.int32)
    return Case(
        "move_rows",
        f"{name(dtype)} H={heads} D={head_dim} N={rows} path={width}",
        lambda: move_rows.launch_move_rows(caches, slots, path, path[:, 0].contiguous()),
    )


def tree_mask_case(lengths: str, bs: int, rows: int) -> Case:
    """``bs`` requests."""
    ancestors = torch.zeros(bs, rows, -(-rows // 64), dtype=torch.int64)
    length = torch.zeros(bs, dtype=LENGTHS[lengths])
    mask = torch.zeros(1, dtype=torch.bool)
    return Case(
        "tree_mask",
        f"bs={bs} N={rows} {lengths}",
        lambda: tree_mask.launch_tree_mask(ancestors, length, mask),
    )


def topk_case(dtype: torch.dtype, vocabulary: int, candidates: int) -> Case:
    """The drafted rows of 2 requests."""
    out = topk.TopK.empty(30, topk.slices_of(vocabulary), candidates, "cpu")
    return Case(
        "topk",
        f"{name(dtype)} V={vocabulary} K={candidates}",
        lambda: topk.launch_topk(torch.zeros(30, vocabulary, dtype=dtype), first_id=0, out=out),
    )


def merge_topk_case(slices: int, candidates: int) -> Case:
    """The drafted rows of 2 requests."""
    best = topk.TopK.empty(30, slices, candidates, "cpu")
    out = merge_topk.Candidates.empty(30, candidates, "cpu")
    return Case(
        "merge_topk",
        f"P={slices} K={candidates}",
        lambda: merge_topk.launch_merge_topk(best, out=out),
    )


def grow_tree_case(lengths: str, depths: int, candidates: int, rows: int, *, spine: bool) -> Case:
    """Trees of 8 requests."""
    ids = torch.zeros(8, depths, candidates, dtype=torch.int64)
    length = torch.zeros(8, dtype=LENGTHS[lengths])
    out = grow_tree.DraftTree.empty(8, rows, "cpu")
    return Case(
        "grow_tree",
        f"D={depths} K={candidates} N={rows} {'spine' if spine else 'free'} {lengths}",
        lambda: grow_tree.launch_grow_tree(
            ids, ids.float(), ids[:, 0, 0], length, keep_spine=spine, spine_discount=0.0, out=out
        ),
    )


def name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def cases() -> list[Case]:
    """Shapes of published targets and drafters, and the corners of what the launchers take."""
    half, bf16, full = torch.float16, torch.bfloat16, torch.float32
    return [
        prepare_block_case("int64", 16, 16),
        prepare_block_case("int32", 16, 128),
        accept_case("int64", 16, 16, chain=True),
        accept_case("int32", 8, 8, chain=True),
        accept_case("int64", 64, 16, chain=False),
        accept_case("int32", 128, 32, chain=False),
        accept_case("int64", 128, 128, chain=False),
        append_context_case(bf16, 5, 8, 128),
        append_context_case(bf16, 5, 8, 128, prefill=True),
        append_context_case(half, 8, 4, 128),
        append_context_case(full, 3, 3, 64),
        append_context_case(bf16, 5, 8, 80, rotary_dim=32, is_neox=False),
        append_context_case(bf16, 5, 32, 96, rotary_dim=48),
        append_context_case(bf16, 6, 16, 256, rotary_dim=64),
        append_context_case(full, 6, 32, 256),
        move_rows_case(bf16, 8, 128, 64, 16),
        move_rows_case(full, 3, 64, 16, 8),
        move_rows_case(torch.uint8, 8, 128, 128, 16),
        move_rows_case(bf16, 1, 576, 128, 128),
        topk_case(bf16, 49_152, 8),
        topk_case(full, 151_936, 16),
        merge_topk_case(12, 8),
        merge_topk_case(38, 16),
        grow_tree_case("int64", 7, 8, 8, spine=True),
        grow_tree_case("int64", 15, 8, 64, spine=True),
        grow_tree_case("int32", 15, 8, 64, spine=False),
        grow_tree_case("int64", 31, 16, 128, spine=True),
        grow_tree_case("int64", 31, 16, 128, spine=False),
        tree_mask_case("int64", 8, 16),
        tree_mask_case("int32", 512, 128),
    ]


@contextmanager
def recording(launches: list[Launch]) -> Iterator[None]:
    """Replace every kernel of the package by one that only notes how it was launched."""

    class Recorder:
        def __init__(self, kernel: Any):
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **keywords: launches.append(
                Launch(self.kernel, arguments, keywords)
            )

    originals = kernels()
    for module, attribute, kernel in originals:
        setattr(module, attribute, Recorder(kernel))
    try:
        yield
    finally:
        for module, attribute, kernel in originals:
            setattr(module, attribute, kernel)


def kernels() -> list[tuple[ModuleType, str, Any]]:
    """Every kernel of the package: module, attribute, jitted function."""
    return [
        (module, attribute, value)
        for module in MODULES
        for attribute, value in vars(module).items()
        if isinstance(value, triton.runtime.JITFunction)
    ]


def compile_launch(launch: Launch, arch: int) -> Any:
    """Compile one launch as Triton would on a GPU of compute capability ``arch``."""
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False))
    options = {key: value for key, value in launch.keywords.items() if key not in names}
    constexprs = {key: value for key, value in launch.keywords.items() if key in names}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, argument in enumerate(names):
        if argument in constexprs:
            signature[argument] = "constexpr"
            continue
        value = values[argument]
        if value is None or (isinstance(value, int) and value == 1):
            # Triton folds both into the code.
            signature[argument] = "constexpr"
            constexprs[argument] = value
            continue
        aligned = False
        if isinstance(value, torch.Tensor):
            signature[argument] = POINTERS[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, int):
            signature[argument] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        else:
            signature[argument] = "fp32"
        if aligned:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def measure(case: Case, launches: int, compiled: Any, arch: int) -> Usage:
    """Read what a compiled launch needs from its cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", cubin.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    # One line per function: "REG:40 STACK:0 SHARED:64 LOCAL:0 ..."
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage for {case.operation}:\n{report}")
    registers, stack, _, local = map(int, found.groups())
    return Usage(
        operation=case.operation,
        shapes=case.shapes,
        arch=f"sm_{arch}",
        launches=launches,
        warps=compiled.metadata.num_warps,
        registers=registers,
        spill_bytes=stack + local,
        shared_bytes=compiled.metadata.shared,
    )


def compile_all(selected: list[Case], architectures: list[int], jobs: int) -> list[Usage]:
    """Compile every case for every architecture.

    Raises:
        RuntimeError: a kernel of the package is launched by no case.
    """
    recorded: list[tuple[Case, list[Launch]]] = []
    for case in selected:
        launches: list[Launch] = []
        with recording(launches):
            case.launch()
        recorded.append((case, launches))
    reached = {launch.kernel for _, launches in recorded for launch in launches}
    for module, attribute, kernel in kernels():
        if kernel not in reached:
            raise RuntimeError(
                f"{module.__name__}.{attribute} is launched by no case; add one to cases()"
            )

    def usage(job: tuple[Case, int, Launch, int]) -> Usage:
        case, launches, launch, arch = job
        return measure(case, launches, compile_launch(launch, arch), arch)

    work = [
        (case, len(launches), launch, arch)
        for case, launches in recorded
        for launch in launches
        for arch in architectures
    ]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(usage, work))


def table(usages: list[Usage]) -> str:
    """The usages as aligned text."""
    rows = [[str(value) for value in asdict(usage).values()] for usage in usages]
    rows.insert(0, list(Usage.__dataclass_fields__))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> int:
    """Compile, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--arch",
        type=int,
        action="append",
        choices=ARCHITECTURES,
        help="compute capability, times ten; may be repeated (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, not a table")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time (default: 2)")
    arguments = parser.parse_args()
    usages = compile_all(cases(), arguments.arch or list(ARCHITECTURES), arguments.jobs)
    if arguments.json:
        print(json.dumps([asdict(usage) for usage in usages], indent=1))
    else:
        print(table(usages))
    failures = [usage for usage in usages if usage.spill_bytes or usage.launches != 1]
    for usage in failures:
        print(
            f"error: {usage.operation} ({usage.shapes}) on {usage.arch}: {usage.spill_bytes} "
            f"bytes spilled, {usage.launches} launches; wanted none and one",
            file=sys.stderr,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
