"""What a block sees and what its rows are labelled with, cell by cell on twelve tokens."""

from __future__ import annotations

import torch

from sglang_dflash.train import blocks

TOKENS = torch.arange(100, 112).unsqueeze(0)
IN_RESPONSE = (torch.arange(12) >= 4).unsqueeze(0)
MASK = 7


def drawn(visible: torch.Tensor) -> list[str]:
    return ["".join("#" if cell else "." for cell in row) for row in visible.tolist()]


def test_a_block_sees_the_context_strictly_before_its_anchor() -> None:
    anchors = torch.tensor([[4, 6, 11]])
    visible = blocks.context_visible(anchors, 12, 4)
    assert drawn(visible[0, :, 0]) == ["####........", "######......", "###########."]


def test_sliding_rows_see_a_window_that_moves_with_them() -> None:
    visible = blocks.context_visible(torch.tensor([[6]]), 12, 4, window=5)
    # Rows stand at 6, 7, 8 and 9; a window of five holds the row itself and four before.
    assert drawn(visible[0, 0]) == ["..####......", "...###......", "....##......", ".....#......"]


def test_rows_of_a_block_see_all_of_it_or_what_is_behind_them() -> None:
    assert drawn(blocks.block_visible(3, causal=False)) == ["###", "###", "###"]
    assert drawn(blocks.block_visible(3, causal=True)) == ["#..", "##.", "###"]


def test_row_k_is_labelled_with_the_token_k_after_the_anchor() -> None:
    anchors = torch.tensor([[4, 6, 10]])
    kept = torch.ones(1, 3, dtype=torch.bool)
    made = blocks.build(TOKENS, IN_RESPONSE, anchors, kept, 4, MASK)
    assert made.tokens[0].tolist() == [[104, 7, 7, 7], [106, 7, 7, 7], [110, 7, 7, 7]]
    assert made.labels[0].tolist() == [[105, 106, 107], [107, 108, 109], [111, 0, 0]]
    assert made.labelled[0].tolist() == [[True] * 3, [True] * 3, [True, False, False]]


def test_labels_end_where_the_response_does_and_padding_blocks_have_none() -> None:
    in_response = IN_RESPONSE.clone()
    in_response[0, 8] = False  # a next turn's prompt
    anchors = torch.tensor([[6, 6]])
    made = blocks.build(TOKENS, in_response, anchors, torch.tensor([[True, False]]), 5, MASK)
    assert made.labelled[0].tolist() == [[True, False, False, False], [False] * 4]


def test_anchors_are_response_tokens_with_a_successor_drawn_once_each() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn_all = blocks.sample_anchors(IN_RESPONSE[0], 100, generator)
    assert drawn_all.tolist() == [4, 5, 6, 7, 8, 9, 10]
    some = blocks.sample_anchors(IN_RESPONSE[0], 3, generator)
    assert len(some) == 3
    assert some.tolist() == sorted(set(some.tolist()))
