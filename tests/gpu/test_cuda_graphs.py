"""Each operation inside a CUDA graph: captured on one input, replayed on others.

A replay reads and writes the tensors of the capture. Whatever a launcher had read on the host, or
allocated for itself, would be the first input's and show on the second.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang_dflash.kernels.accept import accept, accept_reference
from sglang_dflash.kernels.append_context import append_context, append_context_reference
from sglang_dflash.kernels.grow_tree import grow_tree, grow_tree_reference
from sglang_dflash.kernels.merge_topk import merge_topk, merge_topk_reference
from sglang_dflash.kernels.move_rows import move_rows, move_rows_reference
from sglang_dflash.kernels.prepare_block import prepare_block, prepare_block_reference
from sglang_dflash.kernels.topk import topk, topk_reference
from sglang_dflash.kernels.tree_mask import tree_mask, tree_mask_reference

from tests.kernels import parity
from tests.kernels.cases import (
    accept_case,
    block_case,
    context_case,
    logits_case,
    mask_case,
    move_case,
    to,
    tree_case,
)

SEEDS = range(1, 6)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture ``call`` after compiling it outside the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def refill(static: tuple, case: tuple) -> None:
    """Copy a new case's tensors into those of the capture."""
    for target, source in zip(static, case, strict=True):
        if isinstance(target, torch.Tensor):
            # A chain's links are expanded and the same in every case.
            if target.stride(0) != 0:
                target.copy_(source)
        elif target != source:
            raise ValueError(f"{source} differs from the capture's {target}")


@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64])
def test_prepare_block(length_dtype):
    cases = [block_case(seed, 5, 8, 12, length_dtype=length_dtype) for seed in SEEDS]
    static = to(cases[0], "cuda")
    out = parity.block_outputs(static)
    sizes = {"mask_token_id": static.mask_token_id}
    graph = captured(
        lambda: prepare_block(*static[:4], **sizes, block_size=8, verify_rows=12, out=out)
    )
    for case in cases:
        refill(static, case)
        graph.replay()
        wanted = prepare_block_reference(*case[:4], **sizes, out=parity.block_outputs(case))
        parity.assert_equal(out, wanted)


@pytest.mark.parametrize("branching", [0.0, 0.4])
def test_accept(branching):
    cases = [
        accept_case(seed, 5, 24, agreement=0.8, branching=branching)._replace(output_width=24)
        for seed in SEEDS
    ]
    static = to(cases[0], "cuda")
    out = parity.accept_outputs(static)
    graph = captured(lambda: accept(*static[:6], output_width=24, out=out))
    for case in cases:
        refill(static, case)
        graph.replay()
        parity.assert_equal(out, accept_reference(*case[:6], out=parity.accept_outputs(case)))


def test_topk_and_merge_topk():
    cases = [logits_case(seed, 21, 9000, 8, 3, dtype=torch.bfloat16) for seed in SEEDS]
    static = to(cases[0], "cuda")
    best, out = parity.topk_outputs(static), parity.candidates_outputs(static)
    graph = captured(lambda: merge_topk(topk(static.logits, 8, out=best), 8, out=out))
    for case in cases:
        refill(static, case)
        graph.replay()
        wanted = merge_topk_reference(
            topk_reference(case.logits, first_id=0, out=parity.topk_outputs(case)),
            out=parity.candidates_outputs(case),
        )
        assert torch.equal(out.ids.cpu(), wanted.ids)
        torch.testing.assert_close(out.log_q.cpu(), wanted.log_q, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("keep_spine", [False, True])
def test_grow_tree(keep_spine):
    cases = [tree_case(seed, 5, 15, 8, 64, keep_spine=keep_spine, grain=0.5) for seed in SEEDS]
    options = {"keep_spine": keep_spine, "spine_discount": 0.0}
    static = to(cases[0], "cuda")
    out = parity.tree_outputs(static)
    graph = captured(lambda: grow_tree(*static[:4], rows=64, **options, out=out))
    for case in cases:
        refill(static, case)
        graph.replay()
        wanted = grow_tree_reference(*case[:4], **options, out=parity.tree_outputs(case))
        parity.assert_equal(out, wanted)


@pytest.mark.parametrize("prefill", [False, True])
def test_append_context(prefill):
    cases = [
        context_case(seed, 4, 8, heads=4, head_dim=128, dtype=torch.bfloat16, prefill=prefill)
        for seed in SEEDS
    ]
    static = to(cases[0], "cuda")
    cache = static.cache()

    def arguments(case):
        return {
            "positions": case.positions,
            "slots": case.slots,
            "commit_lengths": case.commit_lengths,
            "rows_per_request": case.rows_per_request,
        }

    graph = captured(lambda: append_context(static.kv, cache, **arguments(static)))
    for case in cases:
        refill(static, case)
        for tensor, fresh in zip(cache.caches.tensors, case.cache().caches.tensors, strict=True):
            tensor.copy_(fresh)
        graph.replay()
        wanted = case.cache()
        append_context_reference(case.kv, wanted, **arguments(case))
        tolerance = parity.TOLERANCE[torch.bfloat16]
        for actual, expected in zip(cache.caches.tensors, wanted.caches.tensors, strict=True):
            torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_move_rows():
    cases = [move_case(seed, 4, 24, 16, head_dim=128) for seed in SEEDS]
    static = to(cases[0], "cuda")
    caches = static.layers()
    graph = captured(lambda: move_rows(caches, *static[1:]))
    for case in cases:
        refill(static, case)
        for tensor, fresh in zip(caches.tensors, case.caches, strict=True):
            tensor.copy_(fresh)
        graph.replay()
        wanted = case.layers()
        move_rows_reference(wanted, *case[1:])
        for actual, expected in zip(caches.tensors, wanted.tensors, strict=True):
            assert torch.equal(actual.cpu(), expected)


def test_tree_mask():
    # Lengths change from replay to replay, and with them where every request's rows begin.
    cases = [mask_case(seed, 5, 24, longest=50) for seed in SEEDS]
    ancestors, lengths = cases[0].ancestors.cuda(), cases[0].lengths.cuda()
    mask = torch.zeros(5 * 24 * (50 + 24), dtype=torch.bool, device="cuda")
    graph = captured(lambda: tree_mask(ancestors, lengths, mask))
    for case in cases:
        mask.zero_()
        ancestors.copy_(case.ancestors)
        lengths.copy_(case.lengths)
        graph.replay()
        wanted = torch.zeros(len(mask), dtype=torch.bool)
        assert torch.equal(mask.cpu(), tree_mask_reference(case.ancestors, case.lengths, wanted))
