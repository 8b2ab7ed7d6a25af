"""Nothing on the way to a launch waits for the device, copies, or allocates.

A step is captured in a CUDA graph and must not stall the host outside one. With outputs given,
each operation on the GPU is therefore one kernel launch, and asks nothing else of torch but what
a tensor looks like: a read of a value, an allocation, a conversion, a boolean mask would each be
a call into torch, and is caught here, without a GPU, by running the launchers' Python with the
kernel itself left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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
from torch.overrides import TorchFunctionMode

from tests.kernels import parity
from tests.kernels.cases import (
    accept_case,
    block_case,
    context_case,
    logits_case,
    mask_case,
    move_case,
    tree_case,
)

HOST_METADATA = {
    f"Tensor.{name}"
    for name in (
        *("shape.__get__", "dtype.__get__", "device.__get__", "is_cuda.__get__"),
        *("stride", "dim", "is_contiguous", "__len__"),
    )
}
"""What may be asked of a tensor: its description lives on the host."""


class OnlyMetadata(TorchFunctionMode):
    """Raises on every other use of torch."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = torch.overrides.resolve_name(function) or repr(function)
        if name.removeprefix("torch.") not in HOST_METADATA:
            raise AssertionError(f"{name} on the way to a launch")
        return function(*arguments, **(keywords or {}))


class Recorder:
    """A kernel that notes its launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **keywords: Any) -> None:
            self.launches += 1

        return launch


def prepare_block_call() -> Callable[[], object]:
    case = block_case(0, 3, 4, 6)
    out = parity.block_outputs(case)
    sizes = {"block_size": 4, "verify_rows": 6}
    return lambda: prepare_block.prepare_block(
        *case[:4], mask_token_id=case.mask_token_id, **sizes, out=out
    )


def accept_call() -> Callable[[], object]:
    case = accept_case(0, 3, 70, agreement=0.5, branching=0.5)
    out = parity.accept_outputs(case)
    return lambda: accept.accept(*case[:6], output_width=case.output_width, out=out)


def append_context_call(*, prefill: bool) -> Callable[[], object]:
    case = context_case(0, 3, 4, prefill=prefill)
    cache = case.cache()
    return lambda: append_context.append_context(
        case.kv,
        cache,
        positions=case.positions,
        slots=case.slots,
        commit_lengths=case.commit_lengths,
        rows_per_request=case.rows_per_request,
    )


def move_rows_call() -> Callable[[], object]:
    case = move_case(0, 3, 9, 5)
    caches = case.layers()
    return lambda: move_rows.move_rows(caches, case.slots, case.path, case.accept_lengths)


def grow_tree_call() -> Callable[[], object]:
    case = tree_case(0, 3, 7, 4, 70)
    out = parity.tree_outputs(case)
    return lambda: grow_tree.grow_tree(*case[:4], rows=case.rows, out=out)


def topk_call() -> Callable[[], object]:
    case = logits_case(0, 3, 50, 4, 2)
    out = parity.topk_outputs(case)
    return lambda: topk.topk(case.logits, 4, out=out)


def merge_topk_call() -> Callable[[], object]:
    case = logits_case(0, 3, 50, 4, 2)
    best, out = parity.topk_outputs(case), parity.candidates_outputs(case)
    return lambda: merge_topk.merge_topk(best, 4, out=out)


def tree_mask_call() -> Callable[[], object]:
    case = mask_case(0, 3, 70)
    return lambda: tree_mask.tree_mask(*case)


CALLS = [
    pytest.param(prepare_block, prepare_block_call(), id="prepare_block"),
    pytest.param(accept, accept_call(), id="accept"),
    pytest.param(append_context, append_context_call(prefill=False), id="append_context"),
    pytest.param(append_context, append_context_call(prefill=True), id="append_context-prefill"),
    pytest.param(move_rows, move_rows_call(), id="move_rows"),
    pytest.param(topk, topk_call(), id="topk"),
    pytest.param(merge_topk, merge_topk_call(), id="merge_topk"),
    pytest.param(grow_tree, grow_tree_call(), id="grow_tree"),
    pytest.param(tree_mask, tree_mask_call(), id="tree_mask"),
]


@pytest.fixture
def on_the_gpu(monkeypatch):
    """Send an operation down its GPU path on CPU tensors, with its kernel left out."""

    def patch(module) -> Recorder:
        name = module.__name__.rpartition(".")[2]
        recorder = Recorder()
        monkeypatch.setattr(module, f"_{name}_kernel", recorder)
        monkeypatch.setattr(module, f"{name}_reference", getattr(module, f"launch_{name}"))
        return recorder

    return patch


@pytest.mark.parametrize(("module", "call"), CALLS)
def test_an_operation_is_one_launch_and_nothing_else(on_the_gpu, module, call):
    recorder = on_the_gpu(module)
    with OnlyMetadata():
        call()
    assert recorder.launches == 1


@pytest.mark.parametrize(
    ("name", "violation"),
    [
        ("item", lambda x: x.item()),
        ("tolist", lambda x: x.tolist()),
        ("cpu", lambda x: x.cpu()),
        ("numpy", lambda x: x.numpy()),
        ("__bool__", lambda x: 1 if x else 0),
        ("__int__", lambda x: int(x)),
        ("nonzero", lambda x: x.nonzero()),
        ("gt", lambda x: x[x > 0]),
        ("to", lambda x: x.to(torch.int64)),
        ("empty", lambda x: torch.empty(3)),
        ("empty_like", lambda x: torch.empty_like(x)),
    ],
)
def test_a_planted_violation_is_caught(on_the_gpu, monkeypatch, name, violation):
    on_the_gpu(move_rows)
    launch, value, call = (
        move_rows.launch_move_rows,
        torch.ones((), dtype=torch.int32),
        move_rows_call(),
    )

    def planted(*arguments):
        violation(value)
        launch(*arguments)

    monkeypatch.setattr(move_rows, "move_rows_reference", planted)
    with pytest.raises(AssertionError, match=rf"{name}\b.* on the way"), OnlyMetadata():
        call()
