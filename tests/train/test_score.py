"""The scorer counts rounds as a server does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_dflash.proposal import TreeShape
from sglang_dflash.train.export import drafter_config
from sglang_dflash.train.features import FrozenTarget
from sglang_dflash.train.model import DraftModel
from sglang_dflash.train.records import Record
from sglang_dflash.train.score import NO_TOKEN, Score, accept_lengths, right_tokens
from tests.support.training import random_llama, training_config, write_records


def test_rounds_are_walked_from_anchor_to_anchor() -> None:
    score = Score()
    # Eight tokens: the first from the prefill, seven to commit. Anchors 0, 3, 4 and 6.
    score.add([2, 9, 9, 0, 1, 9, 3], block_size=4)
    assert (score.rounds, score.tokens) == (4, 7)
    assert score.accept_length == pytest.approx(7 / 4)
    # Near the end fewer positions have a token to meet.
    assert score.offered == [4, 3, 3]
    assert score.accepted == [3, 1, 0]


def test_scores_add_up() -> None:
    one, other = Score(), Score()
    one.add([1, 0, 0], 4)
    other.add([0, 0], 4)
    one.merge(other)
    assert (one.rounds, one.tokens) == (4, 5)


def test_an_empty_answer_has_no_rounds() -> None:
    score = Score()
    score.add([], 4)
    assert score.accept_length == 1.0


def random_pair(tmp_path: Path) -> tuple[FrozenTarget, DraftModel]:
    target_folder = random_llama(tmp_path / "target")
    data = write_records(tmp_path / "data.jsonl", 2)
    config = training_config(tmp_path, target_folder, data)
    target = FrozenTarget(str(target_folder), [0, 2], torch.float32, torch.device("cpu"))
    shape = drafter_config(config, target.config)
    shape["dflash_config"]["target_layer_ids"] = [0, 2]
    torch.manual_seed(0)
    model = DraftModel(shape).eval()
    return target, model


@pytest.mark.parametrize("rows", [8, 4096])
def test_lengths_equal_those_of_blocks_drafted_one_by_one(tmp_path: Path, rows: int) -> None:
    target, model = random_pair(tmp_path)
    record = Record([3, 4, 5, 6], [7, 7, 7, 8, 8, 8, 9, 9], "s")
    (got,) = accept_lengths(model, target, record, "float32", rows)

    tokens = record.tokens
    want = []
    for anchor in range(4, len(tokens) - 1):
        block = torch.tensor([[[tokens[anchor], *[model.mask_token_id] * 3]]])
        # The target has read nothing behind the anchor yet.
        features = target.features(torch.tensor([tokens[:anchor]]))
        with torch.no_grad():
            hidden = model(target.embed(block), features, torch.tensor([[anchor]]))
        drafted = (hidden[0, 0, 1:] @ target.head.T).argmax(-1).tolist()
        right = 0
        for said, meant in zip(drafted, tokens[anchor + 1 :], strict=False):
            if said != meant:
                break
            right += 1
        want.append(right)
    assert got == want


def right_in_tree(text: list[list[int]], **shape: float) -> list[int]:
    """Of blocks with marginals .6, .3, .1 over the tokens 5, 6, 7 at each of three positions."""
    logits = torch.full((len(text), 3, 9), -30.0)
    logits[:, :, 5:8] = torch.tensor([0.6, 0.3, 0.1]).log()
    (right,) = right_tokens(logits.flatten(0, 1), torch.tensor(text), [TreeShape(**shape)])
    return right.tolist()


def test_a_text_is_followed_through_the_tree() -> None:
    # The best nodes: 5 (.6), 55 (.36), 6 (.3), 555 (.216), 56 and 65 (.18), ..
    text = [[5, 5, 5], [6, 5, 5], [5, 6, 5], [7, 5, 5], [6, 5, NO_TOKEN], [8, 8, 8]]
    assert right_in_tree(text, rows=4, candidates=3) == [3, 0, 1, 0, 0, 0]
    assert right_in_tree(text, rows=4, candidates=3, keep_spine=False) == [2, 1, 1, 0, 1, 0]
    assert right_in_tree(text, rows=7, candidates=3) == [3, 2, 2, 0, 2, 0]
    assert right_in_tree(text, rows=128, candidates=2) == [3, 3, 3, 0, 2, 0]
    assert right_in_tree(text, rows=128, candidates=3) == [3, 3, 3, 3, 2, 0]


def test_a_tree_of_the_spine_alone_scores_as_the_chain(tmp_path: Path) -> None:
    target, model = random_pair(tmp_path)
    generator = torch.Generator().manual_seed(0)
    answer = torch.randint(3, 20, (40,), generator=generator).tolist()
    record = Record([3, 4, 5, 6], answer, "s")

    shapes = [None, TreeShape(rows=model.block_size), TreeShape(rows=64), TreeShape(64, 2)]
    chain, spine, wide, narrow = accept_lengths(model, target, record, "float32", 64, shapes)
    assert spine == chain
    assert all(one >= other for one, other in zip(wide, chain, strict=True))
    assert sum(wide) >= sum(narrow) >= sum(chain)
    assert sum(wide) > sum(chain)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_targets_tied_or_not(tmp_path: Path, tied: bool) -> None:
    folder = random_llama(tmp_path / "target", tied=tied)
    target = FrozenTarget(str(folder), [1], torch.float32, torch.device("cpu"))
    same = torch.equal(target.head, target.embed(torch.arange(len(target.head))))
    assert same == tied
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        hidden = target.model.model(tokens).last_hidden_state
        logits = target.model(tokens).logits
    torch.testing.assert_close(hidden @ target.head.T, logits)


def test_features_are_the_residual_stream_after_each_tapped_layer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = random_llama(tmp_path / "target")
    target = FrozenTarget(str(folder), [0, 2], torch.float32, torch.device("cpu"))
    tokens = torch.tensor([[1, 2, 3, 4]])
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = whole(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.features(tokens), torch.cat((states[1], states[3]), -1))
