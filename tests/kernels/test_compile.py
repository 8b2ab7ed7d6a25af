"""The kernels compile for every supported GPU, within its registers."""

from __future__ import annotations

import json

from tests.kernels.test_children import child

ARCHITECTURES = {"sm_80", "sm_89", "sm_90", "sm_100", "sm_120"}
OPERATIONS = {
    *("prepare_block", "accept", "append_context", "move_rows"),
    *("topk", "merge_topk", "grow_tree", "tree_mask"),
}


def test_every_kernel_compiles_for_every_architecture_without_spilling():
    # Tests that interpret kernels must not turn this one into an interpreter too.
    result = child("scripts/compile_kernels.py", "--json", TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stdout + result.stderr
    usages = json.loads(result.stdout)
    assert {(usage["operation"], usage["arch"]) for usage in usages} == {
        (operation, arch) for operation in OPERATIONS for arch in ARCHITECTURES
    }
    for usage in usages:
        assert usage["spill_bytes"] == 0, usage
        assert usage["launches"] == 1, usage
        # What a block may have without giving up half of an SM's threads (sm_80 and later).
        assert usage["shared_bytes"] <= 32 * 1024, usage


STARVED = """
import sys
sys.path.insert(0, "scripts")
import compile_kernels
compile = compile_kernels.triton.compile
compile_kernels.triton.compile = lambda source, target, options: compile(
    source, target=target, options={**options, "maxnreg": 32}
)
sys.argv = ["compile_kernels.py", "--arch", "90"]
sys.exit(compile_kernels.main())
"""


def test_a_kernel_that_spills_fails_the_script():
    result = child("-c", STARVED, TRITON_INTERPRET="0")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "error: accept (tree N=128 D=128 int64) on sm_90" in result.stderr
    assert "bytes spilled" in result.stderr
    assert "error: prepare_block" not in result.stderr
