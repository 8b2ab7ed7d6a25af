"""Whether a drafter was made for what is being served."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_dflash.provenance import fingerprint, mismatches, template_hash


def test_two_targets_of_one_shape_have_different_fingerprints() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(100, 8, generator=generator) for _ in range(2))
    assert fingerprint(one, one) == fingerprint(one.clone(), one.clone())
    assert fingerprint(one, one) != fingerprint(other, one)
    assert fingerprint(one, one) != fingerprint(one, other)


def test_a_target_has_one_fingerprint_in_every_dtype_it_is_served_in() -> None:
    weights = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    published = weights.bfloat16()
    assert fingerprint(published, published) == fingerprint(published.float(), published.float())
    assert fingerprint(weights, weights) == fingerprint(published, published)


def test_a_template_has_a_hash_and_its_absence_none() -> None:
    assert template_hash(SimpleNamespace(chat_template=None)) is None
    assert template_hash(None) is None
    one, other = (template_hash(SimpleNamespace(chat_template=t)) for t in ("a", "b"))
    assert one
    assert other
    assert one != other


def test_only_what_is_known_on_both_sides_is_compared() -> None:
    training = {"target": "T", "target_fingerprint": "a", "chat_template_sha256": "b"}
    assert mismatches(None, "x", "y") == []
    assert mismatches({}, "x", "y") == []
    assert mismatches({**training, "chat_template_sha256": None}, None, "y") == []
    assert mismatches(training, "a", "b") == []
    target, template = mismatches(training, "x", "y")
    assert "for another target (T;" in target
    assert "another chat template" in template
