"""The draft network: nothing leaks into a block, and sliding layers are causal."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.train.model import DraftModel, default_target_layer_ids

LENGTH, SIZE, HIDDEN = 12, 4, 32


def draft_model(sliding: bool = False, layers: int = 2) -> DraftModel:
    torch.manual_seed(0)
    config = {
        "model_type": "qwen3",
        "block_size": SIZE,
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "attention_bias": False,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * layers,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 5},
    }
    if sliding:
        config |= {"sliding_window": 5, "use_sliding_window": True}
    model = DraftModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs(anchors: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    embedded = torch.randn(1, len(anchors), SIZE, HIDDEN, generator=generator)
    features = torch.randn(1, LENGTH, 2 * HIDDEN, generator=generator)
    return embedded, features, torch.tensor([anchors])


@pytest.mark.parametrize("sliding", [False, True])
def test_features_at_and_behind_the_anchor_change_nothing(sliding: bool) -> None:
    model = draft_model(sliding)
    embedded, features, anchors = inputs([4, 9])
    before = model(embedded, features, anchors)
    changed = features.clone()
    changed[:, 4:] += 1
    after = model(embedded, changed, anchors)
    assert torch.equal(before[0, 0], after[0, 0])
    assert not torch.allclose(before[0, 1], after[0, 1])
    changed = features.clone()
    changed[:, 3] += 1
    assert not torch.allclose(before[0, 0], model(embedded, changed, anchors)[0, 0])


def test_overlapping_blocks_do_not_see_each_other() -> None:
    model = draft_model()
    embedded, features, anchors = inputs([5, 6])
    both = model(embedded, features, anchors)
    changed = embedded.clone()
    changed[:, 1] += 1
    assert torch.equal(both[0, 0], model(changed, features, anchors)[0, 0])
    alone = model(embedded[:, :1], features, anchors[:, :1])
    torch.testing.assert_close(both[:, :1], alone)


@pytest.mark.parametrize("sliding", [False, True])
def test_rows_see_later_rows_of_their_block_unless_layers_slide(sliding: bool) -> None:
    model = draft_model(sliding)
    embedded, features, anchors = inputs([6])
    before = model(embedded, features, anchors)
    changed = embedded.clone()
    changed[:, :, 2] += 1
    after = model(changed, features, anchors)
    unchanged = torch.allclose(before[0, 0, :2], after[0, 0, :2])
    assert unchanged == sliding


def test_a_sliding_layer_forgets_what_its_window_left() -> None:
    model = draft_model(sliding=True, layers=1)
    embedded, features, anchors = inputs([10])
    before = model(embedded, features, anchors)
    changed = features.clone()
    changed[:, :6] += 1
    assert torch.equal(before, model(embedded, changed, anchors))


def test_taps_follow_the_published_rule() -> None:
    assert default_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(32, 5) == [1, 8, 15, 22, 29]
    assert default_target_layer_ids(64, 5) == [1, 16, 31, 46, 61]
    assert default_target_layer_ids(24, 1) == [12]
