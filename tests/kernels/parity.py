"""Each kernel against its reference on one case; on the GPU, and on the CPU when interpreted."""

from __future__ import annotations

import torch
from sglang_dflash.kernels.accept import Accepted, accept_reference, launch_accept
from sglang_dflash.kernels.append_context import (
    append_context_reference,
    launch_append_context,
)
from sglang_dflash.kernels.grow_tree import DraftTree, grow_tree_reference, launch_grow_tree
from sglang_dflash.kernels.merge_topk import (
    Candidates,
    launch_merge_topk,
    merge_topk_reference,
)
from sglang_dflash.kernels.move_rows import launch_move_rows, move_rows_reference
from sglang_dflash.kernels.prepare_block import (
    DraftBlock,
    launch_prepare_block,
    prepare_block_reference,
)
from sglang_dflash.kernels.topk import TopK, launch_topk, topk_reference
from sglang_dflash.kernels.tree_mask import launch_tree_mask, tree_mask_reference

from tests.kernels.cases import (
    SENTINEL,
    AcceptCase,
    BlockCase,
    ContextCase,
    LogitsCase,
    MaskCase,
    MoveCase,
    T,
    TreeCase,
    to,
)

TOLERANCE = {torch.float32: 4e-6, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Of keys, relative and absolute: sums differ in order, so that a rounding of the normed key (of
magnitude 6 at most) may tip over to the neighbouring value."""


def filled(out: T) -> T:
    """Outputs full of a value that no correct result holds."""
    for tensor in out:
        tensor.fill_(-7)
    return out


def block_outputs(case: BlockCase) -> DraftBlock:
    return filled(
        DraftBlock.empty(len(case.anchors), case.block_size, case.verify_rows, case.anchors.device)
    )


def accept_outputs(case: AcceptCase) -> Accepted:
    return filled(
        Accepted.empty(len(case.tokens), case.output_width, case.lengths.dtype, case.tokens.device)
    )


def tree_outputs(case: TreeCase) -> DraftTree:
    return filled(DraftTree.empty(len(case.ids), case.rows, case.ids.device))


def topk_outputs(case: LogitsCase) -> TopK:
    return filled(TopK.empty(len(case.logits), case.slices, case.candidates, case.logits.device))


def candidates_outputs(case: LogitsCase) -> Candidates:
    return filled(Candidates.empty(len(case.logits), case.candidates, case.logits.device))


def assert_equal(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for field, actual, expected in zip(type(wanted)._fields, found, wanted, strict=True):
        assert actual.dtype == expected.dtype, field
        assert torch.equal(actual.cpu(), expected.cpu()), (field, actual, expected)


def check_prepare_block(case: BlockCase, device: str) -> None:
    on_device = to(case, device)
    found = launch_prepare_block(
        *on_device[:4], mask_token_id=case.mask_token_id, out=block_outputs(on_device)
    )
    wanted = prepare_block_reference(
        *case[:4], mask_token_id=case.mask_token_id, out=block_outputs(case)
    )
    assert_equal(found, wanted)


def check_accept(case: AcceptCase, device: str) -> None:
    on_device = to(case, device)
    found = launch_accept(*on_device[:6], out=accept_outputs(on_device))
    assert_equal(found, accept_reference(*case[:6], out=accept_outputs(case)))


def check_append_context(case: ContextCase, device: str) -> None:
    on_device = to(case, device)
    found, wanted = on_device.cache(), case.cache()
    for launch, inputs, cache in (
        (launch_append_context, on_device, found),
        (append_context_reference, case, wanted),
    ):
        launch(
            inputs.kv,
            cache,
            positions=inputs.positions,
            slots=inputs.slots,
            commit_lengths=inputs.commit_lengths,
            rows_per_request=inputs.rows_per_request,
        )
    tolerance = max(TOLERANCE[case.kv.dtype], TOLERANCE[case.cache_dtype])
    for actual, expected in zip(found.k_cache, wanted.k_cache, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)
        untouched = expected == SENTINEL
        assert (actual.cpu()[untouched] == SENTINEL).all()
        # In half precision, rounding at other places than the reference would stay within the
        # tolerance; it would not stay this rare. Triton's interpreter truncates to bfloat16
        # instead of rounding, so there float16 stands for both.
        exact = {torch.float16} if device == "cpu" else {torch.float16, torch.bfloat16}
        if case.kv.dtype in exact:
            differing = int((actual.cpu() != expected).sum())
            assert differing <= max(2, 0.03 * int((~untouched).sum()))
    for actual, expected in zip(found.v_cache, wanted.v_cache, strict=True):
        assert torch.equal(actual.cpu(), expected)


def check_move_rows(case: MoveCase, device: str) -> None:
    on_device = to(case, device)
    found, wanted = on_device.layers(), case.layers()
    launch_move_rows(found, *on_device[1:])
    move_rows_reference(wanted, *case[1:])
    for actual, expected in zip(found.tensors, wanted.tensors, strict=True):
        assert torch.equal(actual.cpu(), expected)


def check_tree_mask(case: MaskCase, device: str) -> None:
    found = launch_tree_mask(*to(case, device))
    assert torch.equal(found.cpu(), tree_mask_reference(*to(case, "cpu")))


def check_tree(case: TreeCase, device: str) -> None:
    options = {"keep_spine": case.keep_spine, "spine_discount": case.spine_discount}
    on_device = to(case, device)
    found = launch_grow_tree(*on_device[:4], **options, out=tree_outputs(on_device))
    assert_equal(found, grow_tree_reference(*case[:4], **options, out=tree_outputs(case)))


def check_topk(case: LogitsCase, device: str) -> None:
    on_device = to(case, device)
    found = launch_topk(on_device.logits, first_id=case.first_id, out=topk_outputs(on_device))
    wanted = topk_reference(case.logits, first_id=case.first_id, out=topk_outputs(case))
    assert torch.equal(found.keys.cpu(), wanted.keys)
    torch.testing.assert_close(found.lse.cpu(), wanted.lse, rtol=1e-6, atol=1e-5)


def check_merge_topk(case: LogitsCase, device: str) -> None:
    best = topk_reference(case.logits, first_id=case.first_id, out=topk_outputs(case))
    found = launch_merge_topk(to(best, device), out=candidates_outputs(to(case, device)))
    wanted = merge_topk_reference(best, out=candidates_outputs(case))
    assert torch.equal(found.ids.cpu(), wanted.ids)
    assert torch.equal(found.keys.cpu(), wanted.keys)
    for actual, expected in ((found.log_q, wanted.log_q), (found.lse, wanted.lse)):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=1e-5)
